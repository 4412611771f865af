"""In which order, thread and loop calls run: promises O-1, O-2, O-3, O-5, O-6 and O-9."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from asyncwg import GroupClosedError, PerRank, UsageError, WorkerGroup
from tests.leaks import bounded, in_thread
from tests.process.workers_life import AsyncSteps, Fifo, Steps, group

SIZES = (0, 10, 100_000, 3_000_000)
"""Bytes of ballast: in the frame, beside it, more than a socket holds, through shared memory."""


def in_flight(wg: WorkerGroup) -> list[int]:
    """Unanswered calls by rank, in the controller's books."""
    gang = wg._core.gang
    assert gang is not None
    return gang.calls.load


async def test_calls_of_two_tasks_reach_every_rank_in_the_same_order(loop_kind: str) -> None:
    """O-1: otherwise the ranks enter their collectives in different orders."""
    async with group(Steps, 3) as wg:
        chance = random.Random(1)

        async def caller(name: str) -> None:
            for number in range(60):
                # Each rank gets another size, so that the frames travel for different times.
                ballast = PerRank([bytes(chance.choice(SIZES[:3])) for _ in range(3)])
                call = wg.note((name, number), ballast)
                if chance.random() < 0.3:
                    await call
                else:
                    await asyncio.sleep(0)

        await bounded(asyncio.gather(caller("a"), caller("b")))
        first, *others = await bounded(wg.notes())
    assert len(first) == 120
    assert others == [first, first]


async def test_each_task_finds_its_own_calls_in_the_order_it_made_them(loop_kind: str) -> None:
    """O-1, O-2."""
    async with group(Steps) as wg:
        for number in range(30):
            wg.note(number, bytes(SIZES[number % 3]))
        assert await bounded(wg.notes()) == [list(range(30))] * 2


async def test_a_large_argument_is_not_overtaken_by_a_small_one(loop_kind: str) -> None:
    """O-1: what goes through shared memory keeps its place among what does not."""
    async with group(Steps) as wg:
        for number in range(12):
            wg.note(number, bytes(SIZES[-1 if number % 2 == 0 else 0]))
        assert await bounded(wg.notes()) == [list(range(12))] * 2


async def test_calls_on_views_keep_their_place_among_calls_on_all_ranks() -> None:
    """O-1."""
    async with group(Steps, 3) as wg:
        wg.note("all")
        wg[1:].note("view")
        wg[1].note("one")
        wg.note("all again")
        assert await bounded(wg.notes()) == [
            ["all", "all again"],
            ["all", "view", "one", "all again"],
            ["all", "view", "all again"],
        ]


async def test_async_methods_start_in_the_same_order_on_every_rank(loop_kind: str) -> None:
    """O-1."""
    async with group(AsyncSteps) as wg:
        calls = [wg.note_async(number, bytes(SIZES[number % 3])) for number in range(30)]
        await bounded(asyncio.gather(*calls))
        assert await bounded(wg.notes_async()) == [list(range(30))] * 2


async def test_def_methods_run_in_the_main_thread(loop_kind: str) -> None:
    """O-2."""
    async with group(AsyncSteps) as wg:
        assert await bounded(wg.where()) == [(True, 0)] * 2


@pytest.mark.parametrize("cls", [Steps, AsyncSteps])
async def test_an_unused_async_method_changes_nothing_for_the_def_methods(
    cls: type, fifo: Callable[[], Fifo]
) -> None:
    """They became concurrent: https://github.com/ray-project/ray/issues/39179 (#49869, #44354). O-3."""
    started, release = fifo(), fifo()
    async with group(cls, 1) as wg:
        calls = [wg.hold(started, release, number) for number in (1, 2, 3)]
        await bounded(started.taken())
        order = wg.notes()
        release.put(3)
        await bounded(asyncio.gather(*calls))
        assert await bounded(order) == [[1, 2, 3]]
        assert await bounded(wg.where()) == [(True, 1)]


async def test_a_def_method_starts_only_when_the_one_before_it_has_ended(
    fifo: Callable[[], Fifo],
) -> None:
    """O-2."""
    started, release = fifo(), fifo()
    async with group(AsyncSteps, 1) as wg:
        first = wg.hold(started, release, "first")
        await bounded(started.taken())
        second = wg.note("second")
        # The async method runs now, and sees what the other lane has done so far.
        assert await bounded(wg.run(_log_of)) == [["first"]]
        assert not second.done()
        release.put()
        await bounded(asyncio.gather(first, second))


