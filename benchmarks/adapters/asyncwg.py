"""asyncwg."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from benchmarks import adapter, work

if TYPE_CHECKING:
    from torch import Tensor


class Ranks(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        work.nothing()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_ready(self) -> int:
        return work.ready()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def last(self, tensor: Tensor) -> float:
        return work.last(tensor)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def last_of_chunk(self, chunk: Tensor) -> float:
        return work.last(chunk)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def times_one(self, chunk: Tensor) -> Tensor:
        return work.times_one(chunk)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def ones(self, numel: int) -> Tensor:
        return work.ones(numel)


class Adapter(adapter.Adapter):
    async def start(self, n: int) -> None:
        pool = ResourcePool(process_on_nodes=[n], use_gpu=False)
        self.group = await WorkerGroup.start(pool, ClassWithInitArgs(Ranks))
        await self.group.get_ready()
        self.first = self.group[0]

    async def close(self, last: bool) -> None:
        await self.group.shutdown()

    async def pids(self) -> list[int]:
        return self.group.pids

    async def one(self) -> None:
        await self.first.nothing()

    async def all(self) -> None:
        await self.group.nothing()

    async def pipelined(self, calls: int) -> None:
        await asyncio.gather(*[self.first.nothing() for _ in range(calls)])

    async def small(self, tensor: Tensor) -> list[float]:
        return await self.group.last(tensor)

    async def broadcast(self, tensor: Tensor) -> list[float]:
        return await self.group.last(tensor)

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        return await self.group.last_of_chunk(chunks)

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        return await self.group.times_one(chunks)

    async def gather(self, numel: int) -> Tensor:
        return await self.group.ones(numel)
