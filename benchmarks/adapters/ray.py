"""Ray: one actor a worker. What goes to all is put into its object store once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from benchmarks import adapter, work

# Its own way to hand a tensor from its store to a reader without a copy.
os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")


@ray.remote(num_cpus=0)
class Actor:
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


class Adapter(adapter.Adapter):
    """It waits in ``ray.get``, which is faster than awaiting its references."""

    async def start(self, n: int) -> None:
        if not ray.is_initialized():
            # Room for what is in flight and what the last repetition has left.
            ray.init(
                num_cpus=n,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=4 << 30,
            )
        actors: Any = Actor
        self.actors = [actors.remote() for _ in range(n)]
        self.processes = ray.get([actor.ready.remote() for actor in self.actors])

    async def close(self, last: bool) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if last:
            ray.shutdown()

    async def pids(self) -> list[int]:
        return self.processes

    async def one(self) -> None:
        ray.get(self.actors[0].nothing.remote())

    async def all(self) -> None:
        ray.get([actor.nothing.remote() for actor in self.actors])

    async def pipelined(self, calls: int) -> None:
        ray.get([self.actors[0].nothing.remote() for _ in range(calls)])

    async def small(self, tensor: Tensor) -> list[float]:
        return ray.get([actor.last.remote(tensor) for actor in self.actors])

    async def broadcast(self, tensor: Tensor) -> list[float]:
        stored = ray.put(tensor)
        return ray.get([actor.last.remote(stored) for actor in self.actors])

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        pairs = zip(self.actors, chunks, strict=True)
        return ray.get([actor.last.remote(chunk) for actor, chunk in pairs])

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(self.actors, chunks, strict=True)
        return ray.get([actor.times_one.remote(chunk) for actor, chunk in pairs])

    async def gather(self, numel: int) -> Tensor:
        return torch.cat(ray.get([actor.ones.remote(numel) for actor in self.actors]))
