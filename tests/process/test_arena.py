"""Large values: they arrive as they were sent, and what is received is the receiver's own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tensordict import TensorDict

from asyncwg import DataProto, PerRank, UsageError, WorkerGroup, WorkerGroupError
from asyncwg._driver.arena import Arena, arena
from tests.leaks import bounded
from tests.process.workers_arena import LARGE, MB, Batch, Large, numbers, same
from tests.process.workers_life import Fifo
from tests.process.workers_values import group


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    async with group(Large) as started:
        yield started


@pytest_asyncio.fixture
async def one() -> AsyncIterator[WorkerGroup]:
    """A group of one rank."""
    async with group(Large, 1) as started:
        yield started


class Count:
    """How many blocks were given out in a block of code."""

    def __init__(self) -> None:
        self._before = arena().allocations
        self.blocks = -1

    def __enter__(self) -> Count:
        return self

    def __exit__(self, *_error: object) -> None:
        self.blocks = arena().allocations - self._before


async def quiet(group: Any) -> Arena:
    """Return the arena when a round to all ranks has brought back what they had let go."""
    gc.collect()
    await bounded(group.descriptors())
    return arena()


# Once, however many read it


async def test_a_value_for_all_ranks_is_copied_once() -> None:
    async with group(Large, 4) as four:
        with Count() as count:
            assert await bounded(four.check(numbers(5), 5)) == [True] * 4
    assert count.blocks == 1


async def test_each_shard_is_copied_once(wg: WorkerGroup) -> None:
    batch = numbers(0, 2 * LARGE)
    with Count() as count:
        assert await bounded(wg.rows_kept(batch)) == [len(batch) // 2] * 2
    assert count.blocks == 2
    assert await bounded(wg.kept_firsts()) == [[0], [len(batch) // 2]]


async def test_ranks_with_the_same_dp_rank_share_one_shard() -> None:
    async with group(Large, 4) as four:
        await bounded(four.join_mesh(2))
        batch = numbers(0, 2 * LARGE)
        with Count() as count:
            back = await bounded(four.mesh_rows(batch))
        assert same(back, 0)
    # Two shards, the joined result, and places for what is not collected.
    assert count.blocks == 2 + 1 + 2


@pytest.mark.parametrize("ranks", [1, 2, 3])
async def test_results_are_written_where_the_joined_one_stands(ranks: int) -> None:
    async with group(Large, ranks) as some:
        batch = numbers(0, ranks * LARGE).view(-1, 4)
        with Count() as count:
            back = await bounded(some.rows(batch))
        assert torch.equal(back, batch)
        assert count.blocks == ranks + 1
        found = arena().mapping.find(back.data_ptr())
        assert found is not None
        assert found[1] + back.nbytes <= len(found[0])


async def test_what_has_come_as_a_result_is_handed_on_without_a_copy(wg: WorkerGroup) -> None:
    first, second = await bounded(wg.make(7))
    with Count() as count:
        assert await bounded(wg.check(first, 7)) == [True, True]
        assert await bounded(wg.check(second[100:], 107)) == [True, True]
    assert count.blocks == 0


async def test_a_result_that_was_written_to_is_handed_on_as_it_is_now(one: WorkerGroup) -> None:
    [result] = await bounded(one.make(7))
    result[0] = 1000
    assert await bounded(one.copy_of(result)) == [[(1000, int(result[-1]))]]


async def test_a_result_that_is_written_to_after_it_was_handed_on_arrives_as_it_was(
    one: WorkerGroup,
) -> None:
    """O-7."""
    [result] = await bounded(one.make(7))
    call = one.check(result, 7)
    result[:] = 0
    assert await bounded(call) == [True]


# What is received is the receiver's own: O-8


@pytest.mark.parametrize(
    "make", [numbers, lambda first: numbers(first).numpy()], ids=["tensor", "array"]
)
async def test_what_a_worker_wrote_to_a_value_is_not_in_the_next_one_there(
    wg: WorkerGroup, make: Callable[[int], Any]
) -> None:
    """The block is used again (A-2). Overwriting arrays raised: https://github.com/ray-project/ray/issues/369."""
    for first in range(0, 60, 10):
        value = make(first)
        assert await bounded(wg.overwrite(value, -first)) == [-first] * 2
        assert same(torch.as_tensor(value), first)
        assert await bounded(wg.check(torch.as_tensor(make(first + 1)), first + 1)) == [True] * 2


