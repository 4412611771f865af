"""Workers for the tests of values, dispatch and torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import asyncwg
from asyncwg import (
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    Execute,
    ResourcePool,
    Worker,
    WorkerGroup,
    distributed,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from tests.times import GRACE


def group(cls: type, ranks: int = 2, *args: Any, **options: Any) -> WorkerGroup:
    """Return a group of ``cls`` on CPUs, not started; ``options`` are the group's."""
    pool = ResourcePool([ranks], use_gpu=False)
    given: dict[str, Any] = {"start_timeout": 60, "error_grace": GRACE, **options}
    return WorkerGroup(pool, ClassWithInitArgs(cls, *args), **given)


class Echo(Worker):
    """Gives back what it gets, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        self.calls += 1
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def echo_async(self, value: Any) -> Any:
        self.calls += 1
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe(self, value: Any) -> str:
        self.calls += 1
        return f"{type(value).__name__} {value!r}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def size_of(self, value: Any) -> int:
        self.calls += 1
        return len(value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def overwrite_first(self, value: Any) -> Any:
        self.calls += 1
        value[0] = 9
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def doubled_weight(self) -> Any:
        return torch.ones(3, requires_grad=True) * 2

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def parameter(self) -> Any:
        return torch.nn.Parameter(torch.ones(3))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def tensors(self, count: int) -> list[torch.Tensor]:
        return [torch.full((10,), i) for i in range(count)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def made_by(self, function: Callable[[], Any]) -> Any:
        return function()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.calls


class Rows(Worker):
    """One method per row of the dispatch table; every one counts its calls and says what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.rows: list[int | None] = []

    def _got(self, *args: Any, **kwargs: Any) -> tuple[int, Any, Any]:
        self.calls += 1
        return self.rank, args, kwargs

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, *args: Any, **kwargs: Any) -> Any:
        return self._got(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
        return self._got(*args, **kwargs)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def rank_zero(self, *args: Any, **kwargs: Any) -> Any:
        return self._got(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def dp_compute(self, *args: Any, **kwargs: Any) -> Any:
        return self._got(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, *args: Any, **kwargs: Any) -> Any:
        return self._got(*args, **kwargs)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> Any:
        return self._got()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, batch: Any, extra: Any = None) -> Any:
        self.calls += 1
        if isinstance(batch, DataProto):
            assert batch.batch is not None
            return DataProto.from_dict({"x": batch.batch["x"] * 2})
        if isinstance(batch, list):
            return [2 * row for row in batch]
        return batch * 2

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, batch: Any, *_more: Any) -> Any:
        self.calls += 1
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tag(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.stack([batch, torch.full_like(batch, self.rank)], dim=1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def twice_the_rows(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat([batch, batch])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def odd_rows(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.repeat(5)[: batch.shape[0] + 1]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scalar(self, batch: torch.Tensor) -> float:
        self.calls += 1
        return float(batch.sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def nothing(self, batch: torch.Tensor) -> None:
        self.calls += 1

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def as_dict(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"x": batch, "sum": float(batch.sum())}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def real_rows(self, batch: Any) -> tuple[int | None, int]:
        self.calls += 1
        return asyncwg.current_call().rows, len(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def statistics(self, batch: torch.Tensor) -> tuple[int, float]:
        """Count and sum over what is no padding."""
        real = asyncwg.current_call().rows or 0
        return real, float(batch[:real].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, uneven="allow")
    def share_of_mean(self, batch: torch.Tensor) -> float:
        """What this shard adds to the mean of all rows."""
        call = asyncwg.current_call()
        assert call.total_rows is not None
        return float(batch[: call.rows].sum()) / call.total_rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rows_known(self, _batch: torch.Tensor) -> tuple[int | None, int | None]:
        call = asyncwg.current_call()
        return call.rows, call.total_rows

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, *args: Any) -> Any:
        return self._got(*args)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.ANY)
    def on_any(self, *args: Any) -> Any:
        return self._got(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for(self, path: str) -> int:
        """Block until somebody writes to the pipe at ``path``."""
        with open(path, "rb") as pipe:
            return len(pipe.read())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.calls


class Mesh(Worker):
    """Ranks with a place in a mesh, which they register at once or when they are told."""

    def __init__(self, places: Sequence[tuple[int, bool]] | None) -> None:
        super().__init__()
        self.calls = 0
        if places is not None:
            self._register_dispatch_collect_info("actor", *places[self.rank])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join(self, mesh: str, places: Sequence[tuple[int, bool]]) -> None:
        self._register_dispatch_collect_info(mesh, *places[self.rank])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def join_async(self, mesh: str, places: Sequence[tuple[int, bool]]) -> None:
        self._register_dispatch_collect_info(mesh, *places[self.rank])

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def tag(self, batch: torch.Tensor) -> torch.Tensor:
        """Say which rank had which row."""
        self.calls += 1
        return torch.stack([batch, torch.full_like(batch, self.rank)], dim=1)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), uneven="pad")
    def padded(self, batch: DataProto) -> DataProto:
        self.calls += 1
        assert batch.batch is not None
        return DataProto.from_dict({"x": batch.batch["x"] * 2})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("late"))
    def late(self, batch: torch.Tensor) -> torch.Tensor:
        return batch * 2

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def fails_unless_it_collects(self, batch: torch.Tensor) -> torch.Tensor:
        if not self.query_collect_info("actor"):
            raise ValueError(f"rank {self.rank} is not asked, but has something to say")
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.calls


def deal(wg: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Dispatch function: rank i gets every n-th item, counted from i."""
    ranks = wg.world_size
    dealt = tuple([arg[rank::ranks] for rank in range(ranks)] for arg in args)
    return dealt, {name: [value] * ranks for name, value in kwargs.items()}


def gather(_group: Any, outputs: list[Any]) -> Any:
    """Collect function: the sum of all."""
    return sum(outputs)


def give_whole(_group: Any, *args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Dispatch function that forgets to make lists."""
    return args, {}


class Custom(Worker):
    """A dispatch mode of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @register(dispatch_mode={"dispatch_fn": deal, "collect_fn": gather})
    def total(self, values: list[int], factor: int = 1) -> int:
        self.calls += 1
        return factor * sum(values)

    @register(dispatch_mode={"dispatch_fn": give_whole, "collect_fn": gather})
    def careless(self, value: Any) -> Any:
        self.calls += 1
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self) -> int:
        return self.calls


class Collective(Worker):
    """Joins ``torch.distributed`` in one of many ways."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join(self, /, backend: str | None = None, **options: Any) -> tuple[str, int]:
        dist.init_process_group(backend, **options)
        return dist.get_backend(), dist.get_world_size()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_as_worker(self, timeout: float | None = None) -> tuple[str, int]:
        self.init_process_group(timeout=timeout)
        return dist.get_backend(), dist.get_world_size()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_at(self, url: str) -> float:
        dist.init_process_group("gloo", init_method=url, rank=self.rank, world_size=self.world_size)
        return self.sum_of_ones()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ones(self) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return float(tensor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        dist.destroy_process_group()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def scatter_odd(self) -> list[float]:
        """Rank 0 scatters every other number of 0 to 5, from and into views that have gaps."""
        parts = None
        if self.rank == 0:
            parts = [torch.linspace(0, 5, 6)[::2], torch.linspace(10, 15, 6)[::2]]
        target = torch.zeros(6)[::2]
        distributed.scatter(target, parts, src=0)
        return [float(value) for value in target]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def broadcast_column(self) -> list[list[float]]:
        mine = [[0.0, 0.0], [1.0, 1.0]] if self.rank == 0 else [[1.0, 10.0], [2.0, 11.0]]
        tensor = torch.tensor(mine)
        distributed.broadcast(tensor[:, 0], src=0)
        return [[float(value) for value in row] for row in tensor]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reduce_column(self, everywhere: bool) -> list[float]:
        tensor = torch.tensor([[1.0, 7.0], [2.0, 7.0]]) + self.rank * torch.tensor([1.0, 0.0])
        if everywhere:
            distributed.all_reduce(tensor[:, 0])
        else:
            distributed.reduce(tensor[:, 0], dst=0)
        return [float(value) for value in tensor[:, 0]]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gather_rows(self, rows: Sequence[int]) -> DataProto:
        """Give every rank the rows of all; this one brings ``rows[rank]`` of them."""
        count = rows[self.rank]
        data = DataProto.from_dict(
            {"x": torch.arange(count) + 100 * self.rank},
            {"name": np.array([f"{self.rank}:{i}" for i in range(count)], dtype=object)},
        )
        asyncwg.all_gather_data_proto(data)
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_before_joining(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("bad row 7")
        dist.init_process_group("gloo")
