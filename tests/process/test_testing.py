"""`asyncwg.testing`: faults strike at the call they name, tasks come in order, leaks are seen."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from asyncwg import (
    CallTimeoutError,
    InternalError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerGroupError,
)
from asyncwg.testing import FaultPlan, Sequencer, no_leaks
from tests.leaks import bounded
from tests.process.workers_life import group
from tests.process.workers_reliability import Recorder


async def test_a_kill_ends_the_rank_at_the_call_it_names(loop_kind: str) -> None:
    async with group(Recorder) as wg:
        with FaultPlan().kill(1, after=3).on(wg):
            assert await bounded(wg.note(1)) == [1, 1]
            assert await bounded(wg.note(2)) == [2, 2]
            with pytest.raises(WorkerDiedError) as caught:
                await bounded(wg.note(3))
        assert (caught.value.rank, caught.value.signal_name) == (1, "SIGKILL")


async def test_a_delay_holds_a_call_back_and_what_is_behind_it_keeps_its_place(
    loop_kind: str,
) -> None:
    async with group(Recorder) as wg:
        with FaultPlan().delay(0, 60).on(wg):
            late, behind, elsewhere = wg[0].note("late"), wg[0].note("behind"), wg[1].note("other")
            assert await bounded(elsewhere) == "other"
            assert not late.done()
            assert not behind.done()
        assert await bounded(behind) == "behind"
        assert await bounded(wg[0].notes()) == ["late", "behind"]


async def test_a_delay_ends_by_itself() -> None:
    async with group(Recorder, 1) as wg:
        with FaultPlan().delay(0, 0.05, after=2).on(wg):
            assert await bounded(wg.note(1)) == [1]
            begun = asyncio.get_running_loop().time()
            assert await bounded(wg.note(2)) == [2]
            assert asyncio.get_running_loop().time() - begun >= 0.05


async def test_a_large_call_is_held_back_too() -> None:
    async with group(Recorder, 1) as wg:
        with FaultPlan().delay(0, 60).on(wg):
            large, small = wg.note(bytes(1 << 20)), wg.note("small")
            assert await bounded(wg.check_health(timeout=60)) != [None]
            assert not small.done()
        assert len((await bounded(large))[0]) == 1 << 20


async def test_a_dropped_call_never_arrives_and_its_deadline_tells(loop_kind: str) -> None:
    async with group(Recorder) as wg:
        with FaultPlan().drop(1, after=1).on(wg):
            with pytest.raises(CallTimeoutError):
                await bounded(wg.note.options(timeout=0.05)("lost"))
            assert await bounded(wg[1].notes()) == []


async def test_a_dropped_call_leaves_the_next_one_alone() -> None:
    async with group(Recorder) as wg:
        with FaultPlan().drop(0).on(wg):
            lost = wg[0].note("lost")
            assert await bounded(wg[0].note("kept")) == "kept"
            assert not lost.done()
            lost.cancel()


async def test_broken_bytes_break_the_group_and_not_the_controller(loop_kind: str) -> None:
    async with group(Recorder) as wg:
        with FaultPlan().corrupt(0, after=2).on(wg):
            assert await bounded(wg.note(1)) == [1, 1]
            with pytest.raises((InternalError, WorkerDiedError)):
                await bounded(wg.note(2))
        assert wg.state == "broken"
        await bounded(wg.restart())
        assert await bounded(wg.note(3)) == [3, 3]


async def test_broken_bytes_inside_of_a_large_answer_are_an_error_of_the_call_or_a_death() -> None:
    async with group(Recorder) as wg:
        with (
            FaultPlan().corrupt(0).on(wg),
            pytest.raises((InternalError, WorkerDiedError, WorkerError, WorkerGroupError)),
        ):
            await bounded(wg.note(os.urandom(1 << 20)))


async def test_a_plan_is_a_value_that_serves_many_groups() -> None:
    plain = FaultPlan()
    deadly = plain.kill(0)
    assert plain == FaultPlan()
    assert deadly == FaultPlan().kill(0)
    for _ in range(2):
        async with group(Recorder, 1) as wg:
            with deadly.on(wg), pytest.raises(WorkerDiedError):
                await bounded(wg.note())


async def test_calls_of_views_and_of_async_methods_count_for_their_ranks() -> None:
    async with group(Recorder) as wg:
        with FaultPlan().drop(1, after=3).on(wg):
            await bounded(wg[0].note("elsewhere"))
            await bounded(wg[1].note(1))
            await bounded(wg.note_async(2))
            lost = wg[1].note(3)
            assert await bounded(wg[1].notes()) == [1, 2]
            lost.cancel()


async def test_nothing_happens_outside_of_the_block() -> None:
    async with group(Recorder, 1) as wg:
        with FaultPlan().drop(0, after=2).on(wg):
            await bounded(wg.note(1))
        assert await bounded(wg.note(2)) == [2]


async def test_a_plan_for_a_rank_that_is_not_there_is_refused() -> None:
    async with group(Recorder, 1) as wg:
        with pytest.raises(UsageError, match="no rank 1"), FaultPlan().kill(1).on(wg):
            pass


async def test_a_plan_for_an_inline_group_is_refused() -> None:
    async with group(Recorder, 1, executor="inline") as wg:
        with pytest.raises(UsageError, match="inline"), FaultPlan().kill(0).on(wg):
            pass


def test_calls_are_counted_from_one() -> None:
    with pytest.raises(UsageError, match="from 1"):
        FaultPlan().kill(0, after=0)


def test_a_delay_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="more than 0"):
        FaultPlan().delay(0, 0)


async def test_a_sequencer_puts_the_blocks_of_two_tasks_in_order(loop_kind: str) -> None:
    turn = Sequencer()
    order: list[int] = []

    async def take(*positions: int) -> None:
        for position in positions:
            async with turn(position):
                order.append(position)

    await bounded(asyncio.gather(take(1, 3), take(0, 2, 4)))
    assert order == [0, 1, 2, 3, 4]


async def test_a_position_of_a_sequencer_is_used_once() -> None:
    turn = Sequencer()
    async with turn(0):
        pass
    with pytest.raises(RuntimeError, match="used before"):
        async with turn(0):
            pass


async def test_a_cancelled_wait_breaks_the_sequence_for_everybody() -> None:
    """They would wait for ever."""
    turn = Sequencer()
    ran: list[int] = []

    async def take(position: int) -> None:
        async with turn(position):
            ran.append(position)

    waiting = asyncio.create_task(take(1))
    behind = asyncio.create_task(take(2))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(RuntimeError, match="broken"):
        await bounded(behind)
    assert ran == []


async def test_an_exception_in_a_block_lets_the_next_one_go_on() -> None:
    turn = Sequencer()
    with pytest.raises(ValueError, match="in the block"):
        async with turn(0):
            raise ValueError("in the block")
    async with turn(1):
        pass


def test_no_leaks_names_a_descriptor_that_is_left() -> None:
    ends: list[int] = []
    with pytest.raises(AssertionError, match="pipe:") as caught, no_leaks(settle=0.05):
        ends.extend(os.pipe())
    for end in ends:
        os.close(end)
    assert f"descriptor {ends[0]}" in str(caught.value)


def test_no_leaks_names_a_process_that_is_left() -> None:
    left: list[subprocess.Popen[bytes]] = []
    with pytest.raises(AssertionError, match="input"), no_leaks(settle=0.05):
        left.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
    left[0].communicate(b"\n")


async def test_no_leaks_names_a_task_that_is_left(loop_kind: str) -> None:
    never = asyncio.Event()
    left: list[asyncio.Task[bool]] = []
    with pytest.raises(AssertionError, match="lost"):
        async with no_leaks(settle=0.05):
            left.append(asyncio.create_task(never.wait(), name="lost"))
    never.set()
    await left[0]


def test_no_leaks_does_not_hide_another_exception() -> None:
    left: list[int] = []

    def leak_and_fail() -> None:
        left.extend(os.pipe())
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"), no_leaks(settle=0.05):
        leak_and_fail()
    for end in left:
        os.close(end)


async def test_a_group_that_was_shut_down_is_no_leak(loop_kind: str) -> None:
    async with no_leaks(), group(Recorder) as wg:
        assert await bounded(wg.note(b"x" * 200_000)) == [b"x" * 200_000] * 2


async def test_a_group_that_still_runs_is_a_leak() -> None:
    wg = group(Recorder, 1)
    with pytest.raises(AssertionError, match="process"):
        async with no_leaks(settle=0.05):
            await wg.__aenter__()
    await wg.shutdown()
