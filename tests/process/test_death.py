"""What a caller gets when a process dies, and what is left of the group: promises E-4 and E-6."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from asyncwg import GroupBrokenError, WorkerDiedError, WorkerGroup
from asyncwg._driver.guardian import guardian
from tests.leaks import bounded
from tests.process.workers_life import Fifo, Mortal, Parent, Steps, alive, group


async def death(call: Any) -> WorkerDiedError:
    """Return the error of a call whose rank dies. Nothing else would end it here."""
    with pytest.raises(WorkerDiedError) as caught:
        await bounded(call)
    return caught.value


async def broken(wg: WorkerGroup) -> Exception:
    """Wait until ``wg`` has seen that it is broken, and return by what."""
    told: asyncio.Queue[Exception] = asyncio.Queue()
    wg.start_worker_aliveness_check(on_death=told.put_nowait)
    return await bounded(told.get())


async def test_a_call_fails_when_a_rank_dies_though_the_others_are_busy(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """The caller stayed blocked: https://github.com/meta-pytorch/monarch/issues/3435. E-4."""
    async with group(Mortal) as wg:
        error = await death(wg.die_after(fifo()))
        assert (error.rank, error.signal_name) == (1, "SIGKILL")


async def test_a_call_fails_when_a_rank_dies_though_the_others_wait_in_a_collective(
    torch_with_its_pipe: None,
) -> None:
    """https://github.com/meta-pytorch/monarch/issues/3435. E-4."""
    async with group(Mortal, preload=None) as wg:
        pids = wg.pids
        error = await death(wg.die_beside_a_collective())
        assert (error.rank, error.signal_name) == (1, "SIGKILL")
        await bounded(wg.shutdown())
        assert alive(pids) == []


async def test_the_survivors_of_a_death_are_ended(fifo: Callable[[], Fifo]) -> None:
    """E-4."""
    async with group(Mortal) as wg:
        pids = wg.pids
        await death(wg.die_after(fifo()))
        await bounded(wg.shutdown())
        assert alive(pids) == []


async def test_an_exit_is_told_with_rank_pid_and_code(loop_kind: str) -> None:
    """Callers waited for ever: https://github.com/python/cpython/issues/82265."""
    async with group(Mortal) as wg:
        pid = wg.pids[1]
        error = await death(wg[1].leave(7))
        assert (error.rank, error.pid, error.exit_code) == (1, pid, 7)
        assert f"rank 1 (pid {pid}) ended with exit code 7 during Mortal.leave" in str(error)


async def test_every_call_that_waits_for_a_dead_rank_fails_with_an_error_of_its_own() -> None:
    """E-4: https://github.com/python/cpython/issues/82265, https://github.com/abacusorg/abacusutils/issues/150."""
    async with group(Mortal) as wg:
        calls = [wg[1].leave(7), *(wg[1].ping(number) for number in range(5))]
        errors = [await death(call) for call in calls]
        assert len({id(error) for error in errors}) == 6
        assert {(error.rank, error.exit_code) for error in errors} == {(1, 7)}


async def test_calls_on_both_lanes_of_other_ranks_fail_with_the_death_too(
    fifo: Callable[[], Fifo],
) -> None:
    """E-4: every pending call of the group."""
    started = fifo()
    async with group(Mortal) as wg:
        calls = [wg[0].hold(started, fifo()), wg[0].hold_async(started)]
        await bounded(started.taken(2))
        wg[1].leave(7)
        assert [(await death(call)).rank for call in calls] == [1, 1]


async def test_a_call_that_waits_for_another_groups_call_fails_with_the_death(
    fifo: Callable[[], Fifo],
) -> None:
    """E-4: a call that has not been sent is pending too."""
    started, release = fifo(), fifo()
    async with group(Steps, 1) as source, group(Mortal, 1) as wg:
        needed = source.hold(started, release)
        call = wg.ping(needed)
        os.kill(wg.pids[0], signal.SIGKILL)
        error = await death(call)
        assert (error.rank, error.method) == (0, "Mortal.ping")
        release.put()
        await bounded(needed)


