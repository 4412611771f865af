"""Large values when room is short, when their callers go, and when nobody needs the memory any more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest
import pytest_asyncio
import torch

from asyncwg import GroupClosedError, ResourceError, WorkerGroup, WorkerGroupError
from asyncwg import _linux as linux
from asyncwg._driver import transfers
from asyncwg._driver.arena import CONTROLLER, Arena, arena
from asyncwg._wire import sources
from tests.leaks import PATIENCE, bounded, in_thread
from tests.process.workers_arena import LARGE, MB, Large, numbers, same
from tests.process.workers_life import Fifo
from tests.process.workers_values import group


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    async with group(Large) as started:
        yield started


@pytest_asyncio.fixture
async def tight() -> AsyncIterator[WorkerGroup]:
    """A group of one rank whose arguments may take 8 MB."""
    async with group(Large, 1, arena_limit=8 * MB) as started:
        yield started


@pytest.fixture
def no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Let the machine have none, beyond what is used already, in a block of code."""

    @contextlib.contextmanager
    def without() -> Generator[None, None, None]:
        arena().trim()
        with monkeypatch.context() as patch:
            patch.setattr(linux, "available_memory", lambda: 0)
            # What waits is not refused at once: it could have the memory, later.
            patch.setattr(Arena, "fits", lambda _self, _weight: True)
            yield
        arena()._tell()

    return without


