"""Deadlines and cancellation: they reach the workers and never bring ranks out of step (E-5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from asyncwg import CallTimeoutError
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import AsyncSteps, Fifo, Steps, group


async def test_a_call_that_no_rank_has_started_runs_on_none(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        wg.hold(started, release, "first")
        await bounded(started.taken(2))
        dropped = wg.note("dropped")
        assert dropped.cancel()
        # The answers to the votes come by a way of their own: let them come before the ranks go on.
        await bounded(wg.check_health(timeout=PATIENCE))
        release.put(2)
        assert await bounded(wg.notes()) == [["first"], ["first"]]


async def test_a_call_that_one_rank_has_started_runs_on_all(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """Otherwise rank 0 would wait in a collective for ever."""
    busy, started, release = fifo(), fifo(), fifo()
    async with group(Steps) as wg:
        wg[1].hold(busy, release, "busy")
        await bounded(busy.taken())
        call = wg.hold(started, release, "on both or none")
        await bounded(started.taken())  # by rank 0
        assert call.cancel()
        await bounded(wg.check_health(timeout=PATIENCE))
        release.put(3)
        assert await bounded(wg.notes()) == [["on both or none"], ["busy", "on both or none"]]


async def test_cancelled_calls_between_others_leave_all_ranks_in_step(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """Whatever happens to the cancelled ones happens on all ranks."""
    started, release = fifo(), fifo()
    async with group(Steps, 3) as wg:
        wg[1].hold(started, release, "held")
        await bounded(started.taken())
        calls = [wg.note(number) for number in range(20)]
        for call in calls[::3]:
            call.cancel()
        release.put()
        first, second, third = await bounded(wg.notes())
    assert first == third
    assert second == ["held", *first]
    assert [number for number in range(20) if number % 3] == [n for n in first if n % 3]


@pytest.mark.parametrize("by", ["cancel", "deadline"])
async def test_an_async_call_that_was_sent_and_that_no_rank_has_started_runs_on_none(
    by: str, fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """It lies at the ranks, whose loops are busy."""
    started, release = fifo(), fifo()
    async with group(AsyncSteps) as wg:
        busy = wg.hold_the_loop(started, release)
        await bounded(started.taken(2))
        if by == "cancel":
            dropped = wg.note_async("dropped")
            dropped.cancel()
            with pytest.raises(asyncio.CancelledError):
                await bounded(dropped)
        else:
            with pytest.raises(CallTimeoutError):
                await bounded(wg.note_async.options(timeout=0.01)("dropped"))
        following = wg.note_async("following")
        # The answers to the votes come by a way of their own: let them come before the ranks go on.
        await bounded(wg.check_health(timeout=PATIENCE))
        release.put(2)
        assert await bounded(following) == ["following"] * 2
        assert await bounded(wg.notes_async()) == [["following"], ["following"]]
        await bounded(busy)


async def test_an_async_call_that_one_rank_has_started_is_cancelled_on_all(
    fifo: Callable[[], Fifo],
) -> None:
    """Rank 1 has it too, and has not started it."""
    started, release, began, seen = fifo(), fifo(), fifo(), fifo()
    async with group(AsyncSteps) as wg:
        busy = wg[1].hold_the_loop(started, release)
        await bounded(started.taken())
        call = wg.wait_until_cancelled(began, seen)
        await bounded(began.taken())  # by rank 0
        call.cancel()
        await bounded(seen.taken())
        release.put()
        await bounded(busy)
        assert await bounded(wg.echo_async("usable")) == ["usable"] * 2


async def test_an_async_call_that_waits_for_another_call_and_is_cancelled_runs_on_none(
    fifo: Callable[[], Fifo],
) -> None:
    """A call that waits for the value of another one has not been sent."""
    started, release = fifo(), fifo()
    async with group(AsyncSteps) as wg:
        needed = wg[0].hold(started, release, "needed")
        dropped = wg.note_async(needed)
        assert dropped.cancel()
        release.put()
        await bounded(needed)
        assert await bounded(wg.notes_async()) == [[], []]


async def test_cancel_answers_false_when_the_call_has_ended() -> None:
    async with group(Steps) as wg:
        call = wg.echo(1)
        await bounded(call)
        assert not call.cancel()
        assert not call.cancelled()


async def test_a_timeout_frees_the_caller_at_once_and_the_worker_stays_busy(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """To the users' surprise: https://github.com/python-arq/arq/issues/395.

    See also https://github.com/dano/aioprocessing/issues/23.
    """
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        call = wg.hold(started, release, "late")
        await bounded(started.taken(2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.01)
        following = wg.echo("following")
        await bounded(wg.check_health(timeout=PATIENCE))
        assert not following.done()
        release.put(2)
        assert await bounded(following) == ["following"] * 2


async def test_a_restart_frees_a_busy_worker_now(fifo: Callable[[], Fifo]) -> None:
    """https://github.com/python-arq/arq/issues/395."""
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        call = wg.hold(started, release)
        await bounded(started.taken(2))
        call.cancel()
        await bounded(wg.restart(grace=0.1))
        assert await bounded(wg.echo("free")) == ["free"] * 2


