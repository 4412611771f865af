"""Starting a broken group again: by hand, by itself, with its state, and what is sent again."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from asyncwg import (
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    RestartPolicy,
    UsageError,
    WorkerDiedError,
    WorkerGroup,
    WorkerStartError,
)
from asyncwg._core import Core
from asyncwg._driver.gang import Gang
from asyncwg._driver.rank import RankState
from asyncwg._generation import Generation
from asyncwg.testing import FaultPlan
from tests.leaks import bounded
from tests.process.workers_life import Fifo, alive, group
from tests.process.workers_reliability import DyingOnLoad, Recorder, Refusing, Reluctant, Saving

AT_ONCE = RestartPolicy(backoff=0)


class OnceAtOnce(RestartPolicy):
    """One restart at once, and the backoff between that and each further one."""

    def delay(self, attempt: int) -> float:
        return self.backoff if attempt else 0


def death_of(wg: WorkerGroup) -> asyncio.Future[Exception]:
    """Return what is done when the group has broken."""
    died: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    wg.start_worker_aliveness_check(on_death=died.set_result)
    return died


async def brought_down(wg: WorkerGroup) -> None:
    """Kill a rank, and wait until that is known."""
    died = death_of(wg)
    os.kill(wg.pids[0], signal.SIGKILL)
    await bounded(died)


async def up_again(wg: WorkerGroup) -> None:
    """Wait until it has been started again by itself."""

    async def running() -> None:
        while wg.state != "running":  # noqa: ASYNC110  # nobody tells it
            await asyncio.sleep(0)

    await bounded(running())


async def test_a_restart_is_a_new_generation_of_the_same_group(loop_kind: str) -> None:
    async with group(Recorder) as wg:
        before = wg.pids
        await bounded(wg.note("before"))
        await bounded(wg.restart())
        assert await bounded(wg.notes()) == [[], []]
        assert set(wg.pids).isdisjoint(before)
        assert alive(before) == []
        assert wg.state == "running"


async def test_a_broken_group_takes_calls_again_after_a_restart(loop_kind: str) -> None:
    async with group(Recorder) as wg:
        view = wg[1]
        await brought_down(wg)
        with pytest.raises(GroupBrokenError):
            await bounded(wg.note())
        await bounded(wg.restart())
        assert await bounded(wg.note("after")) == ["after", "after"]
        assert await bounded(view.note("view")) == "view"


async def test_calls_in_flight_fail_when_the_group_is_started_again(
    fifo: Callable[[], Fifo],
) -> None:
    started, release = fifo(), fifo()
    async with group(Recorder) as wg:
        call = wg.hold(started, release)
        await bounded(started.taken(2))
        await bounded(wg.restart(grace=0.1))
        with pytest.raises(GroupClosedError):
            await bounded(call)


async def test_calls_while_it_starts_say_so() -> None:
    async with group(Recorder, 1) as wg:
        starting = asyncio.create_task(wg.restart())
        await asyncio.sleep(0)
        with pytest.raises(GroupBrokenError, match="being started"):
            await wg.note()
        await bounded(starting)


async def test_a_group_that_was_shut_down_is_not_started_again() -> None:
    async with group(Recorder, 1) as wg:
        pass
    with pytest.raises(GroupClosedError):
        await bounded(wg.restart())


@pytest.mark.parametrize("moment", [1, 2, 5])
async def test_a_cancelled_restart_leaves_no_process_and_the_group_closed(moment: int) -> None:
    async with group(Recorder, 1) as wg:
        before = wg.pids
        starting = asyncio.create_task(wg.restart())
        for _ in range(moment):
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(starting)
        assert wg.state == "closed"
        assert alive(before) == []


@pytest.mark.parametrize("moment", [1, 2, 5])
async def test_leaving_the_group_while_it_is_started_again_leaves_no_process(
    loop_kind: str, moment: int
) -> None:
    """E-6: nobody would have ended the processes that came up afterwards."""
    wg = group(Recorder)
    await wg.__aenter__()
    starting = asyncio.create_task(wg.restart())
    for _ in range(moment):
        await asyncio.sleep(0)
    await bounded(wg.shutdown())
    assert wg.pids == []
    with pytest.raises(GroupClosedError, match="while it was being started"):
        await bounded(starting)


async def test_a_group_that_is_shut_down_while_it_starts_leaves_no_process() -> None:
    wg = group(Recorder)
    starting = asyncio.create_task(wg.__aenter__())
    await asyncio.sleep(0)
    await bounded(wg.shutdown())
    with pytest.raises(GroupClosedError, match="while it was being started"):
        await bounded(starting)


async def test_who_shuts_down_second_waits_for_who_was_first() -> None:
    wg = group(Recorder)
    await wg.__aenter__()
    pids = wg.pids
    first = asyncio.create_task(wg.shutdown())
    await asyncio.sleep(0)
    await bounded(wg.shutdown())
    assert alive(pids) == []
    await bounded(first)


@pytest.mark.parametrize("moment", range(3))
async def test_leaving_the_group_while_it_starts_itself_again_leaves_no_process(
    moment: int,
) -> None:
    async with group(Recorder, restart=AT_ONCE) as wg:
        await brought_down(wg)
        for _ in range(moment):
            await asyncio.sleep(0)
    assert wg.state == "closed"
    assert wg.pids == []


async def test_a_policy_starts_a_broken_group_again_by_itself(
    loop_kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with group(Recorder, restart=AT_ONCE) as wg:
        with pytest.raises(WorkerDiedError):
            await bounded(wg.die(1))
        await up_again(wg)
        assert await bounded(wg.note("after")) == ["after", "after"]
    assert "is started again" in caplog.text


async def test_a_policy_leaves_alone_what_its_user_has_started_again(tmp_path: Path) -> None:
    """It would have ended a group that works; what waits to be sent again goes with either."""
    marker = tmp_path / "marker"
    marker.touch()
    policy = RestartPolicy(backoff=0.5)  # what its user does is done before
    async with group(Saving, restart=policy) as wg:
        call = wg.die_while_there_is(str(marker))
        await bounded(death_of(wg))
        (by_itself,) = wg._core.supervisor._tasks
        await bounded(wg.restart())
        pids = wg.pids
        assert await bounded(call) == [0, 1]
        await bounded(by_itself)
        assert wg.pids == pids


async def test_a_policy_gives_up_after_its_number_of_restarts() -> None:
    async with group(Recorder, 1, restart=RestartPolicy(max_restarts=1, backoff=0)) as wg:
        await brought_down(wg)
        await up_again(wg)
        await brought_down(wg)
        assert wg.state == "broken"
        with pytest.raises(GroupBrokenError):
            await bounded(wg.note())


async def test_a_policy_tries_again_when_a_restart_fails(tmp_path: Path, loop_kind: str) -> None:
    """What broke the group may need more time to pass: the first failure closed it."""
    file = tmp_path / "file"
    policy = RestartPolicy(max_restarts=3, backoff=0)
    async with group(Reluctant, 2, str(file), restart=policy) as wg:
        file.write_bytes(b"..")
        call = wg.given("kept")
        assert await bounded(call) == ["kept", "kept"]
        with FaultPlan().kill(1).on(wg):
            died = death_of(wg)
            repeated = wg.given("repeated")
            await bounded(died)
        assert await bounded(repeated) == ["repeated", "repeated"]
        assert not file.exists()
        assert wg.state == "running"


async def test_a_group_whose_restart_failed_and_is_tried_again_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    async with group(Reluctant, 1, str(file), restart=OnceAtOnce(backoff=3600)) as wg:
        file.write_bytes(b".")
        await brought_down(wg)
        await bounded(_until_failed(wg._core))
        assert wg.state == "broken"
        assert wg.pids == []
        with pytest.raises(GroupBrokenError, match="tried again") as caught:
            wg.given(1)
        assert isinstance(caught.value.__cause__, WorkerStartError)
        await bounded(wg.restart())
        assert await bounded(wg.given(1)) == [1]


@pytest.mark.parametrize("how", ["shut down", "drop"])
async def test_a_group_that_ends_between_two_tries_to_start_it_again_leaves_nothing(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    policy = OnceAtOnce(backoff=3600 if how == "shut down" else 0.2)
    wg = group(Reluctant, 2, str(file), restart=policy)
    await bounded(wg.__aenter__())
    file.write_bytes(b"...")
    core = wg._core
    await brought_down(wg)
    await bounded(_until_failed(core))
    if how == "shut down":
        await bounded(wg.shutdown())
    else:
        del wg
        gc.collect()
        await bounded(asyncio.wait(core.supervisor._tasks))
    assert core.state == "closed"
    assert core.gang is None


async def _until_failed(core: Core) -> None:
    while core._failed is None:  # noqa: ASYNC110  # nobody tells it
        await asyncio.sleep(0)


async def test_a_group_is_closed_when_its_last_restart_fails(tmp_path: Path) -> None:
    file = tmp_path / "file"
    policy = RestartPolicy(max_restarts=2, backoff=0)
    async with group(Reluctant, 2, str(file), restart=policy) as wg:
        file.write_bytes(b"...")
        with FaultPlan().kill(1).on(wg):
            repeated = wg.given("repeated")
            with pytest.raises(WorkerStartError, match="could not start"):
                await bounded(repeated)
        assert wg.state == "closed"


def test_the_backoff_doubles() -> None:
    policy = RestartPolicy(backoff=0.5)
    assert [policy.delay(attempt) for attempt in range(3)] == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("wrong", [{"max_restarts": -1}, {"backoff": -1.0}, {"save_every": 0}])
def test_a_policy_that_can_not_be_right_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RestartPolicy(**wrong)


@pytest.mark.parametrize("in_folder", [False, True], ids=["in memory", "in a folder"])
async def test_saved_state_comes_back_on_each_rank(in_folder: bool, tmp_path: Path) -> None:
    policy = RestartPolicy(max_restarts=0, directory=tmp_path / "state" if in_folder else None)
    async with group(Saving, restart=policy) as wg:
        await bounded(wg.add(5))
        await bounded(wg[1].add(2))
        await bounded(wg.save())
        await bounded(wg.add(100))
        await brought_down(wg)
        await bounded(wg.restart())
        assert await bounded(wg.count_and_loaded()) == [(5, 0), (7, 1)]
    files = sorted(name for _, _, names in os.walk(tmp_path) for name in names)
    assert files == (["Saving-0.state", "Saving-1.state"] if in_folder else [])


async def test_without_a_saved_state_ranks_start_afresh() -> None:
    async with group(Saving) as wg:
        await bounded(wg.add(5))
        await bounded(wg.restart())
        assert await bounded(wg.count_and_loaded()) == [(0, None), (0, None)]


async def test_a_save_replaces_the_one_before_it() -> None:
    async with group(Saving, 1) as wg:
        for _ in range(2):
            await bounded(wg.add(1))
            await bounded(wg.save())
        await bounded(wg.restart())
        assert await bounded(wg.count_and_loaded()) == [(2, 0)]


async def test_a_class_without_save_state_says_so() -> None:
    async with group(Recorder, 1) as wg:
        with pytest.raises(AttributeError, match="save_state"):
            await bounded(wg.save())


async def test_a_state_that_can_not_be_loaded_fails_the_restart_and_leaves_nothing() -> None:
    async with group(Refusing) as wg:
        await bounded(wg.save())
        with pytest.raises(Exception, match="load_state") as caught:
            await bounded(wg.restart())
        assert wg.state == "closed"
        assert wg.pids == []
    assert isinstance(caught.value, WorkerStartError)
    assert [type(error) for error in caught.value.exceptions] == [ValueError, ValueError]


async def test_a_death_while_states_are_loaded_fails_the_restart_and_leaves_nothing() -> None:
    """The other rank is busy for ever: it is ended too."""
    async with group(DyingOnLoad) as wg:
        await bounded(wg.save())
        with pytest.raises(WorkerStartError, match="load_state") as caught:
            await bounded(wg.restart())
        (death,) = caught.value.exceptions
        assert isinstance(death, WorkerDiedError)
        assert (death.rank, death.exit_code) == (1, 3)
        assert death.method == "DyingOnLoad.load_state"
        assert wg.state == "closed"
        assert wg.pids == []


async def test_a_state_that_is_never_loaded_fails_the_restart_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with group(DyingOnLoad, 1) as wg:
        await bounded(wg.save())
        start = Generation.start
        # The processes may take as long as they need on a busy machine.
        monkeypatch.setattr(
            Generation, "start", lambda loop, spec, pool, _: start(loop, spec, pool, 60)
        )
        wg._core._start_timeout = 0.1
        with pytest.raises(WorkerStartError, match="load_state") as caught:
            await bounded(wg.restart())
        assert [type(error) for error in caught.value.exceptions] == [CallTimeoutError]
        assert wg.state == "closed"


@pytest.mark.parametrize("moment", ["when the last rank is ready", "before it takes calls"])
async def test_a_death_between_the_last_answer_of_a_start_and_its_end_fails_the_start(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody was told of it: the group ran, and its first call never ended."""
    cause = WorkerDiedError(0, 1, 3)
    if moment == "before it takes calls":
        opened = Generation.open

        def open_broken(self: Generation, *args: Any, **options: Any) -> Any:
            self.gang._break(cause)
            return opened(self, *args, **options)

        monkeypatch.setattr(Generation, "open", open_broken)
    else:
        ready = Gang._receive_rare

        def ready_and_broken(self: Gang, *args: Any) -> None:
            ready(self, *args)
            if all(rank.state is RankState.READY for rank in self._ranks):
                self._break(cause)

        monkeypatch.setattr(Gang, "_receive_rare", ready_and_broken)
    wg = group(Recorder)
    with pytest.raises(WorkerStartError) as caught:
        await bounded(wg.__aenter__())
    assert caught.value.exceptions == (cause,)
    assert wg.state == "closed"


