"""The worker that chaos is made with. Each method writes down that it ran, first thing."""

from __future__ import annotations

import asyncio
import collections
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import torch

import asyncwg
from asyncwg import Dispatch, Execute, Worker, register
from benchmarks.chaos.values import item_of, scaled, spoil, total


class Chaos(Worker):
    """Does what it is told and keeps a log by lane."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []
        self.log_async: list[int] = []
        self.log_limited: list[int] = []
        self.kept: collections.deque[Any] = collections.deque(maxlen=3)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, token: int, value: Any) -> Any:
        self.log.append(token)
        return value

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def own(self, token: int, value: Any) -> Any:
        """Give back what came, after writing to it: the caller's stays as it is (O-8)."""
        self.log.append(token)
        spoil(value)
        return total(value)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale(self, token: int, rows: Any, factor: int) -> Any:
        self.log.append(token)
        return scaled(rows, factor)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, token: int, rows: Any) -> int:
        self.log.append(token)
        real = asyncwg.current_call().rows  # the rest is padding
        return total(rows if real is None else rows[:real])

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def each(self, token: int, item: Any) -> Any:
        self.log.append(token)
        return item

    @register(execute_mode=Execute.RANK_ZERO)
    def first(self, token: int, value: Any) -> Any:
        self.log.append(token)
        return value

    @register(execute_mode=Execute.ANY)
    def whichever(self, token: int, value: Any) -> Any:
        self.log.append(token)
        return value

    @register()
    def give(self, token: int, size: int, seed: int) -> Any:
        self.log.append(token)
        return torch.full((size,), seed * 8 + self.rank, dtype=torch.int64)

    @register()
    def keep(self, token: int, value: Any) -> int:
        """Keep what came for a while, and see that what was kept before has not changed."""
        self.log.append(token)
        for before, sum_before in self.kept:
            if total(before) != sum_before:
                raise AssertionError("what was kept has changed")
        self.kept.append((value, total(value)))
        return total(value)

    @register()
    def nap(self, token: int, seconds: float) -> int:
        self.log.append(token)
        time.sleep(seconds)
        return self.rank

    @register()
    def fail(self, token: int, ranks: Sequence[int], seconds: float) -> int:
        """Fail on some ranks; the others take their time."""
        self.log.append(token)
        if self.rank in ranks:
            raise ValueError(f"call {token}, rank {self.rank}")
        time.sleep(seconds)
        return self.rank

    @register()
    def until_told(self, token: int) -> None:
        """Run until the caller has gone."""
        self.log.append(token)
        call = asyncwg.current_call()
        while not call.cancelled:
            time.sleep(0.001)

    @register()
    def leave(self, token: int, ranks: Sequence[int]) -> int:
        self.log.append(token)
        if self.rank in ranks:
            os._exit(7)
        return self.rank

    @register()
    async def echo_async(self, token: int, value: Any) -> Any:
        self.log_async.append(token)
        await asyncio.sleep(0)
        return value

    @register(max_concurrency=2)
    async def nap_async(self, token: int, seconds: float) -> int:
        self.log_limited.append(token)  # others pass while it waits for its turn
        await asyncio.sleep(seconds)
        return self.rank

    @register()
    async def give_async(self, token: int, size: int, seed: int) -> Any:
        self.log_async.append(token)
        return torch.full((size,), seed * 8 + self.rank, dtype=torch.int64)

    @register()
    async def fail_async(self, token: int, ranks: Sequence[int], seconds: float) -> int:
        self.log_async.append(token)
        if self.rank in ranks:
            raise ValueError(f"call {token}, rank {self.rank}")
        await asyncio.sleep(seconds)
        return self.rank

    @register()
    async def forever_async(self, token: int) -> None:
        self.log_async.append(token)
        await asyncio.Event().wait()

    @register()
    def tell(self, token: int, items: int, size: int, ranks: Sequence[int]) -> Iterator[Any]:
        """Give items; fail on some ranks instead of the last one."""
        self.log.append(token)
        yield from self._items(token, items, size, ranks)

    @register()
    async def tell_async(
        self, token: int, items: int, size: int, ranks: Sequence[int]
    ) -> AsyncIterator[Any]:
        self.log_async.append(token)
        for item in self._items(token, items, size, ranks):
            await asyncio.sleep(0)
            yield item

    def _items(self, token: int, items: int, size: int, ranks: Sequence[int]) -> Iterator[Any]:
        for number in range(items):
            if number == items - 1 and self.rank in ranks:
                raise ValueError(f"call {token}, rank {self.rank}")
            yield item_of(self.rank, number, size)

    @register()
    def take_logs(self) -> dict[str, list[int]]:
        """Give what was run on each lane since the last time."""
        logs = {"def": self.log, "async": self.log_async, "limited": self.log_limited}
        self.log, self.log_async, self.log_limited = [], [], []
        return logs
