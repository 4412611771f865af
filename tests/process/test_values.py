"""Values on their way to real workers and back."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from tensordict import TensorDict

from asyncwg import WorkerError, WorkerGroup, WorkerGroupError
from asyncwg.protocol import DataProto
from tests.hostile import HOW, TEXT, Hostile, HostileBaseError, HostileError, UnprintableError
from tests.leaks import Heartbeat, bounded, in_one_try
from tests.process.workers_values import Echo, group


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    async with group(Echo) as started:
        yield started


@pytest_asyncio.fixture
async def one() -> AsyncIterator[WorkerGroup]:
    """A group of one rank."""
    async with group(Echo, 1) as started:
        yield started


def alike(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return (
            value.dtype == other.dtype
            and value.shape == other.shape
            and bool(torch.equal(value, other))
        )
    if isinstance(value, np.ndarray):
        return bool(
            value.dtype == other.dtype
            and value.shape == other.shape
            and np.array_equal(value, other)
        )
    return type(value) is type(other) and bool(value == other)


async def test_what_is_empty_comes_back_as_it_is(wg: WorkerGroup) -> None:
    """An empty tensor was a "bad file descriptor": https://github.com/pytorch/pytorch/issues/5719."""
    values = [
        torch.empty(0, 5), np.empty((0, 3)), b"", [], torch.tensor(3.5), np.array(3.5), None, {},
        torch.zeros(0, dtype=torch.bfloat16),
    ]  # fmt: skip
    for value in values:
        assert all(alike(value, back) for back in await bounded(wg.echo(value)))


@pytest.mark.parametrize("method", ["echo", "echo_async"])
async def test_tensors_and_arrays_of_all_sizes_come_back(wg: WorkerGroup, method: str) -> None:
    for size in (10, 3000, 300_000, 2_000_000):
        values = [torch.arange(size), np.arange(size), np.arange(2 * size)[::2]]
        for back in await bounded(getattr(wg, method)(values)):
            assert all(alike(value, other) for value, other in zip(values, back, strict=True))


async def test_a_tensor_without_a_graph_comes_back_from_one_with(wg: WorkerGroup) -> None:
    """https://github.com/pytorch/pytorch/issues/36457: "cowardly refusing to serialize"."""
    for back in await bounded(wg.doubled_weight()):
        assert torch.equal(back, torch.tensor([2.0, 2.0, 2.0]))
        assert back.grad_fn is None
        assert not back.requires_grad


async def test_a_parameter_comes_back_as_a_parameter(wg: WorkerGroup) -> None:
    """https://github.com/pytorch/pytorch/issues/36457."""
    assert [type(back) for back in await bounded(wg.parameter())] == [torch.nn.Parameter] * 2


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
async def test_sparse_tensors_keep_their_layout(wg: WorkerGroup) -> None:
    """They have no storage: https://github.com/pytorch/pytorch/issues/20248."""
    for sparse in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        for back in await bounded(wg.echo(sparse)):
            assert back.layout == sparse.layout
            assert torch.equal(back.to_dense(), torch.eye(3))


