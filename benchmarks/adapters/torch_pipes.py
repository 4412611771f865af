"""torch.multiprocessing, by hand: a process and a pipe a worker, tensors through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks import adapter, work

JOBS = {f.__name__: f for f in (work.nothing, work.ready, work.last, work.times_one, work.ones)}


def serve(pipe: Connection) -> None:
    while job := pipe.recv():
        pipe.send(JOBS[job[0]](*job[1:]))


class Adapter(adapter.Adapter):
    """The controller blocks in ``recv``: this is what it costs without an event loop."""

    async def start(self, n: int) -> None:
        context = mp.get_context("spawn")
        self.pipes: list[Connection] = []
        self.workers: list[Any] = []
        for _ in range(n):
            ours, theirs = context.Pipe()
            worker = context.Process(target=serve, args=(theirs,))
            worker.start()
            theirs.close()
            self.pipes.append(ours)
            self.workers.append(worker)
        self.call([("ready",)] * n)

    def call(self, jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
        pipes = self.pipes[: len(jobs)]
        for pipe, job in zip(pipes, jobs, strict=True):
            pipe.send(job)
        return [pipe.recv() for pipe in pipes]

    async def close(self, last: bool) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for worker in self.workers:
            worker.join()

    async def pids(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    async def one(self) -> None:
        self.call([("nothing",)])

    async def all(self) -> None:
        self.call([("nothing",)] * len(self.pipes))

    async def pipelined(self, calls: int) -> None:
        for _ in range(calls):
            self.pipes[0].send(("nothing",))
        for _ in range(calls):
            self.pipes[0].recv()

    async def small(self, tensor: Tensor) -> list[float]:
        return self.call([("last", tensor)] * len(self.pipes))

    async def broadcast(self, tensor: Tensor) -> list[float]:
        # Copied to shared memory once; without the clone the caller's own tensor would be moved there.
        return self.call([("last", tensor.clone().share_memory_())] * len(self.pipes))

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        return self.call([("last", chunk.clone()) for chunk in chunks])

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        return self.call([("times_one", chunk.clone()) for chunk in chunks])

    async def gather(self, numel: int) -> Tensor:
        return torch.cat(self.call([("ones", numel)] * len(self.pipes)))
