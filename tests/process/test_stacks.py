"""Where everybody is: stacks on demand, reports of hangs, stacks in errors, health."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncwg import (
    GroupBrokenError,
    GroupClosedError,
    WorkerDiedError,
    WorkerGroup,
    WorkerGroupError,
)
from asyncwg._driver import watch
from asyncwg._driver.stacks import HangReport, Stacks
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import Fifo, group
from tests.process.workers_reliability import Recorder


async def test_stacks_show_where_each_rank_is(loop_kind: str, fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    async with group(Recorder, 3) as wg:
        call = wg[1].hold(started, release)
        await bounded(started.taken())
        seen = await bounded(wg.stacks(PATIENCE))
        assert [each.where == "idle" for each in seen.ranks] == [True, False, True]
        assert "ranks 0, 2 idle" in seen.summary
        assert "in hold" in str(seen)
        release.put()
        assert await bounded(call) == 1


async def test_equal_stacks_are_told_once(fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    async with group(Recorder) as wg:
        call = wg.hold(started, release)
        await bounded(started.taken(2))
        # Both say that they run a moment before they are where they stay.
        told = str(await bounded(_stacks_in(wg, "ranks 0, 1 in take")))
        assert "ranks 0, 1, most recent call first:" in told
        assert told.count(" in hold") == 1
        release.put(2)
        await bounded(call)


async def _stacks_in(wg: WorkerGroup, summary: str) -> Stacks:
    """Ask again until the summary begins so."""
    while True:
        seen = await wg.stacks(PATIENCE)
        if seen.summary.startswith(summary):
            return seen


async def _stacks_with(wg: WorkerGroup, text: str) -> None:
    """Ask again until the stacks have it: a busy machine may not answer in time."""
    while text not in str(await wg.stacks()):
        pass


async def test_asking_for_stacks_changes_nothing(fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    async with group(Recorder) as wg:
        call = wg.hold(started, release)
        await bounded(started.taken(2))
        for _ in range(3):
            assert "no answer" not in (await bounded(wg.stacks(PATIENCE))).summary
        release.put(2)
        assert await bounded(call) == [0, 1]
        assert await bounded(wg.note("after")) == ["after", "after"]


async def test_two_who_ask_at_once_both_get_an_answer() -> None:
    async with group(Recorder) as wg:
        both = await bounded(asyncio.gather(wg.stacks(PATIENCE), wg.stacks(PATIENCE)))
        assert [seen.summary for seen in both] == ["ranks 0, 1 idle"] * 2


async def test_all_who_ask_at_once_are_told_of_the_main_thread(fifo: Callable[[], Fifo]) -> None:
    """Of several signals another thread of the rank could take some, which is in no method."""
    started, release = fifo(), fifo()
    async with group(Recorder) as wg:
        call = wg.hold(started, release)
        await bounded(started.taken(2))
        await bounded(_stacks_in(wg, "ranks 0, 1 in take"))
        for _ in range(20):
            told = await bounded(asyncio.gather(*(wg.stacks(PATIENCE) for _ in range(4))))
            assert {seen.summary.split(" at ")[0] for seen in told} == {"ranks 0, 1 in take"}
        release.put(2)
        await bounded(call)


async def test_stacks_come_while_a_rank_holds_the_gil_in_c(
    loop_kind: str, fifo: Callable[[], Fifo]
) -> None:
    started = fifo()
    async with group(Recorder) as wg:
        stuck = wg[0].hold_the_gil(started)
        await bounded(started.taken())
        await bounded(_stacks_with(wg, "in hold_the_gil"))
        await wg.shutdown(grace=0)
        with pytest.raises(GroupClosedError):
            await bounded(stuck)


async def test_asking_harms_no_rank_whose_other_threads_are_busy() -> None:
    """A handler that reads frames while they change ended the process within some thousand looks."""
    looks = 100
    async with group(Recorder, 1) as wg:
        wg.run(_keep_threads_busy)
        await bounded(_stacks_with(wg, "_keep_threads_busy"))
        for _ in range(looks):
            # Its control lane competes with busy threads for the GIL.
            seen = await bounded(wg.stacks(PATIENCE))
            assert "_keep_threads_busy" in str(seen)
        assert None not in await bounded(wg.check_health(PATIENCE))
        await wg.shutdown(grace=0)


def _keep_threads_busy(_worker: Recorder) -> None:
    import threading

    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)

    def work() -> None:
        while True:
            deep(200)
            exec("def f(n):\n    return n and f(n - 1)\nf(150)", {})

    threading.Thread(target=work, daemon=True).start()
    work()


async def _stopped(pid: int) -> None:
    """Stop a process, and wait until its threads have stopped: they may answer something before."""
    os.kill(pid, signal.SIGSTOP)
    while _states_of_threads(pid) != {"T"}:  # noqa: ASYNC110 - the kernel tells nobody
        await asyncio.sleep(0)


def _states_of_threads(pid: int) -> set[str]:
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {text.rpartition(")")[2].split()[0] for text in texts}


async def test_a_stopped_rank_is_told_as_silent() -> None:
    async with group(Recorder) as wg:
        await bounded(_stopped(wg.pids[1]))
        summary = ""
        for seconds in (0.5, 5, 40):  # one of them is enough for the other one on a busy machine
            if "rank 0 idle" not in summary:
                summary = (await bounded(wg.stacks(timeout=seconds))).summary
        assert summary == "rank 1 no answer; rank 0 idle"
        os.kill(wg.pids[1], signal.SIGCONT)
        assert await bounded(wg.note("after")) == ["after", "after"]


async def test_health_says_who_answers_while_methods_run(
    loop_kind: str, fifo: Callable[[], Fifo]
) -> None:
    started, release = fifo(), fifo()
    async with group(Recorder) as wg:
        call = wg.hold(started, release)
        await bounded(started.taken(2))
        assert None not in await bounded(wg.check_health(PATIENCE))
        release.put(2)
        await bounded(call)


async def _only_silent(wg: WorkerGroup, rank: int) -> None:
    """Ask until one rank alone does not answer: it says that it is about to be stuck before it is."""
    silent: list[int] = []
    while silent != [rank]:
        answers = await wg.check_health(timeout=0.2)
        silent = [rank for rank, seconds in enumerate(answers) if seconds is None]


async def test_health_says_who_does_not_answer(fifo: Callable[[], Fifo]) -> None:
    started = fifo()
    async with group(Recorder) as wg:
        stuck = wg[1].hold_the_gil(started)
        await bounded(started.taken())
        await bounded(_only_silent(wg, 1))
        stuck.cancel()
        await wg.shutdown(grace=0)


async def test_health_of_a_broken_group_raises_what_broke_it() -> None:
    async with group(Recorder) as wg:
        with pytest.raises(WorkerDiedError):
            await bounded(wg.die())
        with pytest.raises(GroupBrokenError):
            await bounded(wg.check_health())


async def test_an_aliveness_check_is_told_of_a_death_once() -> None:
    told: asyncio.Queue[Exception] = asyncio.Queue()
    async with group(Recorder) as wg:
        wg.start_worker_aliveness_check(on_death=told.put_nowait)
        os.kill(wg.pids[0], signal.SIGKILL)
        error = await bounded(told.get())
        assert isinstance(error, WorkerDiedError)
        assert (error.rank, error.signal_name) == (0, "SIGKILL")
    assert told.empty()


async def test_an_aliveness_check_is_not_told_of_a_shutdown() -> None:
    told: list[Exception] = []
    async with group(Recorder) as wg:
        wg.start_worker_aliveness_check(on_death=told.append)
    assert told == []


async def test_a_call_that_hangs_is_reported_once_with_stacks(
    loop_kind: str, fifo: Callable[[], Fifo], caplog: pytest.LogCaptureFixture
) -> None:
    started, release = fifo(), fifo()
    reports: asyncio.Queue[HangReport] = asyncio.Queue()
    async with group(Recorder, hang_after=0.1, on_hang=reports.put_nowait) as wg:
        call = wg[1].hold(started, release)
        started.take_here()  # it is in the method when it is reported
        report = await bounded(reports.get())
        assert (report.group, report.method, report.silent) == ("Recorder", "Recorder.hold", [1])
        assert "in hold" in str(report)
        assert str(report) in caplog.text
        quick = wg.hold(started, release)  # the next report is of another call
        release.put(1)
        assert (await bounded(reports.get())).call_id > report.call_id
        release.put(2)
        assert await bounded(call) == 1
        assert await bounded(quick) == [0, 1]
    assert reports.empty()


async def test_a_call_may_have_a_limit_of_its_own(fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    reports: asyncio.Queue[HangReport] = asyncio.Queue()
    async with group(Recorder, hang_after=None, on_hang=reports.put_nowait) as wg:
        call = wg.hold.options(hang_after=0.05)(started, release)
        report = await bounded(reports.get())
        assert report.seconds == 0.05
        assert report.silent == [0, 1]
        release.put(2)
        await bounded(call)


async def test_a_call_that_ends_in_time_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Though there are calls under way at every moment for longer than that."""
    caplog.set_level(logging.WARNING, "asyncwg")
    loop = asyncio.get_running_loop()
    longest = 1.0
    async with group(Recorder, hang_after=0.5) as wg:
        while longest > 0.4:  # the machine was busy: what took so long may have been reported
            caplog.clear()
            longest = 0.0
            end = loop.time() + 1.2
            while (begun := loop.time()) < end:
                await bounded(wg.note())
                longest = max(longest, loop.time() - begun)
        await bounded(wg.note.options(hang_after=PATIENCE)())
        assert caplog.text == ""