async def test_a_worker_may_write_to_what_it_gets_and_the_controllers_value_stays(
    wg: WorkerGroup,
) -> None:
    """Arrays were read-only: https://github.com/ray-project/ray/issues/5592."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (4, 100_000):
            array = np.arange(float(size))
            for back in await bounded(wg.overwrite_first(array)):
                assert list(back[:4]) == [9, 1, 2, 3]
            assert list(array[:4]) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [4, 100_000])
async def test_ranks_do_not_see_what_another_writes_to_the_same_argument(
    wg: WorkerGroup, size: int
) -> None:
    """O-8."""
    tensor = torch.arange(size)
    await bounded(wg[0].overwrite_first(tensor))
    first, second = await bounded(wg.overwrite_first(tensor))
    first[1] = 77
    assert list(second[:3]) == [9, 1, 2]
    assert list(tensor[:3]) == [0, 1, 2]


@pytest.mark.parametrize("size", [4, 100_000])
async def test_a_result_is_the_controllers_own_and_writable(wg: WorkerGroup, size: int) -> None:
    first, second = await bounded(wg.zeros(size))
    first += 1
    assert float(second.sum()) == 0
    [again, _] = await bounded(wg.zeros(size))
    assert float(again.sum()) == 0


@pytest.mark.parametrize("size", [1000, 2_000_000])
async def test_an_argument_is_taken_as_it_is_at_the_call(wg: WorkerGroup, size: int) -> None:
    """O-7; an array has no counter of its writes, so it is copied before the call returns."""
    array = np.zeros(size)
    calls = []
    for number in range(1, 5):
        array[:] = number
        calls.append(wg.echo(array))
    array[:] = -1
    for number, call in enumerate(calls, 1):
        for back in await bounded(call):
            assert set(np.unique(back)) == {float(number)}


async def test_20_calls_of_8_mib_at_once_all_come_back_and_the_loop_goes_on(
    one: WorkerGroup,
) -> None:
    """Both sides blocked in a write: https://github.com/mdavis-xyz/lambda_multiprocessing/issues/17."""
    values = [bytes([i]) * (8 << 20) for i in range(20)]

    async def echo(value: bytes) -> bytes:
        [back] = await one.echo(value)
        return bytes(back)

    async def all_come_back_and_the_loop_goes_on() -> bool:
        begun = time.monotonic()
        with Heartbeat() as heart:
            backs = await bounded(asyncio.gather(*map(echo, values)))
        assert [back == value for back, value in zip(backs, values, strict=True)] == [True] * 20
        # The report asks for 0.2 s. A loop that blocks in a write comes round when all is over.
        return heart.longest < max(0.2, (time.monotonic() - begun) / 2)

    assert await in_one_try(all_come_back_and_the_loop_goes_on)


async def test_20_calls_with_tensors_of_8_mib_at_once_all_come_back(one: WorkerGroup) -> None:
    """https://github.com/mdavis-xyz/lambda_multiprocessing/issues/17."""
    values = [torch.full((1 << 21,), i, dtype=torch.int32) for i in range(20)]

    async def echo(value: torch.Tensor) -> bool:
        [back] = await one.echo(value)
        return alike(value, back)

    assert await bounded(asyncio.gather(*map(echo, values))) == [True] * 20


@pytest.mark.slow
async def test_an_argument_of_more_than_2_gib_arrives(one: WorkerGroup) -> None:
    """A signed 32-bit length killed the feeder: https://github.com/joblib/loky/issues/143."""
    assert await bounded(one.size_of(bytes(2**31 + 5)), 120) == [2**31 + 5]


async def test_400_small_tensors_in_one_result_cost_no_descriptor(one: WorkerGroup) -> None:
    """Torch hands each tensor over by a descriptor of its own, and runs out of them."""
    await bounded(one.tensors(1))  # maps what is mapped once, whatever the threshold
    [before] = await bounded(one.descriptors())
    ours = len(os.listdir("/proc/self/fd"))
    [tensors] = await bounded(one.tensors(400))
    assert [int(tensor[0]) for tensor in tensors] == list(range(400))
    assert len(os.listdir("/proc/self/fd")) == ours
    assert await bounded(one.descriptors()) == [before]


async def test_large_values_do_not_stand_in_dev_shm(wg: WorkerGroup) -> None:
    """Docker gives it 64 MB: https://github.com/pytorch/pytorch/issues/58386."""
    results = [await bounded(wg.zeros(1 << 20)) for _ in range(50)]
    maps = [m.path for pid in (os.getpid(), *wg.pids) for m in psutil.Process(pid).memory_maps()]
    # Semaphores of multiprocessing, which a library that was imported may have made, hold no values.
    semaphores = "/dev/shm/sem."
    found = [path for path in maps if path.startswith("/dev/shm")]
    assert [path for path in found if not path.startswith(semaphores)] == []
    assert len(results) == 50


async def test_a_tensordict_and_a_data_proto_come_back(wg: WorkerGroup) -> None:
    batch = TensorDict({"a": torch.arange(3000.0), "b": {"c": torch.ones(3000)}}, [3000])
    data = DataProto(batch, {"name": np.array(["x"] * 3000, dtype=object)}, {"step": 3})
    for back in await bounded(wg.echo(data)):
        assert bool((back.batch == batch).all())
        assert list(back.non_tensor_batch["name"]) == ["x"] * 3000
        assert back.meta_info == {"step": 3}


