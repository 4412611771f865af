"""Large values of programs that are attached: one arena, one copy, and books that balance."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from asyncwg import DataProto, ResourceError, UsageError, WorkerGroup, share
from asyncwg._driver.arena import CONTROLLER, arena
from tests.leaks import bounded
from tests.process.workers_arena import LARGE, MB, Large, numbers, same
from tests.process.workers_attach import Program
from tests.process.workers_life import Fifo
from tests.process.workers_values import group

_others: list[Any] = []
"""Blocks that other tests of this process have left to be collected."""


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    gc.collect()
    _others[:] = arena()._blocks.values()
    yield
    _others.clear()
    gc.collect()


@pytest_asyncio.fixture
async def own() -> AsyncIterator[WorkerGroup]:
    """The group, whose host is this process: so its books can be looked at."""
    async with group(Large, attachable=True, name="large") as started:
        yield started


@pytest_asyncio.fixture
async def wg(own: WorkerGroup) -> AsyncIterator[WorkerGroup]:
    """A handle on it, with mappings of its own."""
    async with await bounded(WorkerGroup.attach("large")) as attached:
        yield attached


def blocks() -> list[tuple[int, list[str]]]:
    """Size and holders, without what makes them unique, of every block in the host's books."""
    found = []
    for block in [each for each in arena()._blocks.values() if each not in _others]:
        kinds = [
            "controller"
            if name == CONTROLLER[0]
            else "program"
            if "program" in name
            else f"rank {rank}"
            for name, rank in block.holders
        ]
        found.append((block.size, sorted(kinds)))
    return found


async def balanced() -> None:
    """Wait until nobody holds a block."""

    async def until() -> None:
        while blocks():
            gc.collect()
            await asyncio.sleep(0)

    await bounded(until())


async def test_one_copy_of_an_argument_serves_all_ranks(wg: WorkerGroup) -> None:
    before = arena().allocations
    await bounded(wg.keep(numbers(1)))
    assert arena().allocations == before + 1
    assert blocks() == [(LARGE, ["rank 0", "rank 1"])]
    assert await bounded(wg.kept_firsts()) == [[1], [1]]
    await bounded(wg.forget())
    await balanced()


async def test_results_stand_where_ranks_wrote_them(wg: WorkerGroup) -> None:
    before = arena().allocations
    first, second = await bounded(wg.make(5))
    assert same(first, 5)
    assert same(second, 5)
    assert arena().allocations == before + 2
    assert blocks() == [(LARGE, ["program"])] * 2
    second[0] = -1
    del first
    assert second[0] == -1
    del second
    await balanced()


async def test_joined_results_are_one_view(wg: WorkerGroup) -> None:
    before = arena().allocations
    joined = await bounded(wg.rows(numbers(0).reshape(-1, 8)))
    assert torch.equal(joined, numbers(0).reshape(-1, 8))
    # Two shards of the argument, and one place for what is joined.
    assert arena().allocations == before + 3
    del joined
    await balanced()


async def test_what_is_handed_on_travels_by_reference(wg: WorkerGroup) -> None:
    first, _ = await bounded(wg.make(5))
    before = arena().allocations
    await bounded(wg.keep(first))
    assert arena().allocations == before
    del first, _
    assert await bounded(wg.kept_firsts()) == [[5], [5]]
    assert [kinds for _, kinds in blocks()] == [["rank 0", "rank 1"]]
    await bounded(wg.forget())
    await balanced()


async def test_what_was_written_to_is_sent_as_it_is_here(wg: WorkerGroup) -> None:
    first, _ = await bounded(wg.make(5))
    first += 1
    await bounded(wg.keep(first))
    assert await bounded(wg.kept_firsts()) == [[6], [6]]


@pytest.mark.parametrize(
    "make", [numbers, lambda n: numbers(n).numpy(), lambda n: share(numbers(n))]
)
async def test_values_of_every_kind_arrive(wg: WorkerGroup, make: Callable[[int], Any]) -> None:
    await bounded(wg.keep(make(3)))
    assert await bounded(wg.kept_firsts()) == [[3], [3]]