async def test_an_error_carries_the_stacks_of_the_ranks_that_did_not_answer(
    loop_kind: str, fifo: Callable[[], Fifo]
) -> None:
    """E-3."""
    started, release = fifo(), fifo()
    async with group(Recorder, error_grace=0.05, on_error="wait") as wg:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.fail_or_hold(started, release))
        notes = "\n".join(caught.value.__notes__)
        assert "rank 0 had not answered 0.05 s after the first failure" in notes
        assert "in fail_or_hold" in notes
        release.put()
        assert await bounded(wg.note("after")) == ["after", "after"]


async def test_an_error_is_told_though_the_silent_rank_is_stopped(
    fifo: Callable[[], Fifo], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stacks never come."""
    monkeypatch.setattr(watch, "_STACKS_WAIT", 0.3)
    started = fifo()
    started.put(2)
    async with group(Recorder, error_grace=0.05) as wg:
        await bounded(_stopped(wg.pids[0]))
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.fail_or_hold(started, started))
        assert "rank 0 no answer" in "\n".join(caught.value.__notes__)


async def test_equal_tracebacks_of_ranks_are_told_once() -> None:
    async with group(Recorder, 3) as wg:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.fail("everywhere"))
        notes = [error.__notes__ for error in caught.value.exceptions]
        assert sum("in fail" in "\n".join(each) for each in notes) == 1
        assert len(caught.value.exceptions) == 3