async def test_the_timeout_of_a_call_is_a_timeout_error_that_names_the_method(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        with pytest.raises(CallTimeoutError, match=r"Steps\.hold.*0\.01 s") as caught:
            await bounded(wg.hold.options(timeout=0.01)(started, release))
        assert isinstance(caught.value, TimeoutError)
        release.put(2)
        assert await bounded(wg.echo("usable")) == ["usable"] * 2


async def test_a_call_that_expires_before_any_rank_starts_it_runs_on_none(
    fifo: Callable[[], Fifo],
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        wg.hold(started, release, "first")
        await bounded(started.taken(2))
        with pytest.raises(CallTimeoutError):
            await bounded(wg.note.options(timeout=0.01)("expired"))
        await bounded(wg.check_health(timeout=PATIENCE))
        release.put(2)
        assert await bounded(wg.notes()) == [["first"], ["first"]]


async def test_a_call_that_expires_in_the_controller_is_never_sent(
    fifo: Callable[[], Fifo],
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as source, group(Steps, 1) as wg:
        needed = source[0].hold(started, release, "needed")
        with pytest.raises(CallTimeoutError):
            await bounded(wg.note.options(timeout=0.01)(needed))
        release.put()
        await bounded(needed)
        assert await bounded(wg.notes()) == [[]]


async def test_a_method_knows_what_is_left_of_its_deadline(loop_kind: str) -> None:
    async with group(Steps, 1) as wg:
        (remaining,) = await bounded(wg.remaining.options(timeout=50)())
        assert 0 < remaining <= 50


async def test_a_call_that_a_method_makes_has_what_is_left_of_the_methods_deadline() -> None:
    """E-5: nested calls inherit it."""
    async with group(Steps, 1) as wg:
        call = wg.remaining_in_a_nested_call.options(timeout=50)()
        (remaining,) = await bounded(call)
        assert 0 < remaining < 50
        assert await bounded(wg.remaining_in_a_nested_call()) == [None]


async def test_a_call_without_a_deadline_has_all_the_time() -> None:
    async with group(Steps, 1) as wg:
        assert await bounded(wg.remaining()) == [None]


async def test_a_running_def_method_sees_that_its_caller_has_gone(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, seen = fifo(), fifo()
    async with group(Steps) as wg:
        call = wg.until_cancelled(started, seen)
        await bounded(started.taken(2))
        call.cancel()
        await bounded(seen.taken(2))
        assert await bounded(wg.echo("usable")) == ["usable"] * 2


async def test_a_running_def_method_sees_that_its_deadline_has_passed(
    fifo: Callable[[], Fifo],
) -> None:
    started, seen = fifo(), fifo()
    async with group(Steps) as wg:
        call = wg.until_cancelled.options(timeout=0.5)(started, seen)
        started.take_here(2)
        with pytest.raises(CallTimeoutError):
            await bounded(call)
        await bounded(seen.taken(2))


async def test_a_running_async_method_is_cancelled(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, seen = fifo(), fifo()
    async with group(AsyncSteps) as wg:
        call = wg.wait_until_cancelled(started, seen)
        await bounded(started.taken(2))
        call.cancel()
        await bounded(seen.taken(2))
        assert await bounded(wg.echo_async("usable")) == ["usable"] * 2


async def test_the_deadline_of_a_call_cancels_a_running_async_method(
    fifo: Callable[[], Fifo],
) -> None:
    started, seen = fifo(), fifo()
    async with group(AsyncSteps) as wg:
        call = wg.wait_until_cancelled.options(timeout=0.5)(started, seen)
        started.take_here(2)
        with pytest.raises(CallTimeoutError):
            await bounded(call)
        await bounded(seen.taken(2))


async def test_a_failing_sibling_in_a_task_group_ends_a_call_on_all_ranks(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, seen = fifo(), fifo()

    async def fail() -> None:
        await started.taken(2)
        raise ValueError("the sibling")

    async with group(Steps) as wg:
        calls: list[Any] = []

        async def both() -> None:
            async with asyncio.TaskGroup() as tasks:
                calls.append(wg.until_cancelled(started, seen))
                tasks.create_task(calls[0])
                tasks.create_task(fail())

        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await bounded(both())
        assert calls[0].cancelled()
        await bounded(seen.taken(2))
        assert await bounded(wg.echo("usable")) == ["usable"] * 2


async def test_an_enclosing_timeout_ends_a_call_on_all_ranks(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """Though it can't be told to them before it expires: asyncio has no way to ask for it."""
    started, seen = fifo(), fifo()
    async with group(Steps) as wg:

        async def limited() -> None:
            async with asyncio.timeout(60) as limit:
                call = wg.until_cancelled(started, seen)
                await started.taken(2)
                limit.reschedule(asyncio.get_running_loop().time())
                await call

        with pytest.raises(TimeoutError):
            await bounded(limited())
        await bounded(seen.taken(2))
        assert await bounded(wg.echo("usable")) == ["usable"] * 2


async def test_cancelling_does_not_wait_for_the_ranks(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """Though one of them is busy and the other has not even started."""
    busy, started, release = fifo(), fifo(), fifo()
    async with group(Steps) as wg:
        wg[1].hold(busy, release)
        await bounded(busy.taken())
        call = wg.hold(started, release)
        await bounded(started.taken())
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        release.put(3)
        await bounded(wg.echo())