async def test_batches_are_split_and_joined(wg: WorkerGroup) -> None:
    batch = DataProto.from_dict({"x": numbers(0).reshape(-1, 8)})
    joined = await bounded(wg.rows(batch))
    assert torch.equal(joined.batch["x"], numbers(0).reshape(-1, 8))


async def test_a_call_behind_a_large_one_keeps_its_place(wg: WorkerGroup) -> None:
    calls = [
        wg.keep(numbers(1)),
        wg.keep(numbers(2, 80)),
        wg[0].keep(numbers(3)),
        wg[1].keep(numbers(4, 80)),
    ]
    await bounded(asyncio.gather(*calls))
    assert await bounded(wg.kept_firsts()) == [[1, 2, 3], [1, 2, 4]]


async def test_an_argument_written_to_meanwhile_fails_its_call(wg: WorkerGroup) -> None:
    value = numbers(1, 32 * MB)
    call = wg.keep(value)
    value.add_(1)
    with pytest.raises(UsageError, match="written to while it was being sent"):
        await bounded(call)
    array = numbers(1).numpy()
    call = wg.keep(array)
    array += 1
    await bounded(call)
    assert await bounded(wg.kept_firsts()) == [[1], [1]]
    await bounded(wg.forget())
    await balanced()


async def test_a_call_that_is_cancelled_on_its_way_gives_everything_back(wg: WorkerGroup) -> None:
    call = wg.keep(numbers(1, 16 * MB))
    call.cancel()
    behind = wg.keep(numbers(2))
    await bounded(behind)
    assert await bounded(wg.kept_firsts()) == [[2], [2]]
    await bounded(wg.forget())
    await balanced()


async def test_what_can_never_fit_is_refused(wg: WorkerGroup) -> None:
    meta = np.broadcast_to(np.zeros(1, np.int64), (arena().size // 8 + 1,))
    with pytest.raises(ResourceError, match="can't fit"):
        wg.keep(meta)


async def test_arguments_wait_for_room() -> None:
    limited = group(Large, attachable=True, name="tight", arena_limit=2 * LARGE)
    async with limited, await bounded(WorkerGroup.attach("tight")) as wg:
        with pytest.raises(ResourceError, match="can't fit"):
            await bounded(wg.keep(numbers(0, 3 * LARGE)))
        await bounded(wg.keep(numbers(0, 2 * LARGE)))
        # Ranks are asked to make the blocks that they keep their own.
        await bounded(wg.keep(numbers(1, 2 * LARGE)))
        assert await bounded(wg.kept_firsts()) == [[0, 1], [0, 1]]


async def test_what_is_in_use_stays_as_it_is_when_the_handle_goes(own: WorkerGroup) -> None:
    wg = await bounded(WorkerGroup.attach("large"))
    first, second = await bounded(wg.make(5))
    await wg.detach()
    await balanced()
    # Its places are used again, by others.
    await bounded(own.keep(numbers(77, 2 * LARGE)))
    assert same(first, 5)
    assert same(second, 5)


async def test_a_program_that_dies_holds_nothing(own: WorkerGroup) -> None:
    text = """
import torch
async def main():
    wg = await WorkerGroup.attach("large")
    kept = await wg.make(5)
    say("kept")
    await asyncio.Event().wait()
"""
    with Program(text) as other:
        assert await other.line() == "kept"
        assert blocks() == [(LARGE, ["program"])] * 2
        other.kill()
    await balanced()


async def one_turn(wg: WorkerGroup, number: int) -> None:
    value = torch.full((300_000,), number)
    for result in await bounded(wg.echo(value)):
        assert torch.equal(result, value)


async def test_two_programs_share_one_arena(own: WorkerGroup, fifo: Callable[[], Fifo]) -> None:
    text = """
import torch
async def main():
    async with await WorkerGroup.attach("large") as wg:
        for turn in range(20):
            value = torch.full((300_000,), turn)
            for result in await wg.echo(value):
                assert torch.equal(result, value)
    say("well")
"""
    with Program(text) as one, Program(text) as other:
        for turn in range(20):
            await one_turn(own, -turn)
        assert [await one.line(), await other.line()] == ["well", "well"]
        one.finish()
        other.finish()
    await balanced()
