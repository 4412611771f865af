"""xoscar: a pool with a sub-pool a worker, one actor in each."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import torch
import xoscar
from torch import Tensor
from xoscar.backends.allocate_strategy import ProcessIndex

from benchmarks import adapter, work


class Actor(xoscar.Actor):
    def nothing(self) -> None:
        work.nothing()

    def ready(self) -> int:
        return work.ready()

    def last(self, tensor: Tensor) -> float:
        return work.last(tensor)

    def times_one(self, tensor: Tensor) -> Tensor:
        return work.times_one(tensor)

    def ones(self, numel: int) -> Tensor:
        return work.ones(numel)


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


class Adapter(adapter.Adapter):
    async def start(self, n: int) -> None:
        address = free_address()
        self.pool: Any = await xoscar.create_actor_pool(address, n_process=n)
        self.actors: list[Any] = [
            await xoscar.create_actor(
                Actor, address=address, uid=f"rank{i}", allocate_strategy=ProcessIndex(i + 1)
            )
            for i in range(n)
        ]
        self.processes = await asyncio.gather(*[actor.ready() for actor in self.actors])

    async def close(self, last: bool) -> None:
        await self.pool.stop()

    async def pids(self) -> list[int]:
        return self.processes

    async def one(self) -> None:
        await self.actors[0].nothing()

    async def all(self) -> None:
        await asyncio.gather(*[actor.nothing() for actor in self.actors])

    async def pipelined(self, calls: int) -> None:
        await asyncio.gather(*[self.actors[0].nothing() for _ in range(calls)])

    async def small(self, tensor: Tensor) -> list[float]:
        return await asyncio.gather(*[actor.last(tensor) for actor in self.actors])

    async def broadcast(self, tensor: Tensor) -> list[float]:
        return await asyncio.gather(*[actor.last(tensor) for actor in self.actors])

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        pairs = zip(self.actors, chunks, strict=True)
        return await asyncio.gather(*[actor.last(chunk) for actor, chunk in pairs])

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.actors, chunks, strict=True)
        return await asyncio.gather(*[actor.times_one(chunk) for actor, chunk in pairs])

    async def gather(self, numel: int) -> Tensor:
        return torch.cat(await asyncio.gather(*[actor.ones(numel) for actor in self.actors]))