async def _log_of(worker: Steps) -> list[object]:
    return list(worker.log)


async def test_async_methods_run_beside_a_busy_def_method(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """A def method froze the whole actor: https://github.com/ray-project/ray/issues/44354. O-3."""
    started, release = fifo(), fifo()
    async with group(AsyncSteps) as wg:
        busy = wg.hold(started, release, 1)
        await bounded(started.taken(2))
        assert await bounded(wg.echo_async("beside")) == ["beside"] * 2
        assert not busy.done()
        release.put(2)
        assert await bounded(busy) == [1, 1]


async def test_async_methods_run_concurrently_and_each_gets_its_own_value(loop_kind: str) -> None:
    """O-3: the first ones end only because a later one runs beside them."""
    async with group(AsyncSteps) as wg:
        long = [wg.wait_for_event(name, name) for name in ("a", "b", "c")]
        assert await bounded(wg.echo_async("short")) == ["short"] * 2
        assert not any(call.done() for call in long)
        for name in ("c", "a", "b"):
            await bounded(wg.set_event(name))
        assert await bounded(asyncio.gather(*long)) == [[name] * 2 for name in ("a", "b", "c")]


async def test_async_methods_run_outside_of_the_main_thread() -> None:
    """O-3: no signal handlers there, and torch's grad mode is per thread."""
    async with group(AsyncSteps) as wg:
        assert await bounded(wg.thread_async()) == [False, False]


async def test_a_call_ends_when_the_ranks_have_answered_whose_result_is_not_collected(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """O-5."""
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        call = wg.hold_rank_one(started, release)
        answers = call.as_completed()
        assert await bounded(anext(answers)) == (0, 0)
        await bounded(started.taken())
        assert not call.done()
        release.put()
        assert await bounded(call) == 0
        await answers.aclose()


async def test_a_late_reply_is_not_taken_for_the_next_call(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """O-6. It was.

    https://github.com/doronz88/pymobiledevice3/pull/1725, https://github.com/python-kasa/python-kasa/pull/636,
    https://github.com/aio-libs/aiohttp/pull/7864
    """
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        task = asyncio.create_task(wg.hold(started, release, "A"))
        await bounded(started.taken(2))
        task.cancel()
        following = wg.echo("B")
        release.put(2)
        assert await bounded(following) == ["B", "B"]
        assert task.cancelled()
        assert in_flight(wg) == [0, 0]


async def test_values_belong_to_their_calls_whenever_others_are_cancelled(loop_kind: str) -> None:
    """https://github.com/doronz88/pymobiledevice3/pull/1725, 100 times. O-6, E-5."""
    chance = random.Random(26)
    async with group(AsyncSteps) as wg:
        for number in range(100):
            method = wg.echo if number % 2 else wg.echo_async
            task = asyncio.create_task(method(("cancelled", number)))
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
            assert await bounded(method(number)) == [number, number]
        # A vote on the last cancelled call may be under way; a call on each lane comes after it.
        await bounded(asyncio.gather(wg.echo(), wg.echo_async()))
        assert await bounded(wg.echo("in step")) == ["in step"] * 2
        for _ in range(1000):
            if in_flight(wg) == [0, 0]:
                break
            await bounded(wg.echo())
        assert in_flight(wg) == [0, 0]


async def test_use_from_another_thread_is_refused_and_points_to_the_blocking_group() -> None:
    """O-9."""
    async with group(Steps, 1) as wg:
        with pytest.raises(UsageError, match=r"asyncwg\.blocking"):
            await bounded(in_thread(wg.echo, 1))
        assert await bounded(wg.echo(2)) == [2]


async def test_use_from_another_loop_is_refused_and_points_to_the_blocking_group() -> None:
    """O-9."""
    async with group(Steps, 1) as wg:

        async def elsewhere() -> None:
            await wg.echo(1)

        with pytest.raises(UsageError, match=r"asyncwg\.blocking"):
            await bounded(in_thread(asyncio.run, elsewhere()))
        with pytest.raises(UsageError, match=r"asyncwg\.blocking"):
            await bounded(in_thread(asyncio.run, wg.shutdown()))
        assert wg.state == "running"
        assert await bounded(wg.echo(2)) == [2]


async def test_a_group_that_is_not_started_says_how_to_start_it() -> None:
    with pytest.raises(GroupClosedError, match="async with"):
        group(Steps).echo(1)
