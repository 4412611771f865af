"""One rank of many: ``wg.any`` and ``wg.map``."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from asyncwg import UsageError, WorkerGroup
from tests.hostile import UnpicklableError
from tests.leaks import bounded
from tests.process.workers_any import Chosen
from tests.process.workers_life import group


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    async with group(Chosen, 3) as started:
        yield started


async def all_of(results: Any) -> list[Any]:
    return [result async for result in results]


async def test_a_call_goes_to_the_rank_with_the_fewest_under_way(wg: WorkerGroup) -> None:
    held = [wg.any.hold(name) for name in "abc"]
    await bounded(wg[1].let("b"))
    assert await bounded(held[1]) == (1, "b")
    assert await bounded(wg.any.who()) == (1, None)
    await bounded(wg.let("a"))
    await bounded(wg.let("c"))
    assert [await bounded(call) for call in held] == [(0, "a"), (1, "b"), (2, "c")]


async def test_calls_that_wait_for_a_value_count_too(wg: WorkerGroup) -> None:
    needed = wg[0].hold("needed")
    waiting = [wg.any.who(needed) for _ in range(2)]
    await bounded(wg.let("needed"))
    assert {rank for rank, _ in [await bounded(call) for call in waiting]} == {1, 2}


async def test_the_rank_gets_the_arguments_whole_whatever_the_mode(wg: WorkerGroup) -> None:
    assert await bounded(wg.any.whole([1, 2, 3, 4])) == [1, 2, 3, 4]


async def test_any_of_a_view_is_one_of_its_ranks(wg: WorkerGroup) -> None:
    held = [wg[1:].any.hold(name) for name in "abcd"]
    for name in "abcd":
        await bounded(wg.let(name))
    assert [rank for rank, _ in [await bounded(call) for call in held]] == [1, 2, 1, 2]


async def test_calls_with_the_same_key_go_to_the_same_rank(wg: WorkerGroup) -> None:
    hold = wg.any.hold
    held = [hold.options(sticky=key)(name) for key, name in zip("xyxzxx", "abcdef", strict=True)]
    for name in "abcdef":
        await bounded(wg.let(name))
    ranks = [rank for rank, _ in [await bounded(call) for call in held]]
    assert ranks[0] == ranks[2] == ranks[4] == ranks[5]
    assert len({ranks[0], ranks[1], ranks[3]}) == 3


async def test_a_key_on_a_rank_that_a_view_does_not_have_is_given_another_one(
    wg: WorkerGroup,
) -> None:
    assert await bounded(wg.any.who.options(sticky="x")()) == (0, None)
    assert await bounded(wg[1:].any.who.options(sticky="x")()) == (1, None)


async def test_a_key_that_can_not_be_one_is_refused(wg: WorkerGroup) -> None:
    with pytest.raises(UsageError, match="hashable"):
        wg.any.who.options(sticky=[])


async def test_a_key_is_refused_where_no_rank_is_chosen(wg: WorkerGroup) -> None:
    """It would be ignored, and who forgets ``any`` would never know."""
    for surface in (wg, wg[0]):
        with pytest.raises(UsageError, match=r"write \.any\.who\.options\(sticky"):
            surface.who.options(sticky="x")


async def test_a_misspelt_method_is_an_attribute_error(wg: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="did you mean 'whole'"):
        wg.any.whle(1)
    with pytest.raises(AttributeError, match="did you mean 'whole'"):
        wg.map("whle", [])


# map


async def test_results_come_as_they_are_made(wg: WorkerGroup, loop_kind: str) -> None:
    results = wg.map("hold_strings", ["slow", 1, 2], with_items=True)
    assert {await bounded(anext(results)) for _ in range(2)} == {(1, 1), (2, 2)}
    await bounded(wg.let("slow"))
    assert await bounded(anext(results)) == ("slow", "slow")
    with pytest.raises(StopAsyncIteration):
        await bounded(anext(results))


async def test_ordered_results_come_in_the_order_of_their_items(wg: WorkerGroup) -> None:
    results = wg.map(Chosen.hold_strings, ["slow", 1, 2, 3], ordered=True)
    await bounded(wg.let("slow"))
    assert await bounded(all_of(results)) == ["slow", 1, 2, 3]


async def test_all_ranks_take_part(wg: WorkerGroup) -> None:
    results = await bounded(all_of(wg.map("who", range(300))))
    assert {rank for rank, _ in results} == {0, 1, 2}
    assert sorted(value for _, value in results) == list(range(300))


async def test_items_are_read_no_further_than_results_are(wg: WorkerGroup) -> None:
    """Endless items, and a reader that takes its time."""
    read: list[int] = []

    def endless() -> Iterator[int]:
        for number in itertools.count():
            read.append(number)
            yield number

    taken = 0
    async for _ in wg.map("who", endless(), max_inflight=4):
        taken += 1
        await bounded(wg.let("anything"))
        assert len(read) <= taken + 4
        if taken == 20:
            break


async def test_a_method_with_a_bounded_concurrency_is_kept_busy_up_to_it(wg: WorkerGroup) -> None:
    assert sorted(await bounded(all_of(wg.map("counted", range(60))))) == list(range(60))
    assert await bounded(wg.most_running()) == [3, 3, 3]


async def test_items_may_come_one_by_one(wg: WorkerGroup, loop_kind: str) -> None:
    """And results are given while the next item is awaited."""

    async def items() -> AsyncIterator[Any]:
        yield 1
        yield (await wg.any.hold("second"))[1]
        yield 3

    results = wg.map("hold_strings", items())
    assert await bounded(anext(results)) == 1
    await bounded(wg.let("second"))
    assert sorted(map(str, await bounded(all_of(results)))) == ["3", "second"]


async def test_a_failure_says_which_item_it_was_and_cancels_the_others(wg: WorkerGroup) -> None:
    async def mixed() -> AsyncIterator[Any]:
        yield 2
        yield 0

    with pytest.raises(ZeroDivisionError) as caught:
        await bounded(all_of(wg.map("inverse", mixed(), ordered=True)))
    assert "this was item 1 of map(Chosen.inverse): 0" in caught.value.__notes__


async def test_leaving_the_loop_cancels_what_is_under_way(wg: WorkerGroup) -> None:
    async for _ in wg.map("hold_strings", [1, "a", "b"], max_inflight=3):
        await bounded(_held(wg, {"a", "b"}))
        break
    await bounded(_were_cancelled(wg, ["a", "b"]))


async def test_leaving_the_loop_cancels_also_where_a_variable_keeps_the_results(
    wg: WorkerGroup, loop_kind: str
) -> None:
    results = wg.map("hold_strings", [1, "a", "b"], max_inflight=3)
    async for _ in results:
        await bounded(_held(wg, {"a", "b"}))
        break
    await bounded(_were_cancelled(wg, ["a", "b"]))
    assert await bounded(all_of(results)) == []


async def test_results_that_are_dropped_or_closed_cancel_what_is_under_way(
    wg: WorkerGroup,
) -> None:
    results = wg.map("hold_strings", [1, "a"], max_inflight=2)
    assert await bounded(anext(results)) == 1
    await bounded(_held(wg, {"a"}))
    del results
    await bounded(_were_cancelled(wg, ["a"]))
    results = wg.map("hold_strings", [1, "b"], max_inflight=2)
    assert await bounded(anext(results)) == 1
    await bounded(_held(wg, {"b"}))
    results.close()
    results.close()
    with pytest.raises(StopAsyncIteration):
        await bounded(anext(results))
    await bounded(_were_cancelled(wg, ["a", "b"]))


async def _held(wg: WorkerGroup, names: set[str]) -> None:
    """Wait until the ranks have begun these: what they have not begun is dropped."""
    while not names <= {name for rank in await wg.holding() for name in rank}:
        pass


async def _were_cancelled(wg: WorkerGroup, expected: list[str]) -> None:
    names: list[str] = []
    while sorted(names) != expected:
        names = [name for rank in await wg.were_cancelled() for name in rank]


async def test_an_error_of_the_items_is_raised_and_cancels_what_is_under_way(
    wg: WorkerGroup,
) -> None:
    def items() -> Iterator[Any]:
        yield "a"
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        await bounded(all_of(wg.map("hold_strings", items())))


async def test_an_item_that_can_not_be_pickled_is_named(wg: WorkerGroup) -> None:
    with pytest.raises(TypeError, match="can't be pickled") as caught:
        await bounded(all_of(wg.map("who", [UnpicklableError()])))
    assert "this was item 0 of map(Chosen.who)" in caught.value.__notes__[-1]


async def test_what_can_not_be_mapped_is_refused(wg: WorkerGroup) -> None:
    with pytest.raises(UsageError, match="is a generator"):
        wg.map("items", [1])
    with pytest.raises(UsageError, match="iterated over"):
        wg.map("who", 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="max_inflight"):
        wg.map("who", [], max_inflight=0)
    assert await bounded(all_of(wg.map("who", []))) == []
