"""How groups end, in whatever way their block is left, and what is left of them: promise E-6."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncwg import GroupClosedError, WorkerDiedError, WorkerGroup, WorkerGroupError
from tests.leaks import bounded
from tests.process.workers_life import (
    AsyncHooks,
    Clinging,
    Fifo,
    Hooks,
    LastWords,
    MixedHooks,
    Parent,
    Steps,
    alive,
    group,
)

CHILDREN = ["subprocess", "stubborn", "daemon", "multiprocessing"]


def lines(folder: Path, rank: int) -> list[str]:
    """Return what `Hooks` has written on a rank."""
    return (folder / str(rank)).read_text().split()


@pytest.mark.parametrize("cls", [Hooks, AsyncHooks, MixedHooks])
async def test_setup_and_close_run_whether_def_or_async_def(cls: type, tmp_path: Path) -> None:
    async with group(cls, 2, str(tmp_path)) as wg:
        await bounded(wg.ping())
    assert [lines(tmp_path, rank) for rank in (0, 1)] == [["init", "setup", "ping", "close"]] * 2


@pytest.mark.parametrize("way", ["return", "exception", "cancel"])
async def test_close_runs_in_whatever_way_the_block_is_left(
    way: str, tmp_path: Path, loop_kind: str
) -> None:
    """E-6."""
    pids: list[int] = []

    async def main() -> None:
        async with group(Hooks, 2, str(tmp_path)) as wg:
            pids.extend(wg.pids)
            if way == "exception":
                raise KeyError("on the way out")
            if way == "cancel":
                task.cancel()
                await asyncio.Event().wait()

    task = asyncio.create_task(main())
    left = {"return": (), "exception": (KeyError,), "cancel": (asyncio.CancelledError,)}[way]
    try:
        await bounded(task)
    except left:
        pass
    assert alive(pids) == []
    assert [lines(tmp_path, rank)[-1] for rank in (0, 1)] == ["close"] * 2


async def test_what_close_raised_is_raised_when_everything_has_ended() -> None:
    wg = group(Clinging, 2, "close raises")
    await bounded(wg.__aenter__())
    pids = wg.pids
    with pytest.raises(WorkerGroupError, match="close failed") as caught:
        await bounded(wg.shutdown())
    assert sorted(str(error) for error in caught.value.exceptions) == [
        "close failed on 0",
        "close failed on 1",
    ]
    assert alive(pids) == []


async def test_what_close_raised_does_not_hide_what_ended_the_block() -> None:
    async def main() -> None:
        async with group(Clinging, 1, "close raises"):
            raise KeyError("the reason")

    with pytest.raises(KeyError, match="the reason") as caught:
        await bounded(main())
    assert "close failed" in "\n".join(caught.value.__notes__)


async def test_a_death_in_close_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    wg = group(Clinging, 1, "close dies")
    await bounded(wg.__aenter__())
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.shutdown())
    (death,) = caught.value.exceptions
    assert isinstance(death, WorkerDiedError)
    assert death.exit_code == 9


@pytest.mark.parametrize("how", ["ignores SIGTERM", "atexit", "__del__", "thread"])
async def test_a_worker_that_does_not_want_to_go_goes_within_the_grace(how: str) -> None:
    """They hung in finalizers and held the GPU: https://github.com/ray-project/ray/pull/59872. E-6."""
    wg = group(Clinging, 2, how)
    await bounded(wg.__aenter__())
    pids = wg.pids
    await bounded(wg.shutdown(grace=0.4))
    assert alive(pids) == []


async def test_a_close_that_never_ends_is_ended_within_the_grace() -> None:
    """E-6."""
    wg = group(Clinging, 2, "close")
    await bounded(wg.__aenter__())
    pids = wg.pids
    await bounded(asyncio.gather(wg.shutdown(grace=0.4), return_exceptions=True))
    assert alive(pids) == []