async def test_what_the_controller_writes_to_a_result_is_not_in_the_next_one_there(
    wg: WorkerGroup,
) -> None:
    for first in range(20):
        results = await bounded(wg.make(first))
        assert [same(result, first) for result in results] == [True, True]
        while results:
            results.pop().fill_(-1)


async def test_results_that_are_kept_are_not_overwritten_by_later_ones(wg: WorkerGroup) -> None:
    kept = [await bounded(wg.make(first)) for first in range(20)]
    for first in range(20):
        await bounded(wg.echo(numbers(1000 + first)))
    assert [[same(one, i) for one in pair] for i, pair in enumerate(kept)] == [[True, True]] * 20


async def test_a_result_outlives_its_group_and_another_ones_traffic() -> None:
    async with group(Large) as first:
        kept = await bounded(first.make(3))
        joined = await bounded(first.rows(numbers(0, 2 * LARGE)))
    async with group(Large) as second:
        for i in range(10):
            await bounded(second.echo(numbers(100 + i)))
    assert [same(one, 3) for one in kept] == [True, True]
    assert same(joined, 0)
    joined.fill_(1)
    del kept, joined
    assert arena().in_use() == 0


async def test_a_value_that_is_written_to_while_its_joined_neighbour_is_awaited_harms_nobody(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    """The ranks' rows meet within a page."""
    turn = fifo()
    batch = numbers(0, 2 * LARGE + 160).view(-1, 1)
    call = wg.rows_in_turn(batch, turn)
    found: dict[int, torch.Tensor] = {}

    async def look() -> None:
        async for rank, value in call.as_completed():
            found[rank] = value
            if rank == 0:
                value.fill_(-1)
                turn.put()

    await bounded(look())
    assert bool((found[0] == -1).all())
    assert same(found[1].view(-1), len(batch) // 2)


# Values as they are at the call: O-7


@pytest.mark.parametrize("nbytes", [100_000, LARGE, 40 * MB])
async def test_a_tensor_that_is_written_to_after_the_call_arrives_as_it_was_or_fails_the_call(
    one: WorkerGroup, nbytes: int
) -> None:
    """Never a mixture."""
    for number in range(5):
        value = numbers(number, nbytes)
        call = one.check(value, number)
        value.fill_(-1)
        try:
            assert await bounded(call) == [True]
        except UsageError as error:
            assert "written to" in str(error)  # noqa: PT017  # either end is right


async def test_a_tensor_that_is_written_to_in_part_while_it_is_copied_is_never_a_mixture(
    one: WorkerGroup,
) -> None:
    """The loop turns while threads copy."""
    for number in range(5):
        value = numbers(number, 40 * MB)
        call = one.check(value, number)
        await asyncio.sleep(0)
        value[::1000] = -1
        with contextlib.suppress(UsageError):
            assert await bounded(call) == [True]
    assert await bounded(one.check(numbers(9), 9)) == [True]


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(LARGE),
        lambda: torch.arange(LARGE).numpy(),
        lambda: np.arange(2 * LARGE)[::2],
        lambda: np.asfortranarray(np.arange(LARGE).reshape(2, -1)),
        lambda: np.frombuffer(bytearray(np.arange(LARGE).tobytes()), np.int64),
    ],
    ids=["array", "of a tensor", "strided", "fortran", "of bytes"],
)
async def test_an_array_that_is_written_to_after_the_call_arrives_as_it_was(
    one: WorkerGroup, make: Callable[[], Any]
) -> None:
    array = make()
    before = array.copy()
    call = one.echo(array)
    array[...] = -1
    [back] = await bounded(call)
    assert np.array_equal(back, before)


