"""A large answer is written beside the next call, if nobody else can write to it. Nothing else changes."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from asyncwg import (
    Call,
    GroupClosedError,
    ResourceError,
    WorkerDiedError,
    WorkerGroup,
    WorkerGroupError,
)
from asyncwg._driver.arena import arena
from asyncwg._driver.pending import Pending
from asyncwg._wire.frames import Kind, pack
from asyncwg._wire.shipment import ARENA_FROM
from tests.leaks import PATIENCE, bounded
from tests.process.workers_beside import ELEMENTS, WAYS, Beside
from tests.process.workers_life import Fifo
from tests.process.workers_values import group

offers_are_made = pytest.mark.skipif(math.isinf(ARENA_FROM), reason="nothing goes by the arena")


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    """A group of one rank."""
    async with group(Beside, 1) as started:
        yield started


class Offers:
    """Keeps back the offers of answers: a rank waits for its place until this is asked to go on."""

    def __init__(self, wg: Any, patch: pytest.MonkeyPatch) -> None:
        self._gang = wg._core.gang
        self._offered = self._gang.transfers.offered
        self._kept: list[tuple[int, int, Pending | None, memoryview]] = []
        self._came = asyncio.Event()
        patch.setattr(self._gang.transfers, "offered", self._take)

    def _take(self, rank: int, call_id: int, pending: Pending | None, body: memoryview) -> None:
        self._kept.append((rank, call_id, pending, memoryview(bytes(body))))
        self._came.set()

    async def come(self) -> None:
        """Wait for one."""
        await bounded(self._came.wait())

    def go_on(self) -> None:
        """Take the offers now, and from now on."""
        self._gang.transfers.offered = self._offered
        for rank, call_id, _, body in self._kept:
            self._offered(rank, call_id, self._gang.calls.get(call_id), body)
        self._kept.clear()

    def refuse(self, why: str) -> None:
        """Grant them no place."""
        for rank, call_id, _, _ in self._kept:
            control = self._gang._ranks[rank].control
            control.send(pack(Kind.GRANT, call_id, why.encode()))
        self._kept.clear()


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Callable[[WorkerGroup], Offers]:
    return lambda wg: Offers(wg, monkeypatch)


async def lie_behind(wg: Any, fifo: Callable[[], Fifo], make: Callable[[], list[Call[Any]]]) -> Any:
    """Return the calls that ``make`` makes, which all lie at the rank before it begins with the first."""
    started, release = fifo(), fifo()
    holding = wg.hold(started, release)
    await bounded(started.taken())
    calls = make()
    await bounded(wg.ping())  # all before it has been sent, to the other lane too
    release.put()
    await bounded(holding)
    return calls


def is_full_of(value: Any, number: int) -> bool:
    if isinstance(value, dict):
        return all(is_full_of(each, number) for each in (value["a"], *value["b"]))
    return len(value) == ELEMENTS and bool((np.asarray(value) == number).all())


@pytest.mark.parametrize("way", WAYS)
async def test_a_result_is_what_it_was_when_it_was_returned_though_the_next_call_writes_to_it(
    wg: WorkerGroup, way: str
) -> None:
    """O-8, with the next call at hand."""
    calls = [(wg.give(way, number), wg.spoil()) for number in range(20)]
    for number, (call, spoilt) in enumerate(calls):
        [value] = await bounded(call)
        assert is_full_of(value, number)
        await bounded(spoilt)


async def test_rows_of_several_ranks_are_joined_though_the_ranks_go_on() -> None:
    async with group(Beside, 2) as wg:
        calls = [wg.rows(torch.arange(4.0) + 10 * step) for step in range(10)]
        for step, call in enumerate(calls):
            rows = await bounded(call)
            assert rows.shape == (4, ELEMENTS)
            assert rows.amin(1).tolist() == rows.amax(1).tolist()
            assert rows[:, 0].tolist() == [10.0 * step + row for row in range(4)]


@offers_are_made
@pytest.mark.parametrize("way", ["nobody has the tensor", "nobody has the array"])
async def test_the_next_call_runs_while_an_answer_waits_for_its_place(
    wg: WorkerGroup,
    fifo: Callable[[], Fifo],
    offers: Callable[[WorkerGroup], Offers],
    way: str,
) -> None:
    kept = offers(wg)
    started, release = fifo(), fifo()
    first, second = await lie_behind(wg, fifo, lambda: [wg.give(way, 1), wg.hold(started, release)])
    await bounded(started.taken())  # and the place is not granted
    kept.go_on()
    [value] = await bounded(first)  # beside the second, that has not ended
    assert is_full_of(value, 1)
    assert not second.done()
    release.put()
    await bounded(second)


@offers_are_made
async def test_the_next_call_waits_for_an_answer_that_it_could_write_to(
    wg: WorkerGroup, fifo: Callable[[], Fifo], offers: Callable[[WorkerGroup], Offers]
) -> None:
    kept = offers(wg)
    started, release = fifo(), fifo()
    first, second = await lie_behind(
        wg, fifo, lambda: [wg.give("a view is kept", 1), wg.hold(started, release)]
    )
    await kept.come()
    await bounded(wg.ping())
    assert "idle" in str(await bounded(wg.stacks(PATIENCE)))  # no method runs
    kept.go_on()
    [value] = await bounded(first)
    assert is_full_of(value, 1)
    await bounded(started.taken())
    assert "in hold" in str(await bounded(wg.stacks(PATIENCE)))
    release.put()
    await bounded(second)


@offers_are_made
async def test_a_rank_answers_in_the_order_of_its_calls(
    wg: WorkerGroup, fifo: Callable[[], Fifo], offers: Callable[[WorkerGroup], Offers]
) -> None:
    kept = offers(wg)
    order: list[str] = []
    calls = await lie_behind(
        wg, fifo, lambda: [wg.fresh(1), wg.number(), wg.fail(), wg.fresh(2), wg.number()]
    )
    for name, call in zip("abcde", calls, strict=True):
        call.add_done_callback(lambda _call, name=name: order.append(name))
    await kept.come()
    await bounded(wg.ping())
    assert order == []
    kept.go_on()
    results: list[Any] = await bounded(asyncio.gather(*calls, return_exceptions=True))
    assert order == list("abcde")
    assert is_full_of(results[0][0], 1)
    assert is_full_of(results[3][0], 2)
    assert results[1] == results[4] == [7]
    assert isinstance(results[2], ValueError | WorkerGroupError)


@offers_are_made
async def test_an_answer_without_a_place_is_an_error_of_its_own_call(
    wg: WorkerGroup, fifo: Callable[[], Fifo], offers: Callable[[WorkerGroup], Offers]
) -> None:
    kept = offers(wg)
    first, second = await lie_behind(wg, fifo, lambda: [wg.fresh(1), wg.number()])
    await kept.come()
    kept.refuse("there is no room")
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(first)
    assert caught.group_contains(ResourceError, match="there is no room")
    kept.go_on()
    assert await bounded(second) == [7]
    assert is_full_of((await bounded(wg.fresh(2)))[0], 2)


@offers_are_made
async def test_a_call_that_is_cancelled_while_its_answer_is_under_way_leaves_the_next_one_alone(
    wg: WorkerGroup, fifo: Callable[[], Fifo], offers: Callable[[WorkerGroup], Offers]
) -> None:
    kept = offers(wg)
    first, second = await lie_behind(wg, fifo, lambda: [wg.fresh(1), wg.number()])
    await kept.come()
    first.cancel()
    await bounded(wg.ping())
    kept.go_on()
    assert await bounded(second) == [7]
    assert is_full_of((await bounded(wg.fresh(2)))[0], 2)
    del first
    assert await _empty(wg)


@offers_are_made
async def test_a_call_that_is_cancelled_beside_an_answer_leaves_the_answer_alone(
    wg: WorkerGroup, fifo: Callable[[], Fifo], offers: Callable[[WorkerGroup], Offers]
) -> None:
    kept = offers(wg)
    started, release = fifo(), fifo()
    first, second = await lie_behind(wg, fifo, lambda: [wg.fresh(1), wg.hold(started, release)])
    await bounded(started.taken())
    second.cancel()
    kept.go_on()
    assert is_full_of((await bounded(first))[0], 1)
    release.put()
    assert await bounded(wg.number()) == [7]


@offers_are_made
async def test_a_rank_that_is_killed_beside_an_answer_is_told_to_have_died_in_the_call_that_ran(
    fifo: Callable[[], Fifo], offers: Callable[[WorkerGroup], Offers]
) -> None:
    async with group(Beside, 1) as wg:
        kept = offers(wg)
        started, release = fifo(), fifo()
        first, second = await lie_behind(wg, fifo, lambda: [wg.fresh(1), wg.hold(started, release)])
        await kept.come()
        await bounded(started.taken())
        os.kill(wg.pids[0], signal.SIGKILL)
        for call in (first, second):
            with pytest.raises(WorkerDiedError):
                await bounded(call)
        broken = wg._core.gang.broken  # type: ignore[union-attr]
        assert isinstance(broken, WorkerDiedError)
        assert broken.method == "Beside.hold"
        del first, second, call
    assert arena().in_use() == 0


@offers_are_made
async def test_a_worker_is_closed_when_the_answer_that_was_under_way_is_over(
    fifo: Callable[[], Fifo], offers: Callable[[WorkerGroup], Offers]
) -> None:
    """E-6."""
    closed = fifo()
    async with group(Beside, 1, closed) as wg:
        kept = offers(wg)
        first, second = await lie_behind(wg, fifo, lambda: [wg.fresh(1), wg.number()])
        await kept.come()
        ending = asyncio.ensure_future(wg.shutdown(grace=30.0))
        with pytest.raises(GroupClosedError):
            await bounded(first)
        with pytest.raises(GroupClosedError):
            await bounded(second)
        kept.go_on()
        await bounded(closed.taken())
        await bounded(ending)
        del first, second
    assert arena().in_use() == 0


async def _empty(group: Any) -> bool:
    gc.collect()
    await bounded(group.number())
    await bounded(group.number())
    return arena().in_use() == 0
