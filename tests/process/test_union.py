"""Two groups are called as one: together or not at all."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch

import asyncwg
from asyncwg import (
    CallTimeoutError,
    GroupBrokenError,
    PerRank,
    UsageError,
    WorkerDiedError,
    WorkerGroup,
    WorkerGroupError,
)
from asyncwg._driver.arena import arena
from asyncwg._wire.shipment import ARENA_FROM
from tests.hostile import UnpicklableError
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import Fifo
from tests.process.workers_union import Member, Other
from tests.process.workers_values import group
from tests.times import GRACE

LARGE = 1 << 20
"""Rows of a tensor that goes through the arena."""


@pytest.fixture
def grace() -> float:
    """Seconds that ranks have after the first failure; tests of those that never answer give others."""
    return GRACE


@pytest_asyncio.fixture
async def left(grace: float) -> AsyncIterator[WorkerGroup]:
    async with group(Member, 2, "left", name="left", error_grace=grace) as started:
        yield started


@pytest_asyncio.fixture
async def right(grace: float) -> AsyncIterator[WorkerGroup]:
    async with group(Member, 1, "right", name="right", error_grace=grace) as started:
        yield started


async def test_every_rank_of_every_member_is_called_in_their_order(
    left: WorkerGroup, right: WorkerGroup, loop_kind: str
) -> None:
    both = WorkerGroup.union(right, left)
    assert both.world_size == 3
    results = await bounded(both.who(PerRank(["a", "b", "c"])))
    assert results == [("right", 0, "a"), ("left", 0, "b"), ("left", 1, "c")]


async def test_rows_are_split_over_all_ranks_and_joined(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    rows = torch.arange(6)
    assert (await bounded(WorkerGroup.union(left, right).doubled(rows))).tolist() == [
        0, 2, 4, 6, 8, 10,
    ]  # fmt: skip
    assert await bounded(left.notes()) == [[2], [2]]


async def test_large_rows_are_split_over_all_ranks_and_joined(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    rows = torch.arange(3 * LARGE)
    joined = await bounded(WorkerGroup.union(left, right).doubled(rows))
    assert torch.equal(joined, 2 * rows)


async def test_results_go_when_they_are_dropped_and_not_when_garbage_is_collected(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    """Their call and what carried it out held each other, and the results with them."""
    both = WorkerGroup.union(left, right)
    gc.collect()
    gc.disable()
    try:
        call = both.doubled(torch.arange(3 * LARGE))
        await bounded(call)
        assert arena().in_use() > 0 or math.isinf(ARENA_FROM)
        del call
        await bounded(asyncio.gather(left.who(), right.who()))
        assert arena().in_use() == 0
    finally:
        gc.enable()


async def test_both_enter_one_collective(left: WorkerGroup, right: WorkerGroup) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    both = WorkerGroup.union(left, right)
    sums = await bounded(both.sum_of_all(url, PerRank([0, 1, 2]), 3))
    assert sums == [3.0, 3.0, 3.0]


async def test_views_are_members_too(left: WorkerGroup, right: WorkerGroup) -> None:
    both = WorkerGroup.union(left[1], right)
    assert await bounded(both.who(1)) == [("left", 1, 1), ("right", 0, 1)]
    assert await bounded(both[1].who(2)) == ("right", 0, 2)


async def test_methods_that_are_not_registered_and_functions_run_too(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    both = WorkerGroup.union(left, right)
    assert await bounded(both.run(lambda worker, plus: worker.rank + plus, 5)) == [5, 6, 5]
    assert await bounded(both.execute_all("get_cuda_visible_devices")) == ["", "", ""]


async def test_a_call_waits_behind_what_waits_in_one_group_and_keeps_its_place_in_the_other(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    """O-1, for each group."""
    started, release = fifo(), fifo()
    held = right.hold(started, release, "held")
    first = left.who(held)
    together = WorkerGroup.union(left, right).who("together")
    last = left.who("last")
    await bounded(started.taken())
    assert not together.done()
    release.put()
    await bounded(asyncio.gather(first, together, last))
    assert await bounded(left.notes()) == [[["held"], "together", "last"]] * 2
    assert await bounded(right.notes()) == [["held", "together"]]


async def test_a_call_among_the_arguments_means_its_value(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    both = WorkerGroup.union(left, right)
    results = await bounded(both.who({"x": both.who(1)}))
    assert [value for _, _, value in results] == [
        {"x": [("left", 0, 1), ("left", 1, 1), ("right", 0, 1)]}
    ] * 3


async def test_the_error_of_a_call_among_the_arguments_becomes_the_error(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    both = WorkerGroup.union(left, right)
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(both.who(both.fail_on("left")))
    assert caught.group_contains(ValueError, match="left has failed")
    assert await bounded(left.notes()) == [[], []]


async def test_failures_of_both_sides_come_together_and_both_stay_usable(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    both = WorkerGroup.union(left, right)
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(both.run(_raise))
    assert len(caught.value.exceptions) == 3
    assert "3 of 3 ranks" in str(caught.value)
    assert len(await bounded(both.who())) == 3


def _raise(worker: Any) -> None:
    raise ValueError(worker.side)


@pytest.mark.parametrize("grace", [0.1])
@pytest.mark.parametrize("side", ["left", "right"])
async def test_a_failure_on_one_side_ends_the_other_that_waits_for_it(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo], side: str
) -> None:
    """E-3: with the stack of whoever waited."""
    both, started = WorkerGroup.union(left, right), fifo()
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(both.fail_and_leave_the_other_waiting(side, started))
    failed, waiting = (left, right) if side == "left" else (right, left)
    assert {str(error) for error in caught.value.exceptions} == {f"{side} has failed"}
    assert "fail_and_leave_the_other_waiting" in "".join(caught.value.__notes__)
    with pytest.raises(GroupBrokenError, match=f"failed in group '{side}'"):
        waiting.who()
    assert failed.state == ("running" if side == "right" else "broken")


@pytest.mark.parametrize("grace", [0.2])
async def test_a_failure_with_wait_leaves_the_other_running(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, release = fifo(), fifo()
    both = WorkerGroup.union(left, right)
    held = right.hold(started, release)
    await bounded(started.taken())
    with pytest.raises(WorkerGroupError, match=r"[12] of 3 ranks"):
        await bounded(both.fail_on.options(on_error="wait")("left"))
    release.put()
    await bounded(held)
    assert len(await bounded(both.who())) == 3


@pytest.mark.parametrize("grace", [0.1])
async def test_a_death_on_one_side_ends_the_other(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    """E-4."""
    started, release = fifo(), fifo()
    call = WorkerGroup.union(left, right).hold(started, release)
    await bounded(started.taken(3))
    os.kill(right.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await bounded(call)
    assert (left.state, right.state) == ("broken", "broken")


async def test_a_call_that_no_rank_has_started_is_dropped_by_all(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """E-5."""
    started, release = fifo(), fifo()
    both = WorkerGroup.union(left, right)
    both.hold(started, release, "first")
    await bounded(started.taken(3))
    assert both.who("dropped").cancel()
    await bounded(asyncio.gather(*(each.check_health(PATIENCE) for each in (left, right))))
    release.put(3)
    assert await bounded(both.notes()) == [["first"]] * 3


async def test_a_call_that_one_side_has_started_is_run_by_all(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """E-5: otherwise that side would wait in a collective for ever."""
    busy, started, release = fifo(), fifo(), fifo()
    right.hold(busy, release, "busy")
    await bounded(busy.taken())
    both = WorkerGroup.union(left, right)
    call = both.hold(started, release, "together")
    await bounded(started.taken(2))
    assert call.cancel()
    await bounded(asyncio.gather(*(each.check_health(PATIENCE) for each in (left, right))))
    release.put(4)
    assert await bounded(both.notes()) == [["together"], ["together"], ["busy", "together"]]


async def test_a_call_that_waits_is_dropped_and_lets_the_others_pass(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, release = fifo(), fifo()
    held = right.hold(started, release)
    call = WorkerGroup.union(left, right).who(held)
    later = left.who("later")
    assert call.cancel()
    assert await bounded(later) == [("left", 0, "later"), ("left", 1, "later")]
    release.put()
    await bounded(held)


async def test_a_deadline_ends_the_call_on_all_sides(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, release = fifo(), fifo()
    both = WorkerGroup.union(left, right)
    with pytest.raises(CallTimeoutError):
        await bounded(both.hold.options(timeout=0.05)(started, release))
    release.put(3)
    assert len(await bounded(both.who())) == 3


@pytest.mark.parametrize("grace", [0.1])
async def test_a_shutdown_of_one_side_fails_the_call(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, release = fifo(), fifo()
    call = WorkerGroup.union(left, right).hold(started, release)
    await bounded(started.taken(3))
    await bounded(right.shutdown(grace=0))
    with pytest.raises(asyncwg.GroupClosedError):
        await bounded(call)


async def test_what_can_not_be_pickled_reaches_no_rank(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    both = WorkerGroup.union(left, right)
    with pytest.raises(TypeError, match="value"):
        both.who(UnpicklableError())
    assert await bounded(both.notes()) == [[], [], []]


async def test_what_is_shared_is_released_when_all_have_let_go(
    left: WorkerGroup, right: WorkerGroup
) -> None:
    values = asyncwg.share(torch.ones(LARGE))
    call = WorkerGroup.union(left, right).total(values)
    assert await bounded(call) == [LARGE] * 3
    await bounded(call.released())
    del values
    await bounded(asyncio.gather(left.who(), right.who()))
    assert arena().in_use() == 0


async def test_results_come_as_they_land_with_ranks_counted_through(
    left: WorkerGroup, right: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, release = fifo(), fifo()
    busy = left.hold(started, release)
    call = WorkerGroup.union(left, right).who()
    landed = [await bounded(anext(aiter(call.as_completed())))]
    assert [rank for rank, _ in landed] == [2]
    release.put(2)
    await bounded(asyncio.gather(busy, call))


async def test_what_can_be_no_union_is_refused(left: WorkerGroup, right: WorkerGroup) -> None:
    with pytest.raises(UsageError, match="two groups or more"):
        WorkerGroup.union(left)
    with pytest.raises(UsageError, match="twice"):
        WorkerGroup.union(left, left[1])
    with pytest.raises(UsageError, match="takes groups"):
        WorkerGroup.union(left, 3)  # type: ignore[arg-type]
    both = WorkerGroup.union(left, right)
    with pytest.raises(AttributeError, match="did you mean"):
        both.whom()
    with pytest.raises(UsageError, match="runs on one rank"):
        both.alone()
    with pytest.raises(UsageError, match="mesh 'dp'"):
        both.over_a_mesh(torch.ones(3))
    with pytest.raises(TypeError, match="who"):
        both.who(1, 2)
    with pytest.raises(TypeError, match="did you mean 'timeout'"):
        both.who.options(timeot=1)
    with pytest.raises(UsageError, match="sticky is for calls to one rank"):
        both.who.options(sticky="x")


async def test_methods_that_are_registered_differently_are_no_one_call(left: WorkerGroup) -> None:
    async with group(Other, 1, "other") as other:
        with pytest.raises(UsageError, match=r"Member.who and Other.who"):
            WorkerGroup.union(left, other).who()
