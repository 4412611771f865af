"""The inline executor: all ranks in the test's own process, where a debugger reaches them."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncwg import (
    CallTimeoutError,
    DataProto,
    DispatchError,
    GroupClosedError,
    WorkerGroup,
    WorkerGroupError,
    WorkerStartError,
)
from tests.leaks import bounded
from tests.process.workers_life import Fifo, Late
from tests.process.workers_life import group as group_of
from tests.process.workers_reliability import Recorder, Saving


def group(cls: type = Recorder, ranks: int = 2, *args: Any, **options: Any) -> WorkerGroup:
    return group_of(cls, ranks, *args, executor="inline", **options)


async def test_it_is_this_process_and_has_no_others() -> None:
    async with group() as wg:
        assert await bounded(wg.pid()) == [os.getpid()] * 2
        assert wg.pids == []
        assert wg.alive


async def test_a_def_body_has_run_when_the_call_returns(loop_kind: str) -> None:
    log: list[Any] = []
    async with group() as wg:
        await bounded(wg.run(_remember))
        call = wg.run(_tell)
        log += _told
        assert log == [0, 1]  # rank by rank
        assert not call.done()
        await bounded(call)
    _told.clear()


_told: list[int] = []


def _remember(_worker: Recorder) -> None:
    _told.clear()


def _tell(worker: Recorder) -> None:
    _told.append(worker.rank)


async def test_a_breakpoint_in_a_method_is_reached_in_the_callers_own_stack() -> None:
    def callers(_worker: Recorder) -> bool:
        names = [frame.name for frame in traceback.extract_stack()]
        return "test_a_breakpoint_in_a_method_is_reached_in_the_callers_own_stack" in names

    async with group() as wg:
        assert await bounded(wg.run(callers)) == [True, True]


async def test_ranks_know_their_places() -> None:
    async with group() as wg:
        assert await bounded(wg.place()) == [(0, 2), (1, 2)]
        assert await bounded(wg[1].place()) == (1, 2)


async def test_values_pass_through_bytes_as_between_processes() -> None:
    async with group() as wg:
        value = [1]
        first = await bounded(wg.note(value))
        value.append(2)
        first[0].append(3)
        assert await bounded(wg.notes()) == [[[1]], [[1]]]


async def test_what_can_not_be_pickled_fails_here_too() -> None:
    async with group() as wg:
        with pytest.raises(TypeError, match="can't be pickled"):
            wg.note(threading.Lock())


async def test_a_batch_is_split_and_joined() -> None:
    async with group() as wg:
        rows = torch.arange(4.0)
        assert torch.equal(await bounded(wg.doubled(rows)), rows * 2)
        batch = DataProto.from_dict({"x": rows})
        with pytest.raises(DispatchError):
            wg.doubled(DataProto.from_dict({"x": torch.arange(3)}))
        assert len(batch) == 4


async def test_large_values_pass_without_shared_memory() -> None:
    async with group() as wg:
        large = torch.arange(1 << 18)
        assert torch.equal((await bounded(wg.note(large)))[1], large)


async def test_async_methods_run_on_the_tests_own_loop(loop_kind: str) -> None:
    async def same(_worker: Recorder, number: int) -> bool:
        return id(asyncio.get_running_loop()) == number

    async with group() as wg:
        number = id(asyncio.get_running_loop())
        assert await bounded(wg.run(same, number)) == [True, True]
        assert await bounded(wg.note_async("x")) == ["x", "x"]


async def test_errors_come_as_from_processes() -> None:
    async with group() as wg:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.fail("wrong", 1))
        (error,) = caught.value.exceptions
        assert isinstance(error, ValueError)
        assert getattr(error, "rank", None) == 1
        assert "in fail" in "\n".join(error.__notes__)
        with pytest.raises(ValueError, match="alone"):
            await bounded(wg[0].fail("alone"))


async def test_a_failed_start_tells_what_each_rank_raised() -> None:
    with pytest.raises(WorkerStartError) as caught:
        async with group(Late, 2, "raise"):
            pass
    assert [getattr(error, "rank", None) for error in caught.value.exceptions] == [0, 1]


async def test_a_cancelled_call_cancels_the_bodies_of_its_async_methods(
    fifo: Callable[[], Fifo],
) -> None:
    seen = fifo()
    async with group() as wg:
        call = wg.until_cancelled(seen)
        call.cancel()
        await bounded(seen.taken(2))


async def test_a_deadline_ends_the_wait_for_an_async_method(fifo: Callable[[], Fifo]) -> None:
    seen = fifo()
    async with group() as wg:
        with pytest.raises(CallTimeoutError):
            await bounded(wg.until_cancelled.options(timeout=0.05)(seen))
        await bounded(seen.taken(2))


async def test_an_unawaited_call_is_an_argument() -> None:
    async with group() as wg:
        assert await bounded(wg.note(wg[1].place())) == [(1, 2), (1, 2)]


async def test_setup_and_close_run(fifo: Callable[[], Fifo]) -> None:
    closed = fifo()
    async with group() as wg:
        assert await bounded(wg.run(lambda worker: worker.is_set_up)) == [True, True]
        await bounded(wg.tell_close_to(closed))
    await bounded(closed.taken(2))


async def test_leaving_ends_calls_that_are_under_way(fifo: Callable[[], Fifo]) -> None:
    async with group() as wg:
        call = wg.until_cancelled(fifo())
        await bounded(wg.note())  # or they would not have begun
    with pytest.raises(GroupClosedError):
        await bounded(call)


async def test_a_restart_builds_the_objects_again_and_gives_them_their_state() -> None:
    async with group(Saving) as wg:
        await bounded(wg.add(5))
        await bounded(wg.save())
        await bounded(wg.add(1))
        await bounded(wg.restart())
        assert await bounded(wg.count_and_loaded()) == [(5, 0), (5, 1)]


async def test_health_and_stacks_have_an_answer() -> None:
    async with group() as wg:
        assert await bounded(wg.check_health()) == [0.0, 0.0]
        assert str(await bounded(wg.stacks())) == ""


async def test_two_groups_live_side_by_side() -> None:
    async with group(Recorder, 2) as one, group(Recorder, 3) as other:
        assert await bounded(one.place()) == [(0, 2), (1, 2)]
        assert await bounded(other.place()) == [(0, 3), (1, 3), (2, 3)]
