"""Rows between rollouts and a trainer."""

from __future__ import annotations

import asyncio
import math

import pytest

from asyncwg import Rows, RowsClosed, UsageError
from tests.leaks import bounded


async def test_rows_come_in_the_order_in_which_they_were_put() -> None:
    rows: Rows[int] = Rows(10)
    for number in range(5):
        await bounded(rows.put(number))
    assert await bounded(rows.take(3)) == [0, 1, 2]
    assert await bounded(rows.take(2)) == [3, 4]


async def test_a_batch_is_made_by_the_function_that_is_given() -> None:
    rows: Rows[int] = Rows(10)
    for number in range(4):
        await bounded(rows.put(number))
    assert await bounded(rows.take(4, collate=sum)) == 6


async def test_a_take_waits_for_enough_rows() -> None:
    rows: Rows[int] = Rows(10)
    taking = asyncio.create_task(rows.take(2))
    await bounded(rows.put(1))
    await asyncio.sleep(0)
    assert not taking.done()
    await bounded(rows.put(2))
    assert await bounded(taking) == [1, 2]


async def test_a_put_waits_for_room() -> None:
    rows: Rows[int] = Rows(2)
    await bounded(rows.put(1))
    await bounded(rows.put(2))
    putting = asyncio.create_task(rows.put(3))
    await asyncio.sleep(0)
    assert not putting.done()
    await bounded(rows.take(1))
    await bounded(putting)
    assert len(rows) == 2


async def test_stale_rows_are_dropped_counted_and_make_room() -> None:
    rows: Rows[str] = Rows(2, max_staleness=1)
    await bounded(rows.put("old"))
    rows.advance()
    await bounded(rows.put("new"))
    rows.advance()
    taking = asyncio.create_task(rows.take(2))
    await bounded(rows.put("newest"))
    assert await bounded(taking) == ["new", "newest"]
    statistics = rows.statistics()
    assert (statistics.dropped, statistics.taken, statistics.put) == (1, 2, 3)
    assert (statistics.mean_staleness, statistics.max_staleness) == (0.5, 1)


async def test_a_row_may_have_been_made_by_an_earlier_version() -> None:
    rows: Rows[str] = Rows(2, max_staleness=0)
    rows.advance(5)
    await bounded(rows.put("late", version=4))
    assert rows.drain() == []
    assert rows.statistics().dropped == 1


async def test_a_cancelled_take_loses_no_row_and_keeps_their_order() -> None:
    rows: Rows[int] = Rows(10)
    await bounded(rows.put(1))
    await bounded(rows.put(2))
    taking = asyncio.create_task(rows.take(3))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert len(rows) == 2
    await bounded(rows.put(3))
    assert await bounded(rows.take(3)) == [1, 2, 3]


async def test_takers_are_served_one_after_another() -> None:
    """Two that take turns at rows would both wait for ever."""
    rows: Rows[int] = Rows(10)
    takers = [asyncio.create_task(rows.take(3)) for _ in range(2)]
    for number in range(6):
        await bounded(rows.put(number))
    assert [await bounded(taker) for taker in takers] == [[0, 1, 2], [3, 4, 5]]


async def test_after_a_close_what_is_left_can_be_taken_and_no_more() -> None:
    rows: Rows[int] = Rows(10)
    for number in range(3):
        await bounded(rows.put(number))
    rows.close()
    rows.close()
    assert await bounded(rows.take(2)) == [0, 1]
    for _ in range(2):
        with pytest.raises(RowsClosed):
            await bounded(rows.take(2))
    assert rows.drain() == [2]
    assert len(rows) == 0
    with pytest.raises(RowsClosed):
        await bounded(rows.put(4))


async def test_a_close_wakes_everybody_who_waits() -> None:
    full: Rows[int] = Rows(1)
    await bounded(full.put(1))
    putting = [asyncio.create_task(full.put(2)) for _ in range(3)]
    empty: Rows[int] = Rows(1)
    taking = [asyncio.create_task(empty.take(1)) for _ in range(3)]
    await asyncio.sleep(0)
    full.close()
    empty.close()
    for task in (*putting, *taking):
        with pytest.raises(RowsClosed):
            await bounded(task)


async def test_waiting_is_measured_on_both_sides() -> None:
    rows: Rows[int] = Rows(1)
    taking = asyncio.create_task(rows.take(1))
    await asyncio.sleep(0)
    await bounded(rows.put(1))
    await bounded(taking)
    statistics = rows.statistics()
    assert statistics.take_waited > 0
    assert statistics.waiting == 0


async def test_nothing_has_happened_at_first() -> None:
    statistics = Rows[int](1).statistics()
    assert math.isnan(statistics.mean_staleness)
    assert (statistics.put, statistics.taken, statistics.dropped) == (0, 0, 0)


async def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(UsageError, match="maxsize"):
        Rows(0)
    with pytest.raises(UsageError, match="max_staleness"):
        Rows(1, max_staleness=-1)
    rows: Rows[int] = Rows(1)
    with pytest.raises(UsageError, match="n must be"):
        await rows.take(0)
    with pytest.raises(UsageError, match="version 1"):
        await rows.put(1, version=1)
    rows.advance(3)
    with pytest.raises(UsageError, match="go back"):
        rows.advance(2)
