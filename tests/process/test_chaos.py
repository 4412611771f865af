"""What random programs have found, each by itself; and a short random program."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest

from asyncwg import CallTimeoutError, GroupClosedError
from asyncwg.testing import FaultPlan
from benchmarks.chaos import model, player
from benchmarks.chaos.program import program, sizes_of
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import Fifo, group
from tests.process.workers_reliability import Recorder


async def test_a_cancelled_call_whose_bodies_fail_breaks_nothing_off(
    fifo: Callable[[], Fifo],
) -> None:
    """The first of them started the grace for the others, and nobody stopped it."""
    started = fifo()
    async with group(Recorder, error_grace=0.0) as wg:
        call = wg.wait_async(started)
        await bounded(started.taken(2))
        call.cancel()
        gang = wg._core.gang
        assert gang is not None
        await bounded(_until_answered(wg))
        await asyncio.sleep(0)  # a grace of nothing would be over
        assert await bounded(wg.note("after")) == ["after", "after"]
        assert wg.state == "running"


async def _until_answered(wg: object) -> None:
    core = wg._core  # type: ignore[attr-defined]
    while any(core.gang.calls.load):  # noqa: ASYNC110  # nobody tells it
        await asyncio.sleep(0)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_deadline_that_a_worker_sees_first_is_the_same_exception(
    ranks: int, fifo: Callable[[], Fifo]
) -> None:
    """It came as the TimeoutError of a method, and in a group from several ranks."""
    async with group(Recorder, ranks) as wg:
        call = wg.wait_async.options(timeout=0.05)(fifo())
        # The controller's own alarm comes later than the ranks'.
        asyncio.get_running_loop().call_later(0.045, _busy, 0.1)
        with pytest.raises(CallTimeoutError) as caught:
            await bounded(call)
        assert type(caught.value) is CallTimeoutError


def _busy(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while time.monotonic() < end:
        pass


async def test_a_call_that_waits_for_two_ends_when_one_of_them_is_cancelled() -> None:
    """It raised in a callback of the loop, and the call never ended."""
    async with group(Recorder) as wg:
        with FaultPlan().delay(0, 60).on(wg):
            one, other = wg[0].note(1), wg[1].note(2)
            call = wg.note([one, other])
            await bounded(other)
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await bounded(call)


async def test_a_call_that_was_cancelled_on_a_rank_that_has_not_started_it_is_cancelled_there(
    fifo: Callable[[], Fifo],
) -> None:
    """It was held there, and the cancellation came before it ran: it would have waited for ever."""
    seen = fifo()
    async with group(Recorder) as wg:
        with FaultPlan().delay(1, 0.1).on(wg):
            call = wg.until_cancelled(seen)
            await bounded(wg[0].note_async())
            call.cancel()
        # On the other rank it is cancelled before its body begins.
        await bounded(seen.taken())
        await bounded(_until_answered(wg))


@pytest.mark.parametrize("options", [{}, {"executor": "inline"}], ids=["process", "inline"])
async def test_the_calls_of_a_group_that_its_user_has_dropped_end(
    options: dict[str, Any], fifo: Callable[[], Fifo]
) -> None:
    """They waited for ever: the group was ended, and its calls were forgotten."""
    started = fifo()
    wg = group(Recorder, **options)
    await wg.__aenter__()
    call = wg.wait_async(started)
    needs = wg.note(call)
    await bounded(started.taken(2))
    del wg
    gc.collect()
    for each in (call, needs):
        with pytest.raises(GroupClosedError):
            await bounded(each)


@pytest.mark.parametrize("seed", [0, 1])
async def test_a_random_program_does_what_the_model_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reproduce with ``python -m benchmarks.chaos --seed N --operations 150``."""
    # How long things take is not the question here.
    monkeypatch.setattr(player, "BOUND", PATIENCE)
    late = functools.partial(model.late_complaints, bound=PATIENCE)
    monkeypatch.setattr(model, "late_complaints", late)
    chaos = player.Player(sizes_of(seed, 2))
    for op in program(seed, 150, 2):
        await chaos.play(op)
    await chaos.end()
    asyncio.get_running_loop().set_exception_handler(None)