async def test_a_tensor_made_in_inference_mode_arrives_as_it_was(one: WorkerGroup) -> None:
    with torch.inference_mode():
        value = numbers(3)
        call = one.check(value, 3)
        value.fill_(-1)
    assert await bounded(call) == [True]


async def test_copy_now_takes_writes_that_no_counter_shows(one: WorkerGroup) -> None:
    array = numbers(3).numpy()
    tensor = torch.from_numpy(array)
    call = one.check.options(copy="now")(tensor, 3)
    array[:] = -1
    assert await bounded(call) == [True]


async def test_copy_now_holds_for_a_call_that_waits_for_room(fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    async with group(Large, 1, arena_limit=3 * MB) as one:
        first = one.keep_and_hold(numbers(0), started, release)
        await bounded(started.taken())
        array = numbers(3).numpy()
        call = one.check.options(copy="now")(torch.from_numpy(array), 3)
        array[:] = -1
        release.put()
        assert await bounded(first) == [0]
        assert await bounded(call) == [True]


async def test_a_call_that_waits_for_room_takes_its_values_as_they_were(
    fifo: Callable[[], Fifo],
) -> None:
    started, release = fifo(), fifo()
    async with group(Large, 1, arena_limit=3 * MB) as one:
        first = one.keep_and_hold(numbers(0), started, release)
        await bounded(started.taken())
        tensor, array = numbers(3), numbers(4).numpy()
        calls = [one.check(tensor, 3), one.echo(array)]
        tensor.fill_(-1)
        array[:] = -1
        release.put()
        await bounded(first)
        with pytest.raises(UsageError, match="written to"):
            await bounded(calls[0])
        [back] = await bounded(calls[1])
        assert same(torch.as_tensor(back), 4)


async def test_a_small_value_that_leaves_beside_a_large_one_arrives_as_it_was(
    wg: WorkerGroup,
) -> None:
    small = np.zeros(2000, np.int64)
    call = wg.bytes_of(PerRank([{"array": small}, {"array": numbers(0, 40 * MB).numpy().copy()}]))
    small[:] = -1
    first, _ = await bounded(call)
    assert first == bytes(small.nbytes)


async def test_a_small_value_beside_a_large_tensor_arrives_as_it_was(wg: WorkerGroup) -> None:
    """The tensor is copied in a thread, and all leave when it stands."""
    small = np.zeros(3000, np.int64)
    call = wg.bytes_of(PerRank([{"array": small}, numbers(0, 40 * MB)]))
    small[:] = -1
    first, second = await bounded(call)
    assert first == bytes(small.nbytes)
    assert len(second) == 40 * MB


@pytest.mark.parametrize("kind", ["tensor", "array"])
async def test_a_result_is_what_it_was_when_it_was_returned_or_an_error(
    one: WorkerGroup, kind: str
) -> None:
    """An ``async def`` method goes on with the loop while its result waits for a place."""
    for _ in range(5):
        try:
            [back] = await bounded(one.give_and_change(kind))
            assert float(back.sum()) == 0
        except WorkerGroupError as error:
            assert kind == "tensor"  # either end is right
            assert "written to" in str(error.exceptions[0])  # noqa: PT017
            del error
    assert (await quiet(one)).in_use() <= LARGE * 9
    back = None
    assert (await quiet(one)).in_use() == 0


# Every kind of large value

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "strided": lambda: torch.arange(2 * LARGE)[::2],
    "transposed": lambda: torch.arange(LARGE).view(1024, -1).T,
    "expanded": lambda: torch.arange(1024).expand(2048, 1024),
    "channels_last": lambda: torch.rand(8, 3, 200, 200).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.rand(LARGE).bfloat16(),
    "float8": lambda: torch.rand(LARGE).to(torch.float8_e4m3fn),
    "float8 strided": lambda: torch.rand(2 * LARGE).to(torch.float8_e5m2)[::2],
    "bool": lambda: torch.rand(LARGE) > 0.5,
    "bool transposed": lambda: (torch.rand(LARGE) > 0.5).view(1024, -1).T,
    "complex": lambda: torch.randn(LARGE, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(LARGE, dtype=torch.complex64).conj(),
    "with grad": lambda: torch.rand(LARGE, requires_grad=True) * 2,
}


def equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        plain, back = value.detach().resolve_conj(), other
        if plain.dtype.itemsize == 1:
            plain, back = plain.contiguous().view(torch.uint8), back.contiguous().view(torch.uint8)
        return value.dtype == other.dtype and bool(torch.equal(plain, back))
    if isinstance(value, np.ndarray):
        return bool(value.dtype == other.dtype and np.array_equal(value, other))
    return type(value) is type(other) and bool(value == other)


@pytest.mark.parametrize("method", ["echo", "echo_async"])
async def test_large_tensors_of_all_kinds_come_back(wg: WorkerGroup, method: str) -> None:
    for name, make in TENSORS.items():
        value = make()
        for back in await bounded(getattr(wg, method)(value)):
            assert equal(value, back), name
            assert back.is_contiguous(), name


@pytest.mark.parametrize("method", ["echo", "echo_async"])
async def test_large_arrays_of_all_kinds_come_back(wg: WorkerGroup, method: str) -> None:
    values: list[Any] = [
        np.arange(LARGE)[::-1],
        np.arange(LARGE).reshape(1024, -1).T,
        np.broadcast_to(np.arange(1024), (2048, 1024)),
        np.random.default_rng(0).random(LARGE) > 0.5,
        np.zeros(LARGE // 8, [("a", "i4"), ("b", "f8")]),
        np.array(["word"] * 100_000),
        np.array([1, "x", None] * 50_000, object),
    ]
    for value in values:
        value.flags.writeable = False
        for back in await bounded(getattr(wg, method)(value)):
            assert equal(value, back)
            assert back.flags.writeable


@pytest.mark.parametrize("method", ["echo", "echo_async"])
async def test_large_values_without_a_buffer_come_back(wg: WorkerGroup, method: str) -> None:
    """Their pickle stands in the arena."""
    values = [b"x" * LARGE, "é" * LARGE, list(range(200_000)), bytearray(LARGE), {"k": "v" * LARGE}]
    for value in values:
        with Count() as count:
            for back in await bounded(getattr(wg, method)(value)):
                assert equal(value, back)
        assert count.blocks == 3


async def test_tensors_inside_containers_take_the_same_path(wg: WorkerGroup) -> None:
    x = numbers(0)
    values = [
        DataProto.from_dict({"x": x}, {"n": np.arange(len(x))}),
        TensorDict({"x": x, "deep": {"y": x[::2].repeat(2)}}, batch_size=[len(x)]),
        {"x": x, "deep": [x, (x, "s")]},
        Batch(x, "name"),
        [x, x.numpy()],
    ]
    for value in values:
        with Count() as count:
            results = await bounded(wg.echo(value))
        assert count.blocks == 3
        for back in results:
            assert type(back) is type(value)
            found: Any = back.batch if isinstance(back, DataProto) else back
            found = found.x if isinstance(found, Batch) else found
            found = found[0] if isinstance(found, list) else found
            assert same(found if isinstance(found, torch.Tensor) else found["x"], 0)


@pytest.mark.parametrize("ranks", [2, 3])
async def test_batches_of_all_kinds_are_split_and_joined(ranks: int) -> None:
    rows = 3000 * ranks
    x = torch.arange(rows * 100).view(rows, 100)
    n = np.arange(rows * 50).reshape(rows, 50)
    async with group(Large, ranks) as some:
        proto = await bounded(some.rows(DataProto.from_dict({"x": x}, {"n": n})))
        assert torch.equal(proto.batch["x"], x)
        assert np.array_equal(proto.non_tensor_batch["n"], n)
        table = await bounded(some.rows(TensorDict({"x": x, "d": {"y": x + 1}}, batch_size=[rows])))
        assert torch.equal(table["x"], x)
        assert torch.equal(table["d", "y"], x + 1)
        found = await bounded(some.rows({"x": x, "n": n, "name": "v"}))
        assert torch.equal(found["x"], x)
        assert np.array_equal(found["n"], n)
        assert await bounded(some.rows(list(range(30_000 * ranks)))) == list(range(30_000 * ranks))
        assert torch.equal(await bounded(some.rows(x.T.contiguous().T)), x)


async def test_results_of_different_sizes_are_joined_by_a_copy(wg: WorkerGroup) -> None:
    batch = numbers(0, 2 * LARGE).view(-1, 2)
    half = len(batch) // 2
    back = await bounded(wg.rows_by_rank(batch))
    assert torch.equal(back, torch.cat([batch[:half], batch[half:], batch[half:]]))


async def test_uneven_shards_are_joined_in_order() -> None:
    async with group(Large, 3) as three:
        batch = numbers(0, 3 * LARGE + 8 * 7)
        assert same(await bounded(three.rows.options(uneven="allow")(batch)), 0)
        assert same(await bounded(three.rows.options(uneven="pad")(batch)), 0)


async def test_a_burst_of_calls_keeps_its_order_and_its_values(wg: WorkerGroup) -> None:
    calls = [wg.keep(numbers(i, (i % 3) * LARGE + 8)) for i in range(30)]
    await bounded(asyncio.gather(*calls))
    assert await bounded(wg.kept_firsts()) == [list(range(30))] * 2


async def test_large_and_small_and_failing_calls_between_each_other_leave_nothing(
    wg: WorkerGroup,
) -> None:
    calls: list[Any] = []
    for i in range(10):
        calls += [
            wg.echo(numbers(i)),
            wg.fail(numbers(i)),
            wg.echo_async(numbers(i)),
            wg.size_of("x"),
        ]
    ends: list[Any] = await bounded(asyncio.gather(*calls, return_exceptions=True))
    assert [type(end) for end in ends] == [list, WorkerGroupError, list, list] * 10
    assert all(same(back, i // 2) for i, end in enumerate(ends[::2]) for back in end)
    del calls, ends
    assert (await quiet(wg)).in_use() == 0


# Memory and descriptors


async def test_200_results_of_5_mb_that_are_dropped_leave_memory_as_it_was(
    one: WorkerGroup,
) -> None:
    gc.collect()
    arena().trim()  # of what other tests have used
    before = (arena()._touched, os.fstat(arena().fd).st_blocks)
    for i in range(200):
        [back] = await bounded(one.echo(numbers(i, 5 * MB)))
        assert int(back[0]) == i
        del back
    # An argument and a result, and as many again that a busy machine has not let go yet.
    assert arena()._touched <= before[0] + 4 * 6 * MB
    assert os.fstat(arena().fd).st_blocks * 512 <= before[1] * 512 + 4 * 6 * MB
    assert (await quiet(one)).in_use() == 0


async def test_values_cost_a_process_no_descriptors_however_many_there_are(
    one: WorkerGroup,
) -> None:
    """A region a tensor, and a descriptor a region: https://github.com/pytorch/pytorch/issues/973."""
    await bounded(one.echo(numbers(0)))
    before = [len(os.listdir("/proc/self/fd")), *await bounded(one.descriptors())]
    kept = [await bounded(one.echo([numbers(i, 70_000) for i in range(20)])) for _ in range(20)]
    for i in range(100):
        await bounded(one.keep(numbers(i, 70_000)))
    assert [len(os.listdir("/proc/self/fd")), *await bounded(one.descriptors())] == before
    assert len(kept) == 20


async def test_nothing_is_named_in_shared_memory(wg: WorkerGroup) -> None:
    """Docker gives 64 MB of it: https://github.com/pytorch/pytorch/issues/58386."""
    before = set(os.listdir("/dev/shm"))
    for i in range(50):
        await bounded(wg.make(i, 4 * MB))
        assert set(os.listdir("/dev/shm")) <= before
