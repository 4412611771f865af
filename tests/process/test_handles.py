"""``materialize_futures=False``: a method reads the value of a call that it was given, or does not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch

from asyncwg import DispatchError, WorkerGroup, WorkerGroupError
from tests.leaks import bounded
from tests.process.workers_handles import Giver, Taker
from tests.process.workers_values import group


@pytest_asyncio.fixture
async def giver() -> AsyncIterator[WorkerGroup]:
    async with group(Giver, 2) as started:
        yield started


@pytest_asyncio.fixture
async def taker() -> AsyncIterator[WorkerGroup]:
    async with group(Taker, 3) as started:
        yield started


NAMES = ["of rank 0", "of rank 1"]


async def test_a_call_among_the_arguments_arrives_as_a_handle_that_nobody_has_decoded(
    giver: WorkerGroup, taker: WorkerGroup
) -> None:
    assert await bounded(taker.kind_and_reads(giver.noted())) == [("Handle", [])] * 3


async def test_the_method_reads_it_once_and_has_the_value(
    giver: WorkerGroup, taker: WorkerGroup
) -> None:
    assert await bounded(taker.read(giver.noted())) == [(NAMES, NAMES)] * 3


async def test_an_async_method_awaits_it(giver: WorkerGroup, taker: WorkerGroup) -> None:
    assert await bounded(taker.read_async(giver.noted())) == [NAMES] * 3


async def test_a_call_in_a_container_is_a_handle_there(
    giver: WorkerGroup, taker: WorkerGroup
) -> None:
    call = taker.read_inside({"here": giver.noted()}, 7)
    assert await bounded(call) == [(NAMES, 7)] * 3


@pytest.mark.parametrize("rows", [6, 300_000])
@pytest.mark.parametrize("kind", ["rows", "proto"])
async def test_each_rank_gets_the_handle_of_its_shard(
    giver: WorkerGroup, taker: WorkerGroup, kind: str, rows: int
) -> None:
    """Over another number of ranks; small, and through the arena."""
    made: Any = getattr(giver, kind)(torch.arange(rows))
    first = 1 if kind == "rows" else 0
    part = rows // 3
    expected = [
        [10.0 * (first + i * part), 10.0 * (first + (i + 1) * part - 1), part] for i in range(3)
    ]
    assert await bounded(taker.shard(made, factor=10)) == expected


async def test_rows_that_do_not_divide_are_refused_before_a_rank_has_a_byte(
    giver: WorkerGroup, taker: WorkerGroup
) -> None:
    with pytest.raises(DispatchError, match="4 rows"):
        await bounded(taker.shard(giver.rows(torch.arange(4))))


async def test_an_error_of_the_first_call_is_the_error_of_the_second(
    giver: WorkerGroup, taker: WorkerGroup
) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(taker.read(giver.fail()))
    assert caught.group_contains(ValueError, match="no value")


async def test_a_handle_can_be_handed_on_and_read_in_the_controller(
    giver: WorkerGroup, taker: WorkerGroup
) -> None:
    handle, *_ = await bounded(taker.hand_on(giver.noted()))
    assert [each.name for each in handle.get()] == NAMES


async def test_a_handle_of_large_rows_outlives_its_group(
    giver: WorkerGroup, taker: WorkerGroup
) -> None:
    rows = torch.arange(300_000)
    handle, *_ = await bounded(taker.hand_on(giver.rows(rows)))
    await bounded(taker.shutdown())
    await bounded(giver.shutdown())
    assert torch.equal(handle.get(), rows + 1)


async def test_other_arguments_are_no_handles(giver: WorkerGroup, taker: WorkerGroup) -> None:
    assert await bounded(taker.kind_and_reads([1])) == [("list", [])] * 3
    assert await bounded(taker.materialized(giver.noted())) == ["list"] * 3