class Gate:
    """Stops the threads that copy, until it is opened."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.reached = asyncio.Event()
        self._open = threading.Event()

    def copy(self, source: sources.Source, place: memoryview) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        self._open.wait(PATIENCE)
        copy(source, place)

    def open(self) -> None:
        self._open.set()


copy = sources.copy


@pytest_asyncio.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    found = Gate()
    monkeypatch.setattr(sources, "copy", found.copy)
    yield found
    found.open()


async def copiers_idle() -> None:
    """Wait until the threads that copy have done what they had to."""
    loop = asyncio.get_running_loop()
    both = threading.Barrier(2, timeout=PATIENCE)
    for _ in range(2):
        await asyncio.gather(
            *(loop.run_in_executor(transfers._copiers, both.wait) for _ in range(2))
        )


async def empty(group: Any) -> bool:
    """Tell whether no block is left when a round to all ranks has brought back what they had let go."""
    gc.collect()
    await bounded(group.descriptors())
    return arena().in_use() == 0


# Short of room


async def test_50_calls_at_once_come_back_where_there_is_room_for_one_and_all_results_are_kept(
    tight: WorkerGroup,
) -> None:
    calls = [tight.echo(numbers(i, 5 * MB)) for i in range(50)]
    backs = await bounded(asyncio.gather(*calls))
    assert [same(back, i) for i, [back] in enumerate(backs)] == [True] * 50


async def test_50_calls_at_once_come_back_where_there_is_room_for_one_and_no_result_is_kept(
    tight: WorkerGroup,
) -> None:
    async def echo(i: int) -> bool:
        [back] = await tight.echo(numbers(i, 5 * MB))
        return same(back, i)

    assert all(await bounded(asyncio.gather(*map(echo, range(50)))))
    assert await empty(tight)


async def test_a_worker_that_keeps_what_it_gets_copies_it_out_when_room_is_short() -> None:
    """A replay buffer."""
    async with group(Large, 1, arena_limit=6 * MB) as one:
        for i in range(20):
            await bounded(one.keep(numbers(1000 * i, LARGE)))
        assert arena().in_use() <= 6 * MB
        assert await bounded(one.kept_firsts()) == [[1000 * i for i in range(20)]]
        await bounded(one.forget())
        assert await bounded(one.check(numbers(5), 5)) == [True]


async def test_what_was_kept_and_written_to_keeps_what_was_written(tight: WorkerGroup) -> None:
    value = numbers(0, 5 * MB)
    await bounded(tight.keep(value))
    await bounded(tight.run(_mark_kept))
    for i in range(5):
        await bounded(tight.check(numbers(i, 5 * MB), i))
    assert await bounded(tight.run(_marked)) == [True]


def _mark_kept(worker: Large) -> None:
    worker.kept[0][::2] = -1


def _marked(worker: Large) -> bool:
    kept = worker.kept[0]
    return bool((kept[::2] == -1).all()) and bool(
        torch.equal(kept[1::2], torch.arange(1, len(kept), 2))
    )


async def test_a_result_that_is_handed_on_while_room_is_short_arrives_as_it_was(
    tight: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    """The call waits; meanwhile the controller is asked to make the result its own."""
    started, release = fifo(), fifo()
    [result] = await bounded(tight.make(7, 3 * MB))
    first = tight.keep_and_hold(numbers(0, 4 * MB), started, release)
    await bounded(started.taken())
    call = tight.copy_of(result, numbers(50, 5 * MB))
    await bounded(in_thread(arena().mapping.own_all))
    others = [tight.check(numbers(i), i) for i in range(5)]
    release.put()
    await bounded(first)
    last = 7 + 3 * MB // 8 - 1
    assert await bounded(call) == [[(7, last), (50, 50 + 5 * MB // 8 - 1)]]
    assert await bounded(asyncio.gather(*others)) == [[True]] * 5


async def test_a_value_beyond_the_limit_is_an_error_at_once(tight: WorkerGroup) -> None:
    with pytest.raises(ResourceError, match=r"9\.0 MB of arguments can't fit the arena"):
        tight.echo(numbers(0, 9 * MB))
    assert await bounded(tight.check(numbers(1, 8 * MB), 1)) == [True]
    assert await empty(tight)


async def test_a_value_beyond_the_limit_is_the_error_of_a_call_that_has_waited_for_another(
    tight: WorkerGroup,
) -> None:
    """It was cancelled, and nobody was told why."""
    async with group(Large, 1) as source:
        call = tight.size_of(source.size_of("abc"), numbers(0, 20 * MB))
        with pytest.raises(ResourceError, match="can't fit the arena"):
            await bounded(call)
    assert await bounded(tight.size_of("abc")) == [[3]]


async def test_a_value_beyond_the_memory_that_is_free_is_an_error_at_once(
    wg: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bounded(wg.check(numbers(0), 0))
    with monkeypatch.context() as patch:
        patch.setattr(linux, "available_memory", lambda: MB)
        with pytest.raises(ResourceError, match="memory has room"):
            wg.echo(numbers(0, 20 * MB))
    assert await bounded(wg.check(numbers(1, 20 * MB), 1)) == [True, True]


async def test_a_result_beyond_the_memory_that_is_free_is_an_error_at_once(
    wg: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(linux, "available_memory", lambda: MB)
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.make(0, 20 * MB))
        assert all(isinstance(error, ResourceError) for error in caught.value.exceptions)
        assert all("can't fit the arena" in str(error) for error in caught.value.exceptions)
        del caught
    assert [same(back, 0) for back in await bounded(wg.make(0, 20 * MB))] == [True, True]


async def test_a_call_that_gets_no_room_in_time_says_who_holds_it() -> None:
    """A rank that is stopped never lets go."""
    async with group(Large, 1, arena_limit=8 * MB, arena_timeout=0.5) as one:
        await bounded(one.keep(numbers(0, 5 * MB)))
        os.kill(one.pids[0], signal.SIGSTOP)
        try:
            with pytest.raises(ResourceError, match=r"rank 0 holds 5\.0 MB.*arena_limit"):
                await bounded(one.check(numbers(1, 5 * MB), 1))
            small = one.size_of("abc")
            # From now on it is no matter of time.
            one._core.gang.transfers._timeout = PATIENCE  # type: ignore[union-attr]
        finally:
            os.kill(one.pids[0], signal.SIGCONT)
        assert await bounded(small) == [[3]]
        assert await bounded(one.check(numbers(2, 5 * MB), 2)) == [True]


async def test_a_call_that_gives_up_lets_those_behind_it_go(fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    async with group(Large, 1, arena_limit=8 * MB, arena_timeout=0.3) as one:
        first = one.keep_and_hold(numbers(0, 4 * MB), started, release)
        await bounded(started.taken())
        os.kill(one.pids[0], signal.SIGSTOP)
        try:
            large, fits = one.check(numbers(1, 7 * MB), 1), one.check(numbers(2, 3 * MB), 2)
            with pytest.raises(ResourceError):
                await bounded(large)
        finally:
            os.kill(one.pids[0], signal.SIGCONT)
        release.put()
        assert await bounded(first) == [0]
        assert await bounded(fits) == [True]


async def test_two_groups_on_two_loops_in_two_threads_share_the_arena() -> None:
    async def drive(seed: int) -> bool:
        async with group(Large, 2, arena_limit=24 * MB) as mine:
            for i in range(15):
                first = 1000 * seed + i
                backs = await bounded(mine.echo(numbers(first)))
                if not all(same(back, first) for back in backs):
                    return False
                joined = await bounded(mine.rows(numbers(first, 2 * LARGE)))
                if not same(joined, first):
                    return False
        return True

    def elsewhere(seed: int) -> bool:
        return asyncio.run(drive(seed))

    found = await bounded(
        asyncio.gather(drive(1), *(in_thread(elsewhere, seed) for seed in (2, 3))), 60
    )
    assert found == [True, True, True]
    gc.collect()
    assert arena().in_use() == 0


# Callers who go


async def test_a_call_that_is_cancelled_while_it_waits_for_room_lets_those_behind_it_go(
    tight: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, release = fifo(), fifo()
    first = tight.keep_and_hold(numbers(0, 4 * MB), started, release)
    await bounded(started.taken())
    # Too large, whatever the others do meanwhile; what is behind it fits beside the first.
    waiting, behind = tight.echo(numbers(1, 8 * MB)), tight.check(numbers(2, 3 * MB), 2)
    waiting.cancel()
    await bounded(_until(lambda: len(arena().held_by((_session(tight), 0))) == 2))
    release.put()
    assert await bounded(first) == [0]
    assert await bounded(behind) == [True]
    del waiting
    assert await empty(tight)


def _session(wg: Any) -> str:
    [owner] = [owner for owner in arena()._used if owner != "shared"]
    return owner


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for something that changes when the arena's books do."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell() -> None:
        loop.call_soon_threadsafe(changed.set)

    arena().listen(tell)
    try:
        while not condition():
            await asyncio.wait_for(changed.wait(), PATIENCE)
            changed.clear()
    finally:
        arena().unlisten(tell)


async def test_a_call_that_is_cancelled_while_it_is_copied_is_not_sent(
    wg: WorkerGroup, gate: Gate
) -> None:
    call = wg.keep(numbers(0))
    await bounded(gate.reached.wait())
    call.cancel()
    gate.open()
    assert await bounded(wg.kept_firsts()) == [[], []]
    await bounded(copiers_idle())
    assert await empty(wg)


async def test_a_place_is_nobody_elses_while_a_copy_for_a_cancelled_call_runs(
    wg: WorkerGroup, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = wg.echo(numbers(-5))
    await bounded(gate.reached.wait())
    call.cancel()
    with monkeypatch.context() as patch:
        patch.setattr(sources, "copy", copy)
        # In this thread: those that copy are stopped.
        second = wg.check.options(copy="now")(numbers(9), 9)
        assert await bounded(second) == [True, True]
    gate.open()
    await bounded(copiers_idle())
    assert await bounded(wg.check(numbers(9), 9)) == [True, True]


async def test_a_place_is_nobody_elses_while_a_copy_for_a_group_that_has_ended_runs(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with group(Large, 1) as first:
        call = first.echo(numbers(-5))
        await bounded(gate.reached.wait())
    with pytest.raises(GroupClosedError):
        await bounded(call)
    async with group(Large, 1) as second:
        kept = second.keep.options(copy="now")
        with monkeypatch.context() as patch:
            patch.setattr(sources, "copy", copy)
            await bounded(kept(numbers(9)))
        gate.open()
        await bounded(copiers_idle())
        assert await bounded(second.kept_firsts()) == [[9]]
        await bounded(second.forget())
        assert await empty(second)


async def test_calls_that_wait_for_room_fail_when_the_group_is_shut_down(
    fifo: Callable[[], Fifo],
) -> None:
    started, release = fifo(), fifo()
    async with group(Large, 1, arena_limit=3 * MB) as one:
        first = one.keep_and_hold(numbers(0), started, release)
        await bounded(started.taken())
        calls = [one.echo(numbers(i)) for i in range(3)]
        release.put()
        await bounded(one.shutdown(grace=1))
    ends = await bounded(asyncio.gather(first, *calls, return_exceptions=True))
    assert all(isinstance(end, GroupClosedError) for end in ends[1:])
    del ends, first, calls
    gc.collect()
    assert arena().in_use() == 0


async def test_a_caller_that_goes_while_its_results_wait_for_room_leaves_nothing(
    wg: WorkerGroup, no_memory: Callable[[], Any]
) -> None:
    with no_memory():
        call = wg.make(0)
        await bounded(_offers(wg, 2))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    del call
    await bounded(_answered(wg))
    assert await empty(wg)


async def test_an_async_call_whose_caller_goes_while_its_results_wait_for_room_is_over_at_once(
    wg: WorkerGroup, no_memory: Callable[[], Any]
) -> None:
    """And the places that are found later are given back."""
    with no_memory():
        call = wg.make_async(0)
        await bounded(_offers(wg, 2))
        call.cancel()
        await bounded(_answered(wg))
    del call
    assert await empty(wg)


async def test_a_caller_that_goes_while_its_joined_results_wait_for_room_leaves_nothing(
    wg: WorkerGroup, no_memory: Callable[[], Any]
) -> None:
    with no_memory():
        call = wg.big_rows(torch.empty(2, 0))
        await bounded(_offers(wg, 2))
        call.cancel()
    await bounded(_answered(wg))
    assert await empty(wg)


async def test_ranks_that_wait_for_room_together_are_answered_together(
    wg: WorkerGroup, no_memory: Callable[[], Any]
) -> None:
    batch = torch.empty(2, 0)
    with no_memory():
        call = wg.big_rows(batch)
        await bounded(_offers(wg, 2))
    joined = await bounded(call)
    assert same(joined[: len(joined) // 2], 0)
    assert same(joined[len(joined) // 2 :], 1)
    assert len(arena().held_by(CONTROLLER)) == 1
    del joined, call
    assert await empty(wg)


def _calls(wg: Any) -> Any:
    return wg._core.gang.calls


async def _offers(wg: Any, count: int) -> None:
    """Wait until ``count`` results wait for room."""
    await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    wants = wg._core.gang.transfers._wants
    while len(wants) < count:
        await wg.ping_async()


async def _answered(wg: Any) -> None:
    """Wait until no rank owes an answer, also of calls that nobody waits for."""
    while any(_calls(wg).load):
        await wg.ping_async()


async def test_a_result_that_is_refused_in_the_worker_gives_its_place_back(wg: WorkerGroup) -> None:
    """It was written to after it was returned, so it is an error: but a place had been granted."""
    for _ in range(10):
        with contextlib.suppress(WorkerGroupError):
            await bounded(wg.give_and_change("tensor"))
    assert await empty(wg)


# Idle


async def test_memory_is_given_back_when_nothing_was_sent_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "IDLE_AFTER", 0.05)
    async with group(Large) as wg:
        await bounded(wg.echo(numbers(0, 20 * MB)))
        await bounded(_until_memory(0))


async def test_memory_is_given_back_after_results_alone_and_beside_a_value_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "IDLE_AFTER", 0.05)
    async with group(Large, 1) as one:
        [kept] = await bounded(one.make(3, MB))
        await bounded(one.make(0, 20 * MB))
        gc.collect()
        await bounded(_until_memory(2 * MB))
        assert same(kept, 3)


async def test_memory_is_given_back_when_the_group_ends() -> None:
    async with group(Large) as wg:
        await bounded(wg.echo(numbers(0, 20 * MB)))
        assert os.fstat(arena().fd).st_blocks > 0
    gc.collect()
    await bounded(_until_memory(0))


async def _until_memory(most: int) -> None:
    """Wait until the arena has no more than ``most`` bytes of memory."""
    while os.fstat(arena().fd).st_blocks * 512 > most:
        await copiers_idle()