async def test_a_busy_worker_goes_within_the_grace_and_its_call_is_told(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """E-6."""
    started = fifo()
    wg = group(Clinging, 2, "no")
    await bounded(wg.__aenter__())
    pids = wg.pids
    call = wg.hold(started)
    await bounded(started.taken(2))
    ending = asyncio.gather(wg.shutdown(grace=0.4), return_exceptions=True)
    with pytest.raises(GroupClosedError, match=r"Clinging\.hold"):
        await bounded(call)
    await bounded(ending)
    assert alive(pids) == []


async def test_ending_a_busy_worker_is_no_failure_of_its_close(fifo: Callable[[], Fifo]) -> None:
    """The SIGTERM that ended it was the group's own."""
    started = fifo()
    wg = group(Clinging, 1, "no")
    await bounded(wg.__aenter__())
    wg.hold(started)
    await bounded(started.taken())
    await bounded(wg.shutdown(grace=0.4))


async def test_a_cancelled_shutdown_kills_at_once(fifo: Callable[[], Fifo], loop_kind: str) -> None:
    """E-6: and leaves nothing."""
    wg = group(Clinging, 2, "close")
    await bounded(wg.__aenter__())
    pids = wg.pids
    ending = asyncio.create_task(wg.shutdown(grace=600))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(ending)
    assert alive(pids) == []


async def test_a_shutdown_without_grace_kills_at_once() -> None:
    wg = group(Clinging, 2, "close")
    await bounded(wg.__aenter__())
    pids = wg.pids
    await bounded(asyncio.gather(wg.shutdown(grace=0), return_exceptions=True))
    assert alive(pids) == []


async def test_rank_zero_leaves_when_all_others_have(
    tmp_path: Path, fifo: Callable[[], Fifo]
) -> None:
    """E-6: what they still want of it is there."""
    leaving, release = fifo(), fifo()
    file = tmp_path / "words"
    wg = group(LastWords, 3, str(file), leaving, release)
    await bounded(wg.__aenter__())
    ending = asyncio.create_task(wg.shutdown(grace=40))
    await bounded(leaving.taken())
    release.put()
    await bounded(ending)
    words = file.read_text().split()
    assert sorted(words) == ["0", "1", "2"]
    assert words[-1] == "0"


async def test_shutting_down_twice_does_nothing(tmp_path: Path, loop_kind: str) -> None:
    async with group(Hooks, 1, str(tmp_path)) as wg:
        await bounded(wg.shutdown())
        await bounded(wg.shutdown())
    assert wg.state == "closed"


async def test_two_shutdowns_at_once_both_return_when_everything_has_ended(tmp_path: Path) -> None:
    """E-6."""
    wg = group(Hooks, 2, str(tmp_path))
    await bounded(wg.__aenter__())
    pids = wg.pids

    async def end() -> list[int]:
        await wg.shutdown()
        return alive(pids)

    left = await bounded(asyncio.gather(end(), end()))
    assert list(left) == [[], []]


@pytest.mark.parametrize("kind", CHILDREN)
async def test_no_child_of_a_worker_outlives_the_block(kind: str) -> None:
    """E-6: whatever session, process group and parent it has, and whatever it ignores."""
    async with group(Parent) as wg:
        children = [pid for each in await bounded(wg.begin(kind)) for pid in each]
        assert alive(children) == children
        await bounded(wg.shutdown(grace=0.4))
        assert alive(children) == []


async def test_no_loading_process_of_a_worker_outlives_the_block() -> None:
    """E-6: a DataLoader's, which torch ends in finalizers that don't run."""
    async with group(Parent, 1, preload=None) as wg:
        (children,) = await bounded(wg.begin("dataloader"))
        assert len(alive(children)) == 2
        await bounded(wg.shutdown(grace=0.4))
        assert alive(children) == []


async def test_children_of_one_group_live_on_when_another_group_ends() -> None:
    async with group(Parent, 1) as wg:
        (children,) = await bounded(wg.begin("daemon"))
        async with group(Parent, 1) as other:
            (others,) = await bounded(other.begin("daemon"))
        assert alive([*children, *others]) == children


async def test_a_group_that_is_dropped_without_a_shutdown_is_ended(loop_kind: str) -> None:
    """E-6: the user forgot it."""
    wg: WorkerGroup | None = group(Parent)
    assert wg is not None
    await bounded(wg.__aenter__())
    pidfds = [os.pidfd_open(pid) for pid in wg.pids]
    gone = [asyncio.Event() for _ in pidfds]
    loop = asyncio.get_running_loop()
    for pidfd, event in zip(pidfds, gone, strict=True):
        loop.add_reader(pidfd, event.set)
    wg = None
    gc.collect()
    try:
        for event in gone:
            await bounded(event.wait())
    finally:
        for pidfd in pidfds:
            loop.remove_reader(pidfd)
            os.close(pidfd)


async def test_a_group_is_not_ended_while_a_view_of_it_is_in_use() -> None:
    wg = await bounded(group(Steps, 2).__aenter__())
    there = weakref.ref(wg)
    view = wg[0:][1]
    try:
        del wg
        gc.collect()
        assert there() is not None
        assert await bounded(view.echo(1)) == 1
    finally:
        if (held := there()) is not None:
            await bounded(held.shutdown())


async def test_calls_in_flight_when_the_block_is_left_are_told_that_the_group_closed(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()

    async def main() -> Any:
        async with group(Steps, 1) as wg:
            call = wg.hold(started, release)
            await bounded(started.taken())
            release.put()
            return call

    call = await bounded(main())
    with pytest.raises(GroupClosedError, match=r"Steps\.hold had not answered"):
        await bounded(call)
