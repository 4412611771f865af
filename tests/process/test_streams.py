"""Generator methods: ``async for rank, item in wg.method(...)``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch

from asyncwg import CallTimeoutError, UsageError, WorkerDiedError, WorkerGroup, WorkerGroupError
from asyncwg._driver.arena import arena
from asyncwg._wire.frames import STREAM_WINDOW
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import Fifo
from tests.process.workers_streams import Giver
from tests.process.workers_values import group

LARGE = 100_000
"""Numbers in a tensor that goes through the arena."""
BOTH = pytest.mark.parametrize("count", ["count", "count_async"])


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    async with group(Giver) as started:
        yield started


async def read(stream: Any, most: int | None = None) -> list[tuple[int, Any]]:
    """Return the items of a stream, or the first ``most``."""
    items: list[tuple[int, Any]] = []
    async for item in stream:
        items.append(item)
        if len(items) == most:
            break
    return items


async def begun(stream: Any) -> None:
    """Read until both ranks have given an item."""
    ranks: set[int] = set()
    async for rank, _ in stream:
        ranks.add(rank)
        if len(ranks) == 2:
            break


async def read_into(items: list[tuple[int, Any]], stream: Any) -> None:
    """Read all items of a stream that fails."""
    async for item in stream:
        items.append(item)  # noqa: PERF401 - what came before the failure counts


def of(items: list[tuple[int, Any]], rank: int) -> list[Any]:
    return [item for each, item in items if each == rank]


@BOTH
async def test_all_items_of_all_ranks_come_in_the_order_of_each(
    wg: WorkerGroup, count: str, loop_kind: str
) -> None:
    items = await bounded(read(getattr(wg, count)(20)))
    assert of(items, 0) == of(items, 1) == list(range(20))
    assert len(items) == 40


async def test_a_view_of_one_rank_has_its_items_alone(wg: WorkerGroup) -> None:
    assert await bounded(read(wg[1].count(2))) == [(1, 0), (1, 1)]


async def test_a_mode_that_splits_gives_each_generator_its_shard(wg: WorkerGroup) -> None:
    items = await bounded(read(wg.row_by_row(torch.arange(6))))
    assert of(items, 0) == [0, 1, 2]
    assert of(items, 1) == [3, 4, 5]


async def test_one_rank_alone_may_give_the_items(wg: WorkerGroup) -> None:
    assert await bounded(read(wg.on_rank_zero())) == [(0, 0)]


async def test_none_is_an_item_and_no_items_are_no_error(wg: WorkerGroup) -> None:
    assert sorted(await bounded(read(wg.nones()))) == [(0, None), (0, None), (1, None), (1, None)]
    assert await bounded(read(wg.count(0))) == []


@pytest.mark.parametrize("name", ["large", "large_async"])
async def test_large_items_are_what_they_were_when_they_were_yielded(
    wg: WorkerGroup, name: str
) -> None:
    """O-7: also if the generator writes to the same tensor again."""
    async for _, tensor in getattr(wg, name)(5, LARGE):
        assert tensor.min() == tensor.max()
        del tensor
    items = await bounded(read(getattr(wg, name)(5, LARGE)))
    assert [float(each[0]) for each in of(items, 1)] == [0, 1, 2, 3, 4]
    del items
    await bounded(wg.notes())
    gc.collect()
    assert arena().in_use() == 0


@BOTH
async def test_generators_make_no_more_than_a_window_ahead_of_their_reader(
    wg: WorkerGroup, count: str
) -> None:
    one = wg[0]
    reading = aiter(getattr(one, count)())
    for _ in range(3):
        await bounded(anext(reading))
    # The lane with the generator is busy, the other one answers; what was asked for is made by then.
    while len(made := await bounded(one.notes_async())) < 3 + STREAM_WINDOW:
        pass
    await bounded(wg.check_health(timeout=PATIENCE))
    made = await bounded(one.notes_async())
    assert made == list(range(3 + STREAM_WINDOW))


@BOTH
async def test_leaving_the_loop_closes_the_generators_on_every_rank(
    wg: WorkerGroup, count: str, loop_kind: str
) -> None:
    await bounded(begun(getattr(wg, count)()))
    for log in await bounded(_closed(wg)):
        assert log[-1] == "closed"


async def _closed(wg: WorkerGroup) -> list[list[Any]]:
    while True:
        logs: list[list[Any]] = await wg.notes_async()
        if all("closed" in log for log in logs):
            return logs


@BOTH
async def test_an_exception_in_the_loop_closes_the_generators(wg: WorkerGroup, count: str) -> None:
    stream = getattr(wg, count)()

    async def reader() -> None:
        ranks: set[int] = set()
        async for rank, _ in stream:
            ranks.add(rank)
            if len(ranks) == 2:
                raise KeyError

    with pytest.raises(KeyError):
        await bounded(reader())
    await bounded(_closed(wg))


@BOTH
async def test_a_cancelled_reader_closes_the_generators(
    wg: WorkerGroup, count: str, loop_kind: str
) -> None:
    both = asyncio.Event()

    async def reader() -> None:
        ranks: set[int] = set()
        async for rank, _ in getattr(wg, count)():
            ranks.add(rank)
            if len(ranks) == 2:
                both.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(reader())
    await bounded(both.wait())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(task)
    await bounded(_closed(wg))


async def test_closing_it_closes_the_generators(wg: WorkerGroup) -> None:
    async with contextlib.aclosing(wg[0].count()) as stream:
        await bounded(anext(stream))
    assert "closed" in await bounded(wg[0].notes())
    with pytest.raises(StopAsyncIteration):
        await bounded(anext(stream))


async def test_a_stream_that_nobody_reads_is_closed_when_it_is_dropped(wg: WorkerGroup) -> None:
    stream = wg.count_async()
    while not all(await bounded(wg.notes_async())):
        pass
    del stream
    await bounded(_closed(wg))


async def test_an_async_generator_that_waits_is_cancelled(wg: WorkerGroup) -> None:
    await bounded(begun(wg.one_and_wait()))

    async def cancelled() -> None:
        while await wg.notes_async() != [["cancelled"]] * 2:
            pass

    await bounded(cancelled())


async def test_a_running_def_generator_sees_that_its_reader_has_gone(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, seen = fifo(), fifo()
    stream = wg.until_cancelled(started, seen)
    await bounded(started.taken(2))
    stream.close()
    await bounded(seen.taken(2))
    assert await bounded(wg.echo(1)) == [1, 1]


@pytest.mark.parametrize("name", ["fail_after", "fail_after_async"])
async def test_an_error_comes_after_the_items_that_came_before_it(
    wg: WorkerGroup, name: str
) -> None:
    items: list[Any] = []
    with pytest.raises(ValueError, match="no item 3"):
        await bounded(read_into(items, getattr(wg[0], name)(3, -1)))
    assert items == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("name", ["fail_after", "fail_after_async"])
async def test_an_error_of_one_rank_closes_the_generators_of_the_others_and_the_group_stays_usable(
    wg: WorkerGroup, name: str
) -> None:
    items: list[Any] = []
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(read_into(items, getattr(wg, name)(3, 1)))
    assert of(items, 1) == [0, 1, 2]
    assert [getattr(error, "rank", None) for error in caught.value.exceptions] == [1]
    assert wg.state == "running"
    assert await bounded(wg.echo(1)) == [1, 1]


@pytest_asyncio.fixture
async def told() -> AsyncIterator[list[Any]]:
    """The exceptions that the loop is told of, because nobody has looked at them."""
    found: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: found.append(context.get("exception")))
    yield found
    loop.set_exception_handler(None)


async def ended(stream: Any) -> None:
    """Wait until a stream has ended, without reading it."""
    while not stream._call.done():  # noqa: ASYNC110  # nobody tells it
        await asyncio.sleep(0)


@pytest.mark.parametrize("name", ["fail_after", "fail_after_async"])
async def test_an_error_that_came_before_the_loop_was_left_is_nobodys(
    wg: WorkerGroup, name: str, told: list[Any]
) -> None:
    """Whether it was reported was a matter of luck: one that comes afterwards never is."""
    stream = getattr(wg[0], name)(1, -1)
    async for _ in stream:
        await bounded(ended(stream))
        break
    del stream
    gc.collect()
    assert told == []


@pytest.mark.parametrize("name", ["fail_after", "fail_after_async"])
async def test_an_error_of_a_stream_that_nobody_reads_is_reported(
    wg: WorkerGroup, name: str, told: list[Any]
) -> None:
    stream = getattr(wg[0], name)(1, -1)
    await bounded(ended(stream))
    del stream
    gc.collect()
    assert [str(error) for error in told] == ["no item 1"]


async def test_a_death_comes_after_the_items_that_came_before_it(wg: WorkerGroup) -> None:
    items: list[Any] = []
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        await bounded(read_into(items, wg[0].die_after(3)))
    assert items == [(0, 0), (0, 1), (0, 2)]


async def test_an_item_that_can_not_be_pickled_is_an_error_that_says_which_part(
    wg: WorkerGroup,
) -> None:
    items: list[Any] = []
    with pytest.raises(TypeError, match=r"an item of Giver.unpicklable .*item\['lock'\]"):
        await bounded(read_into(items, wg[0].unpicklable()))
    assert items == [(0, 1)]
    assert await bounded(wg.echo(1)) == [1, 1]


async def test_a_def_call_inside_the_loop_of_a_def_generator_is_refused_at_once(
    wg: WorkerGroup,
) -> None:
    """It would wait for the loop, and the loop for it."""
    async with asyncio.timeout(PATIENCE):
        async for _ in wg.count():
            with pytest.raises(UsageError, match=r"Giver\.echo would wait for the 'async for'"):
                wg.echo(1)
            with pytest.raises(UsageError):
                wg[1].notes()
            assert await wg.echo_async(1) == [1, 1]
            break
        assert await wg.echo(1) == [1, 1]


async def test_what_another_task_calls_waits_for_the_end_of_the_generator(wg: WorkerGroup) -> None:
    async def call() -> Any:
        return await wg.notes()

    stream = aiter(wg.count())
    await bounded(anext(stream))
    task = asyncio.create_task(call())
    await bounded(wg.check_health(timeout=PATIENCE))
    assert not task.done()
    del stream
    assert [log[-1] for log in await bounded(task)] == ["closed", "closed"]


async def test_an_async_generator_does_not_hold_the_lane(wg: WorkerGroup) -> None:
    async with asyncio.timeout(PATIENCE):
        async for _, number in wg.count_async(3):
            assert await wg.echo(number) == [number, number]


async def test_calls_after_a_generator_wait_for_it_and_are_served(wg: WorkerGroup) -> None:
    """O-2."""
    stream = wg.count(3)
    call = wg.notes()
    await bounded(read(stream))
    assert await bounded(call) == [[0, 1, 2, "closed"]] * 2


async def test_a_stream_that_is_closed_before_a_rank_has_begun_is_dropped(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    """E-5."""
    started, seen = fifo(), fifo()
    busy = wg.until_cancelled(started, seen)
    await bounded(started.taken(2))
    wg.count(3).close()
    await bounded(wg.check_health(timeout=PATIENCE))
    busy.close()
    assert await bounded(wg.notes()) == [[], []]


async def test_def_generators_are_closed_at_the_same_item_on_every_rank(wg: WorkerGroup) -> None:
    """E-5: one that is further may wait for the others in a collective."""
    for most in range(1, 12):
        await bounded(read(wg.count(), most))
        first, second = await bounded(wg.notes())
        assert first == second


async def test_a_rank_that_has_not_begun_gives_as_many_items_as_the_one_that_has(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, seen = fifo(), fifo()
    busy = wg[1].until_cancelled(started, seen)
    await bounded(started.taken())
    await bounded(read(wg.count(), 5))
    await bounded(wg.check_health(timeout=PATIENCE))
    busy.close()
    first, second = await bounded(wg.notes())
    assert first == second
    assert len(first) > 5


async def test_a_failure_elsewhere_is_no_failure_of_a_rank_that_has_not_begun(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    """Its generator was cancelled, and told as failed too."""
    started, release = fifo(), fifo()
    busy = wg[0].hold_the_loop(started, release)
    await bounded(started.taken())
    items: list[Any] = []
    stream = wg.fail_after_async.options(on_error="wait")(1, 1)
    reading = asyncio.create_task(read_into(items, stream))
    while not stream._call._progress.errors:
        await bounded(wg.check_health(timeout=PATIENCE))
    await bounded(wg.check_health(timeout=PATIENCE))  # behind the news that it is to end
    release.put()
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(reading)
    assert [str(error) for error in caught.value.exceptions] == ["no item 1"]
    await bounded(busy)


async def test_a_rank_that_has_more_items_is_closed_when_the_others_have_ended(
    wg: WorkerGroup,
) -> None:
    def numbers(worker: Giver) -> Any:
        yield from worker.count(3 if worker.rank == 0 else None)

    await bounded(read(wg.run(numbers), 12))
    first, second = await bounded(wg.notes())
    assert first == [0, 1, 2, "closed"]
    assert second[-1] == "closed"


async def test_a_deadline_ends_a_stream(wg: WorkerGroup) -> None:
    items: list[Any] = []
    # One of them gives a busy machine the time for the items.
    for seconds in (0.2, 2, 20):
        items.clear()
        with pytest.raises(CallTimeoutError):
            await bounded(read_into(items, wg.one_and_wait.options(timeout=seconds)()))
        if len(items) == 2:
            break
    assert sorted(items) == [(0, 1), (1, 1)]


async def test_a_shutdown_while_a_generator_waits_for_its_reader_is_polite_and_prompt() -> None:
    async with group(Giver) as wg:
        stream = wg.count()
        await bounded(anext(stream))
        await bounded(wg.shutdown(grace=600))


async def test_a_stream_is_not_awaited(wg: WorkerGroup) -> None:
    with pytest.raises(UsageError, match="async for rank, item"):
        await wg.count(1)


async def test_a_stream_is_no_argument(wg: WorkerGroup) -> None:
    with pytest.raises(UsageError, match=r"argument value \(a asyncwg.*Stream\).* send its items"):
        wg.echo_async(wg.count_async(1))
    assert await bounded(wg.echo(1)) == [1, 1]


async def test_arguments_that_do_not_fit_reach_no_rank(wg: WorkerGroup) -> None:
    with pytest.raises(TypeError, match="count"):
        wg.count(1, 2)


async def test_a_call_among_the_arguments_means_its_value(wg: WorkerGroup) -> None:
    assert await bounded(read(wg[0].count(wg[0].echo(2)))) == [(0, 0), (0, 1)]


async def test_generators_that_are_not_registered_and_functions_give_items_too(
    wg: WorkerGroup,
) -> None:
    def numbers(worker: Giver, end: int) -> Any:
        yield from range(worker.rank, end)

    assert sorted(await bounded(read(wg.run(numbers, 2)))) == [(0, 0), (0, 1), (1, 1)]
    assert await bounded(read(wg.execute_rank_zero("count", 1))) == [(0, 0)]


async def test_the_concurrency_of_async_generators_is_bounded(wg: WorkerGroup) -> None:
    one = wg[0]
    first, second = one.one_at_a_time("a"), one.one_at_a_time("b")
    assert await bounded(read(first)) == [(0, "a")]
    assert await bounded(read(second)) == [(0, "b")]
    assert await bounded(one.notes()) == ["a begins", "a ends", "b begins", "b ends"]


@BOTH
async def test_inline_ranks_give_items_as_they_are_read(count: str) -> None:
    async with group(Giver, executor="inline") as wg:
        assert of(await bounded(read(getattr(wg, count)(3))), 1) == [0, 1, 2]
        await bounded(read(getattr(wg, count)(), 5))
        await bounded(_closed(wg))
        with pytest.raises(WorkerGroupError):
            await bounded(read(wg.fail_after(1, 1)))
