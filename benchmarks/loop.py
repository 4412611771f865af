"""What the event loop feels while a gigabyte travels, and what sending a shared tensor costs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import torch

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register

BIG = 64 << 20  # float32: 256 MB
RUNS = 20
TICK = 0.001  # seconds between two timers whose lateness is taken


class Peer(Worker):
    """Takes and gives tensors."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self, tensor: torch.Tensor) -> None:
        """Look at nothing."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Do nothing."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def give(self, count: int) -> torch.Tensor:
        return torch.ones(count)


async def _ticks(stop: asyncio.Event) -> float:
    """Return how late the latest timer was, in seconds."""
    worst = 0.0
    while not stop.is_set():
        start = time.perf_counter()
        await asyncio.sleep(TICK)
        worst = max(worst, time.perf_counter() - start - TICK)
    return worst


async def _lateness(work: Callable[[], Awaitable[None]]) -> list[float]:
    await work()  # memory that is touched for the first time is another matter
    found: list[float] = []
    for _ in range(RUNS):
        stop = asyncio.Event()
        ticking = asyncio.create_task(_ticks(stop))
        await asyncio.sleep(10 * TICK)
        await work()
        stop.set()
        found.append(1e3 * await ticking)
    return found


async def _median_us(call: Callable[[], Awaitable[object]], repetitions: int = 200) -> float:
    times: list[float] = []
    for _ in range(repetitions):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


async def measure() -> list[str]:
    """Measure both with four workers and return the lines of the report."""
    torch.set_num_threads(1)
    big = torch.ones(BIG)
    spec = ClassWithInitArgs(Peer)
    lines: list[str] = []
    async with WorkerGroup(ResourcePool([4], use_gpu=False), spec) as wg:

        async def idle() -> None:
            await asyncio.sleep(0.3)

        async def send() -> None:
            await asyncio.gather(*(wg.take(big) for _ in range(4)))

        async def receive() -> None:
            for _ in range(4):
                await wg.give(BIG // 4)

        for name, work in (("idle", idle), ("sending 1 GB", send), ("receiving 1 GB", receive)):
            late = await _lateness(work)
            lines.append(
                f"latest timer, {name}: median {statistics.median(late):.1f} ms, "
                f"worst of {RUNS} {max(late):.1f} ms"
            )
        shared = {size: asyncwg.share(torch.ones(size)) for size in (1 << 16, 1 << 20, BIG)}
        empty = await _median_us(lambda: wg.nothing())
        for size, tensor in shared.items():
            took = await _median_us(lambda t=tensor: wg.take(t))
            lines.append(
                f"{size * 4 >> 10} kB that are shared, to all: {took:.0f} us, "
                f"{took / empty:.2f} times an empty call"
            )
    return lines
