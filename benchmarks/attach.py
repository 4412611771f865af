"""What a call of a group in another process costs, beside the same call of a group of one's own."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from asyncwg import ClassWithInitArgs, ResourcePool, WorkerGroup
from benchmarks.loop import BIG, Peer

WORKERS = (1, 4)
ROUNDS = 7
CALLS, BIG_CALLS = 400, 5
"""Of each kind in one round; the two ways take turns, and the median of the rounds' medians counts."""

Work = Callable[[WorkerGroup], Awaitable[Any]]


async def _seconds(work: Work, wg: WorkerGroup, calls: int) -> float:
    times: list[float] = []
    for _ in range(calls):
        start = time.perf_counter()
        result = await work(wg)
        times.append(time.perf_counter() - start)
        del result
    return statistics.median(times)


async def _compare(
    work: Work, own: WorkerGroup, other: WorkerGroup, calls: int
) -> tuple[float, float]:
    for wg in (own, other):
        await _seconds(work, wg, max(2, calls // 10))  # what is touched for the first time
    found = [
        (await _seconds(work, own, calls), await _seconds(work, other, calls))
        for _ in range(ROUNDS)
    ]
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


async def measure() -> list[str]:
    """Measure both ways with one and with four workers and return the lines of a table."""
    torch.set_num_threads(1)
    small, big = torch.ones(1024), torch.ones(BIG)

    async def burst(wg: WorkerGroup) -> None:
        await asyncio.gather(*(wg.nothing() for _ in range(100)))

    kinds: list[tuple[str, Work, int, float, str]] = [
        ("nothing", lambda wg: wg.nothing(), CALLS, 1e6, "us"),
        ("a 4 kB tensor to all", lambda wg: wg.take(small), CALLS, 1e6, "us"),
        ("100 calls at once, each", burst, CALLS // 20, 1e4, "us"),
        ("256 MB to all", lambda wg: wg.take(big), BIG_CALLS, 1e3, "ms"),
        ("256 MB joined", lambda wg: wg.give(BIG // wg.world_size), BIG_CALLS, 1e3, "ms"),
    ]
    lines = [
        "| call | workers | own group | attached | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        for workers in WORKERS:
            pool = ResourcePool([workers], use_gpu=False)
            spec = ClassWithInitArgs(Peer)
            other = await WorkerGroup.start(pool, spec, detached=True, name="bench")
            try:
                async with WorkerGroup(pool, spec) as own:
                    for name, work, calls, scale, unit in kinds:
                        ours, theirs = await _compare(work, own, other, calls)
                        lines.append(
                            f"| {name} | {workers} | {scale * ours:.1f} {unit} | "
                            f"{scale * theirs:.1f} {unit} | {theirs / ours:.2f} |"
                        )
            finally:
                await other.shutdown()
    return lines
