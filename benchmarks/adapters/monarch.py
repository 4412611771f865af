"""Monarch: one process mesh, one actor in each of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from monarch.actor import Actor, endpoint, this_host
from torch import Tensor

from benchmarks import adapter, work


class Ranks(Actor):
    @endpoint
    def nothing(self) -> None:
        work.nothing()

    @endpoint
    def ready(self) -> int:
        return work.ready()

    @endpoint
    def last(self, tensor: Tensor) -> float:
        return work.last(tensor)

    @endpoint
    def times_one(self, tensor: Tensor) -> Tensor:
        return work.times_one(tensor)

    @endpoint
    def ones(self, numel: int) -> Tensor:
        return work.ones(numel)


def values(mesh: Any) -> list[Any]:
    """Return what all have answered, by rank."""
    return [value for _, value in mesh]


class Adapter(adapter.Adapter):
    async def start(self, n: int) -> None:
        self.processes = this_host().spawn_procs(per_host={"gpus": n})
        self.actors: Any = self.processes.spawn("ranks", Ranks)
        self.each = [self.actors.slice(gpus=i) for i in range(n)]
        self.worker_pids = values(await self.actors.ready.call())

    async def close(self, last: bool) -> None:
        await self.processes.stop()

    async def pids(self) -> list[int]:
        return self.worker_pids

    async def one(self) -> None:
        await self.each[0].nothing.call_one()

    async def all(self) -> None:
        await self.actors.nothing.call()

    async def pipelined(self, calls: int) -> None:
        waiting = [self.each[0].nothing.call_one() for _ in range(calls)]
        for future in waiting:
            await future

    async def small(self, tensor: Tensor) -> list[float]:
        return values(await self.actors.last.call(tensor))

    async def broadcast(self, tensor: Tensor) -> list[float]:
        return values(await self.actors.last.call(tensor))

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        pairs = zip(self.each, chunks, strict=True)
        waiting = [actor.last.call_one(chunk) for actor, chunk in pairs]
        return [await future for future in waiting]

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.each, chunks, strict=True)
        waiting = [actor.times_one.call_one(chunk) for actor, chunk in pairs]
        return [await future for future in waiting]

    async def gather(self, numel: int) -> Tensor:
        return torch.cat(values(await self.actors.ones.call(numel)))
