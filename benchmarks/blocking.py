"""What a small call costs from a thread without an event loop: ``python -m benchmarks.blocking``."""

from __future__ import annotations

import statistics
import time

import asyncwg
from asyncwg import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup, blocking, register

ROUNDS = 5
CALLS = 2000


class Empty(Worker):
    @register()
    def nothing(self) -> None: ...


async def awaited() -> float:
    """Median seconds of an awaited call to one worker, on uvloop where it is installed."""
    pool = ResourcePool([1], use_gpu=False)
    async with WorkerGroup(pool, ClassWithInitArgs(Empty), preload=[]) as group:
        rank = group[0]
        times: list[float] = []
        for _ in range(CALLS):
            before = time.perf_counter()
            await rank.nothing()
            times.append(time.perf_counter() - before)
    return statistics.median(times)


def plain() -> float:
    """The same of a plain call."""
    pool = ResourcePool([1], use_gpu=False)
    with blocking.WorkerGroup(pool, ClassWithInitArgs(Empty), preload=[]) as group:
        rank = group[0]
        times: list[float] = []
        for _ in range(CALLS):
            before = time.perf_counter()
            rank.nothing()
            times.append(time.perf_counter() - before)
    return statistics.median(times)


def main() -> None:
    pairs = [(asyncwg.run(awaited()), plain()) for _ in range(ROUNDS)]
    first, second = (statistics.median(times) * 1e6 for times in zip(*pairs, strict=True))
    print(f"awaited {first:.1f} us, plain {second:.1f} us, {second / first:.2f} times")


if __name__ == "__main__":
    main()
