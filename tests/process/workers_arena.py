"""Workers for the tests of large values: they keep, overwrite, fork with and lose what they receive."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from asyncwg import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from tests.process.workers_life import Fifo
from tests.times import PATIENCE

MB = 1 << 20
LARGE = 2 * MB
"""Bytes of a value that goes through the arena and is copied in a thread."""


def numbers(first: int, nbytes: int = LARGE) -> torch.Tensor:
    """Return ``nbytes`` of int64 that count from ``first``.

    By numpy: torch's threads don't survive a fork.
    """
    return torch.from_numpy(np.arange(first, first + nbytes // 8))


def same(tensor: Any, first: int) -> bool:
    """Tell whether ``tensor`` is as `numbers` made it. By numpy, as there."""
    array: Any = np.asarray(tensor)
    return bool(np.array_equal(array, np.arange(first, first + array.size)))


@dataclass
class Batch:
    """A user's container."""

    x: torch.Tensor
    name: str


class _Rows(Dataset[Any]):
    def __init__(self, rows: torch.Tensor, gate: tuple[Any, Any]) -> None:
        self._rows = rows
        self._gate = gate

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        ready, go_on = self._gate
        ready.set()
        go_on.wait(PATIENCE)
        return self._rows.view(-1)


class Large(Worker):
    """Takes and gives large values."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.child: Callable[[], bool] | None = None

    @register()
    def echo(self, value: Any) -> Any:
        return value

    @register()
    async def echo_async(self, value: Any) -> Any:
        return value

    @register()
    def size_of(self, *values: Any) -> list[int]:
        return [len(value) for value in values]

    @register()
    def copy_of(self, *values: Any) -> list[Any]:
        """Give the first and the last number of each: nothing large goes back."""
        return [(int(value[0]), int(value[-1])) for value in values]

    @register()
    def check(self, value: torch.Tensor, first: int) -> bool:
        return same(value, first)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def bytes_of(self, value: Any) -> bytes:
        """Give all bytes of an array or a tensor, bare or in a dict."""
        array = value["array"] if isinstance(value, dict) else value
        return bytes(np.asarray(array).tobytes())

    @register()
    def overwrite(self, value: Any, number: int) -> int:
        value[:] = number
        return int(value[-1])

    @register()
    def keep(self, value: Any) -> None:
        self.kept.append(value)

    @register()
    def kept_firsts(self) -> list[int]:
        """Give the first number of what is kept; -1 where it is not as `numbers` made it."""
        firsts = [int(value[0]) for value in self.kept]
        return [
            first if same(value, first) else -1
            for value, first in zip(self.kept, firsts, strict=True)
        ]

    @register()
    def forget(self) -> None:
        self.kept.clear()

    @register()
    def keep_and_hold(self, value: Any, started: Fifo, release: Fifo) -> int:
        """Take a value, and do not answer before it is told to."""
        started.put()
        release.take()
        return int(value[0])

    @register()
    def hold(self, started: Fifo, release: Fifo) -> None:
        started.put()
        release.take()

    @register()
    def make(self, first: int, nbytes: int = LARGE) -> torch.Tensor:
        return numbers(first, nbytes)

    @register()
    async def make_async(self, first: int, nbytes: int = LARGE) -> torch.Tensor:
        return numbers(first, nbytes)

    @register()
    def fail(self, _value: Any) -> None:
        raise ValueError("bad row 7")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, batch: Any) -> Any:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows_kept(self, batch: Any) -> int:
        self.kept.append(batch)
        return len(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows_by_rank(self, batch: torch.Tensor) -> torch.Tensor:
        """Give more rows, the higher the rank."""
        return batch.repeat(self.rank + 1, *[1] * (batch.dim() - 1))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows_in_turn(self, batch: torch.Tensor, last_may_go: Fifo) -> torch.Tensor:
        """Give the rows back; the last rank does so when it is told to."""
        if self.rank == self.world_size - 1:
            last_may_go.take()
        return batch

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("dp"))
    def mesh_rows(self, batch: torch.Tensor) -> torch.Tensor:
        return batch

    @register()
    def join_mesh(self, size: int) -> None:
        self._register_dispatch_collect_info("dp", self.rank // size, self.rank % size == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def big_rows(self, _batch: torch.Tensor) -> torch.Tensor:
        """Give `LARGE` bytes that count from the rank."""
        return numbers(self.rank)

    @register()
    async def ping_async(self) -> None:
        """Answer, whatever the main thread does."""

    @register()
    async def give_and_change(self, kind: str) -> Any:
        """Give a value and write to it before it can have been sent."""
        value: Any = torch.zeros(LARGE) if kind == "tensor" else np.zeros(LARGE)
        asyncio.get_running_loop().call_soon(value.__setitem__, slice(None), 1)
        return value

    @register()
    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    @register()
    def fork_and_hold(self, value: torch.Tensor, first: int) -> None:
        """Fork a child that looks at ``value`` when `child_saw_it` asks for it."""
        context = multiprocessing.get_context("fork")
        go_on, answer = context.Event(), context.SimpleQueue()

        def look() -> None:
            go_on.wait(PATIENCE)
            answer.put(same(value, first))

        child = context.Process(target=look)
        child.start()

        def saw_it() -> bool:
            go_on.set()
            found: bool = answer.get()
            child.join(PATIENCE)
            child.close()
            return found

        self.child = saw_it

    @register()
    def load_and_hold(self, value: torch.Tensor, first: int) -> None:
        """The same with a `DataLoader` that forks."""
        context: Any = multiprocessing.get_context("fork")
        gate = (context.Event(), context.Event())
        loader = DataLoader(
            _Rows(value, gate), num_workers=1, batch_size=None, multiprocessing_context=context
        )
        batches = iter(loader)
        gate[0].wait(PATIENCE)

        def saw_it() -> bool:
            gate[1].set()
            return all(same(batch, first) for batch in batches)

        self.child = saw_it

    @register()
    def child_saw_it(self) -> bool:
        assert self.child is not None
        child, self.child = self.child, None
        return child()