async def test_an_argument_that_can_not_be_pickled_is_named_and_nothing_is_sent(
    wg: WorkerGroup,
) -> None:
    """https://github.com/noxdafox/pebble/issues/146: it killed the feeder thread."""
    with pytest.raises(TypeError, match=r"Echo\.echo: argument value\['a'\]\[1\] \(a _thread.lock"):
        wg.echo({"a": [torch.ones(3), threading.Lock()]})
    assert await bounded(wg.count()) == [0, 0]
    assert await bounded(wg.echo(1)) == [1, 1]


async def test_a_result_that_can_not_be_pickled_is_an_error_that_names_the_method_and_the_part(
    wg: WorkerGroup,
) -> None:
    """https://github.com/noxdafox/pebble/issues/146."""
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.made_by(lambda: [1, threading.Lock()]))
    for error in caught.value.exceptions:
        assert isinstance(error, TypeError)
        assert "Echo.made_by" in str(error)
        assert "result[1] (a _thread.lock)" in str(error)
    assert await bounded(wg.echo(1)) == [1, 1]


@pytest.mark.parametrize("how", [how for how in HOW if how.startswith(("raise", "exit"))])
async def test_an_argument_that_raises_when_it_is_unpickled_is_an_error_of_that_call(
    wg: WorkerGroup, how: Any
) -> None:
    """https://github.com/noxdafox/pebble/issues/146."""
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.echo(Hostile("unpickled", how)))
    for error in caught.value.exceptions:
        assert "the arguments of Echo.echo can't be unpickled in the worker" in str(error)
    assert await bounded(wg.count()) == [0, 0]


@pytest.mark.parametrize("how", [how for how in HOW if how.startswith(("raise", "exit"))])
async def test_a_result_that_raises_when_it_is_pickled_is_an_error_of_that_call(
    wg: WorkerGroup, how: Any
) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.made_by(lambda: Hostile("pickled", how)))
    assert all("result (a tests.hostile.Hostile)" in str(e) for e in caught.value.exceptions)
    assert await bounded(wg.echo(1)) == [1, 1]


class OnlyHere:
    """Can be unpickled in the worker, and raises in the controller."""

    controller = os.getpid()

    def __init__(self, error: type[BaseException], pid: int) -> None:
        self.error = error
        self.pid = pid

    def __reduce__(self) -> Any:
        return _made_in, (self.error, self.pid)


def _made_in(error: type[BaseException], pid: int) -> Any:
    if os.getpid() == pid:
        raise error(TEXT)
    return OnlyHere(error, pid)


@pytest.mark.parametrize(
    "error", [HostileError, HostileBaseError, SystemExit, KeyboardInterrupt, UnprintableError]
)
async def test_a_result_that_raises_when_it_is_unpickled_here_is_an_error_of_that_call(
    wg: WorkerGroup, error: type[BaseException]
) -> None:
    """https://github.com/noxdafox/pebble/issues/146."""
    pid = os.getpid()
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.made_by(lambda: OnlyHere(error, pid)))
    for told in caught.value.exceptions:
        assert isinstance(told, WorkerError)
        assert told.type_name == error.__name__
        assert "can't be unpickled in the controller" in str(told)
    assert await bounded(wg.echo(1)) == [1, 1]


class UnprintableReducer:
    """Raises an exception without a text when it is pickled."""

    def __reduce__(self) -> Any:
        raise UnprintableError


async def test_a_result_whose_pickling_raises_what_has_no_text_is_an_error_of_that_call(
    wg: WorkerGroup,
) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.made_by(UnprintableReducer))
    assert all("Echo.made_by" in str(error) for error in caught.value.exceptions)
    assert await bounded(wg.echo(1)) == [1, 1]


async def test_lambdas_and_local_classes_travel_both_ways(wg: WorkerGroup) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    first, _ = await bounded(wg.made_by(lambda: Local(5)))
    assert type(first) is Local
    assert first.value == 5
    function, _ = await bounded(wg.made_by(lambda: lambda x: x + 1))
    assert function(1) == 2