@pytest.mark.parametrize("every", [1, 3])
async def test_a_policy_saves_after_so_many_calls(every: int) -> None:
    policy = RestartPolicy(backoff=0, save_every=every)
    async with group(Saving, 1, restart=policy) as wg:
        for _ in range(6):
            await bounded(wg.add())
        await bounded(wg.count_and_loaded())  # behind the last save
        await brought_down(wg)
        await up_again(wg)
        assert await bounded(wg.count_and_loaded()) == [(6, 0)]


async def test_saving_by_itself_makes_no_calls_that_are_counted() -> None:
    """With ``save_every=1`` each save would ask for another, for ever."""
    async with group(Saving, 1, restart=RestartPolicy(save_every=1)) as wg:
        await bounded(wg.add())
        first = await bounded(wg.run(_calls_so_far))
        second = await bounded(wg.run(_calls_so_far))
        assert second[0] - first[0] <= 2  # itself, and the save after the first look


def _calls_so_far(_worker: Saving) -> int:
    from asyncwg import current_call

    return current_call().id


async def test_an_idempotent_call_is_sent_again_after_the_restart(
    loop_kind: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    async with group(Saving, restart=AT_ONCE) as wg:
        assert await bounded(wg.die_while_there_is(str(marker))) == [0, 1]
        assert not marker.exists()


async def test_a_call_that_is_not_idempotent_is_not_sent_again(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    async with group(Saving, restart=AT_ONCE) as wg:
        with pytest.raises(WorkerDiedError):
            await bounded(wg.die_while_there_is_once(str(marker)))
        await up_again(wg)
        assert await bounded(wg.die_while_there_is_once(str(marker))) == [0, 1]


async def test_an_idempotent_call_that_waits_for_another_call_is_sent_after_the_restart(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """It failed, though no rank had even seen it."""
    started, release = fifo(), fifo()
    async with group(Recorder, 1) as source, group(Saving, restart=AT_ONCE) as wg:
        needed = source[0].hold(started, release)
        waiting, behind = wg.given([needed]), wg.given("behind")
        once = wg.given_once(needed)
        died = death_of(wg)
        os.kill(wg.pids[0], signal.SIGKILL)
        await bounded(died)
        with pytest.raises(WorkerDiedError):
            await bounded(once)
        await up_again(wg)
        assert not waiting.done()
        release.put()
        assert await bounded(waiting) == [[0], [0]]
        assert await bounded(behind) == ["behind", "behind"]


async def test_a_call_that_waits_for_a_call_that_is_sent_again_goes_after_it(
    tmp_path: Path,
) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    async with group(Saving, restart=AT_ONCE) as wg:
        needed = wg.die_while_there_is(str(marker))
        assert await bounded(wg.given(needed)) == [[0, 1], [0, 1]]


async def test_a_call_whose_value_comes_in_the_turn_of_the_break_is_sent_after_the_restart() -> (
    None
):
    """The group was found broken by the value's arrival, before whoever repeats was told."""
    async with group(Recorder, 1) as source, group(Saving, restart=AT_ONCE) as wg:
        gang = wg._core.gang
        assert gang is not None
        needed = source[0].note(1)
        needed.add_done_callback(lambda _call: gang._break(WorkerDiedError(0, 1, 3)))
        assert await bounded(wg.given(needed)) == [1, 1]


async def test_an_idempotent_call_that_waits_fails_with_the_call_it_waits_for(
    fifo: Callable[[], Fifo],
) -> None:
    started, release = fifo(), fifo()
    async with group(Recorder, 1) as source, group(Saving, restart=AT_ONCE) as wg:
        needed = source[0].hold(started, release)
        waiting = wg.given(needed)
        await brought_down(wg)
        await bounded(started.taken())
        os.kill(source.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=r"Recorder\.hold"):
            await bounded(waiting)


async def test_an_idempotent_call_fails_when_there_are_no_restarts_left(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    async with group(Saving, restart=RestartPolicy(max_restarts=0)) as wg:
        with pytest.raises(WorkerDiedError):
            await bounded(wg.die_while_there_is(str(marker)))


async def test_an_idempotent_call_that_waits_for_the_restart_fails_at_the_end_of_the_group() -> (
    None
):
    async with group(Saving, restart=RestartPolicy(backoff=3600)) as wg:
        with FaultPlan().kill(0).on(wg):
            died = death_of(wg)
            call = wg.die_while_there_is("")
            await bounded(died)
        assert not call.done()
    with pytest.raises(GroupClosedError):
        await bounded(call)


async def test_no_process_of_the_old_generation_is_left_by_a_restart() -> None:
    seen: set[int] = set()
    async with group(Recorder) as wg:
        for _ in range(5):
            seen |= set(wg.pids)
            await bounded(wg.restart(grace=0.2))
        assert alive(_without(seen, wg.pids)) == []


def _without(pids: set[int], others: Iterable[int]) -> list[int]:
    return sorted(pids - set(others))
