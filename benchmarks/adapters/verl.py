"""verl's own worker group: the interface that asyncwg keeps, on Ray. It blocks the event loop."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch
from torch import Tensor
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from benchmarks import adapter, work

os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")


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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ones(self, numel: int) -> Tensor:
        return work.ones(numel)


class Adapter(adapter.Adapter):
    async def start(self, n: int) -> None:
        if not ray.is_initialized():
            # A group reserves CPUs by number, and there are two groups in the test of starting.
            ray.init(
                num_cpus=4 * n, include_dashboard=False, log_to_driver=False,
                object_store_memory=4 << 30,
            )  # fmt: skip
        pool = RayResourcePool([n], use_gpu=False, max_colocate_count=1)
        ranks: Any = RayClassWithInitArgs(ray.remote(Ranks))
        self.group: Any = RayWorkerGroup(pool, ranks, device_name="cpu")
        self.processes = self.group.get_ready()

    async def close(self, last: bool) -> None:
        for worker in self.group.workers:
            ray.kill(worker)
        if last:
            ray.shutdown()

    async def pids(self) -> list[int]:
        return self.processes

    async def one(self) -> None:
        self.group.execute_rank_zero_sync("nothing")

    async def all(self) -> None:
        self.group.nothing()

    async def pipelined(self, calls: int) -> None:
        ray.get([self.group.execute_rank_zero_async("nothing") for _ in range(calls)])

    async def small(self, tensor: Tensor) -> list[float]:
        return self.group.last(tensor)

    async def broadcast(self, tensor: Tensor) -> list[float]:
        return self.group.last(tensor)

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        return self.group.last_of_chunk(list(chunks))

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        return self.group.times_one(list(chunks))

    async def gather(self, numel: int) -> Tensor:
        return torch.cat(self.group.ones(numel))