async def test_a_death_in_one_group_is_seen_while_a_younger_group_lives(
    fifo: Callable[[], Fifo],
) -> None:
    """An end of the pipe stayed open elsewhere: https://github.com/Bogdanp/dramatiq/pull/707."""
    started, release = fifo(), fifo()
    async with group(Mortal) as older, group(Mortal) as younger:
        pending = older.hold(started, release)
        await bounded(started.taken(2))
        os.kill(older.pids[0], signal.SIGKILL)
        assert (await death(pending)).rank == 0
        assert await bounded(younger.ping(1)) == [1, 1]


async def test_no_worker_holds_an_end_of_anothers_sockets_or_pipes() -> None:
    """https://github.com/Bogdanp/dramatiq/pull/707."""
    async with group(Mortal) as a, group(Mortal) as b:
        held = [*await bounded(a.descriptors()), *await bounded(b.descriptors())]
        everything = [target for each in held for target in set(each)]
        assert len(everything) == len(set(everything))


async def test_a_death_is_seen_though_a_forked_child_holds_all_descriptors(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """https://github.com/Bogdanp/dramatiq/pull/707: with fork, the end of file never comes."""
    started = fifo()
    async with group(Mortal, 1) as wg:
        (child,) = await bounded(wg.fork())
        pending = wg.hold(started, fifo())
        await bounded(started.taken())
        os.kill(wg.pids[0], signal.SIGKILL)
        assert (await death(pending)).signal_name == "SIGKILL"
        await bounded(wg.shutdown())
        assert alive([child]) == []


async def test_the_last_words_on_stderr_are_in_the_error(capfd: pytest.CaptureFixture[str]) -> None:
    """The cause was never shown: https://github.com/vllm-project/vllm/issues/53157. E-4."""
    async with group(Mortal) as wg:
        error = await death(wg[1].say_and_die("boom-123"))
        assert (error.rank, error.signal_name) == (1, "SIGKILL")
        assert "SIGKILL" in str(error)
        assert "boom-123" in str(error)
        assert error.stderr_tail[-1] == "boom-123"


async def test_the_last_lines_of_many_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """E-4: more than the pipe holds, and the end of it is what counts."""
    async with group(Mortal, 1) as wg:
        error = await death(wg[0].say_a_lot_and_die(20_000))
        assert error.stderr_tail[-1] == "line 19999"
        assert list(error.stderr_tail) == [f"line {n}" for n in range(19950, 20000)]


async def test_a_group_without_captured_output_says_why_there_are_no_last_words() -> None:
    async with group(Mortal, 1, output="inherit") as wg:
        assert "output='inherit'" in str(await death(wg[0].leave(7)))


async def test_last_words_come_from_the_file_where_output_goes_to_a_folder(
    tmp_path: Any,
) -> None:
    async with group(Mortal, 1, output=tmp_path / "logs") as wg:
        error = await death(wg[0].say_and_die("boom-124"))
        assert error.stderr_tail[-1] == "boom-124"


async def test_health_says_dead_and_the_next_call_raises_at_once(loop_kind: str) -> None:
    """Health still said OK: https://github.com/vllm-project/vllm/issues/53157. E-4."""
    async with group(Mortal) as wg:
        await death(wg[1].leave(7))
        assert not wg.alive
        assert wg.state == "broken"
        with pytest.raises(GroupBrokenError, match="exit code 7") as caught:
            wg.ping()  # not awaited: it raises at the call
        assert isinstance(caught.value.__cause__, WorkerDiedError)


async def test_the_death_of_an_idle_rank_breaks_the_group_at_once(loop_kind: str) -> None:
    """E-4: nobody has to call it to find out."""
    async with group(Mortal) as wg:
        os.kill(wg.pids[0], signal.SIGTERM)
        cause = await broken(wg)
        assert isinstance(cause, WorkerDiedError)
        assert (cause.rank, cause.signal_name) == (0, "SIGTERM")


async def test_a_crash_in_c_is_told_with_signal_pid_rank_and_stack(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No pid, no exit code: https://github.com/python/cpython/issues/139462. E-4."""
    async with group(Mortal) as wg:
        pid = wg.pids[1]
        error = await death(wg[1].crash_in_c())
        text = str(error)
        assert (error.rank, error.pid, error.signal_name) == (1, pid, "SIGSEGV")
        assert "rank 1" in text
        assert str(pid) in text
        assert "SIGSEGV" in text
        assert "Fatal Python error: Segmentation fault" in error.crash_stack
        assert "in crash_in_c" in error.crash_stack


async def test_a_broken_group_works_on_no_rank() -> None:
    """Half of it went on working in silence: https://github.com/temporalio/sdk-python/issues/245.

    See also https://github.com/epam/ai-dial-rag/issues/11.
    """
    async with group(Mortal) as wg:
        os.kill(wg.pids[0], signal.SIGKILL)
        await broken(wg)
        with pytest.raises(GroupBrokenError):
            wg[1].ping()
        with pytest.raises(GroupBrokenError):
            wg.ping()


async def test_a_fresh_group_works_after_one_has_broken() -> None:
    """https://github.com/temporalio/sdk-python/issues/245."""
    async with group(Mortal) as wg:
        await death(wg.leave(1))
    async with group(Mortal) as fresh:
        assert await bounded(fresh.ping(1)) == [1, 1]


async def test_a_broken_group_works_again_after_a_restart(loop_kind: str) -> None:
    """E-4."""
    async with group(Mortal) as wg:
        before = wg.pids
        await death(wg.leave(1))
        await bounded(wg.restart())
        assert await bounded(wg.ping(1)) == [1, 1]
        assert set(before).isdisjoint(wg.pids)
        assert alive(before) == []


@pytest.mark.parametrize("kind", ["subprocess", "stubborn", "daemon", "multiprocessing"])
async def test_what_a_dead_worker_had_started_is_ended(kind: str) -> None:
    """E-6: its parent is gone, and nobody else would."""
    async with group(Parent) as wg:
        children = (await bounded(wg.begin(kind)))[1]
        os.kill(wg.pids[1], signal.SIGKILL)
        await broken(wg)
        await bounded(wg.shutdown())
        assert alive(children) == []


async def test_a_call_fails_when_the_guardian_is_killed(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """E-4: the workers die with it."""
    started = fifo()
    async with group(Mortal) as wg:
        pids = wg.pids
        pending = wg.hold(started, fifo())
        await bounded(started.taken(2))
        keeper = guardian().pid
        os.kill(keeper, signal.SIGKILL)
        error = await death(pending)
        assert error.guardian_pid == keeper
        assert f"the guardian process (pid {keeper}), the parent of all workers" in str(error)
        await bounded(wg.shutdown())
        assert alive(pids) == []


async def test_a_group_that_the_guardians_death_has_broken_says_so(loop_kind: str) -> None:
    """It named a rank, and how that had ended was not known."""
    async with group(Mortal) as wg:
        keeper = guardian().pid
        os.kill(keeper, signal.SIGKILL)
        cause = await broken(wg)
        assert isinstance(cause, WorkerDiedError)
        assert cause.guardian_pid == keeper
        with pytest.raises(GroupBrokenError, match=rf"the guardian process \(pid {keeper}\)"):
            wg.ping()


@pytest.mark.parametrize("kind", ["subprocess", "daemon", "multiprocessing"])
async def test_what_workers_had_started_is_ended_when_the_guardian_is_killed(kind: str) -> None:
    """E-6: the controller finds it by its marks."""
    async with group(Parent) as wg:
        children = [pid for each in await bounded(wg.begin(kind)) for pid in each]
        os.kill(guardian().pid, signal.SIGKILL)
        await broken(wg)
        await bounded(wg.shutdown())
        assert alive(children) == []


async def test_a_group_starts_after_the_guardian_was_killed() -> None:
    async with group(Mortal, 1) as wg:
        os.kill(guardian().pid, signal.SIGKILL)
        await broken(wg)
    async with group(Mortal, 1) as fresh:
        assert await bounded(fresh.ping(1)) == [1]
