"""Generators."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import asyncwg
from asyncwg import Dispatch, Execute, Worker, register
from tests.process.workers_life import Fifo


class Giver(Worker):
    """Yields in many ways, and takes notes of how far it came and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []

    @register()
    def notes(self) -> list[Any]:
        return self.log

    @register()
    async def notes_async(self) -> list[Any]:
        return self.log

    @register()
    def echo(self, value: Any) -> Any:
        return value

    @register()
    async def echo_async(self, value: Any) -> Any:
        return value

    @register()
    def count(self, end: int | None = None) -> Iterator[int]:
        """Count up."""
        number = 0
        try:
            while end is None or number < end:
                self.log.append(number)
                yield number
                number += 1
        finally:
            self.log.append("closed")

    @register()
    async def count_async(self, end: int | None = None) -> AsyncIterator[int]:
        number = 0
        try:
            while end is None or number < end:
                self.log.append(number)
                yield number
                number += 1
        finally:
            self.log.append("closed")

    @register()
    async def one_and_wait(self) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    @register()
    def until_cancelled(self, started: Fifo, seen: Fifo) -> Iterator[int]:
        started.put()
        while not asyncwg.current_call().cancelled:
            time.sleep(0.001)
        seen.put()
        yield 1

    @register()
    async def hold_the_loop(self, started: Fifo, release: Fifo) -> None:
        """Let no other ``async def`` method start meanwhile."""
        started.put()
        release.take()

    @register()
    def fail_after(self, items: int, rank: int) -> Iterator[int]:
        yield from range(items)
        if rank in (-1, self.rank):
            raise ValueError(f"no item {items}")
        yield from self.count()

    @register()
    async def fail_after_async(self, items: int, rank: int) -> AsyncIterator[int]:
        for number in range(items):
            yield number
        if rank in (-1, self.rank):
            raise ValueError(f"no item {items}")
        async for number in self.count_async():
            yield number

    @register()
    def die_after(self, items: int) -> Iterator[int]:
        yield from range(items)
        os.kill(os.getpid(), signal.SIGKILL)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def row_by_row(self, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from rows

    @register()
    def large(self, items: int, size: int) -> Iterator[torch.Tensor]:
        """Large tensors, in one that is written again for each."""
        tensor = torch.empty(size)
        for number in range(items):
            yield tensor.fill_(number)

    @register()
    async def large_async(self, items: int, size: int) -> AsyncIterator[torch.Tensor]:
        for number in range(items):
            yield torch.full((size,), float(number))

    @register()
    def unpicklable(self) -> Iterator[Any]:
        yield 1
        yield {"lock": __import__("threading").Lock()}

    @register(execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self) -> Iterator[int]:
        yield self.rank

    @register()
    def nones(self) -> Iterator[None]:
        yield None
        yield None

    @register(max_concurrency=1)
    async def one_at_a_time(self, name: str) -> AsyncIterator[str]:
        self.log.append(f"{name} begins")
        yield name
        self.log.append(f"{name} ends")
