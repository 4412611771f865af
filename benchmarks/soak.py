"""Mixed sizes for a long time: memory and descriptors must end where they began.

``python -m benchmarks.soak --seconds 600``; exits with 1 when something has grown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path

import torch

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from asyncwg._driver.arena import arena

SIZES = (1, 100, 1 << 10, 20_000, 1 << 18, 1 << 21)  # float32 values
WARM_SHARE = 0.2  # of the time: until then pools and caches may grow
MEMORY_SLACK = 64 << 20  # bytes: what an allocator keeps, more or less
DESCRIPTOR_SLACK = 2


class Echo(Worker):
    """Gives back what it gets, and keeps some of it for a while."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, tensor: torch.Tensor, keep: bool) -> torch.Tensor:
        if keep:
            self.kept = [*self.kept[-2:], tensor]
        return tensor + 1

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="allow")
    def double(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self, tensor: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0.001)
        return tensor


def _usage(pid: int) -> tuple[int, int]:
    """Return anonymous memory in bytes, and open descriptors."""
    status = Path(f"/proc/{pid}/status").read_text()
    anonymous = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(anonymous.split()[1]) * 1024, len(os.listdir(f"/proc/{pid}/fd"))


async def _one(wg: WorkerGroup, chance: random.Random) -> None:
    size = chance.choice(SIZES)
    tensor = torch.full((size,), float(size))
    kind = chance.randrange(4)
    if kind == 0:
        results = await wg.echo(tensor, chance.random() < 0.1)
        good = all(float(result[-1]) == size + 1 for result in results)
    elif kind == 1:
        good = size < 2 or float((await wg.double(tensor))[-1]) == 2 * size
    elif kind == 2:
        good = all(float(result[0]) == size for result in await wg.later(tensor))
    else:
        wg.later(tensor).cancel()
        good = True
    if not good:
        raise SystemExit(f"a wrong number came back for {size} values (kind {kind})")


async def soak(seconds: float, seed: int) -> list[str]:
    """Run for ``seconds`` and return what has grown."""
    chance = random.Random(seed)
    spec = ClassWithInitArgs(Echo)
    start, calls = time.monotonic(), 0
    before: dict[int, tuple[int, int]] = {}
    async with WorkerGroup(ResourcePool([2], use_gpu=False), spec) as wg:
        while (passed := time.monotonic() - start) < seconds:
            await asyncio.gather(*(_one(wg, chance) for _ in range(4)))
            calls += 4
            if not before and passed > seconds * WARM_SHARE:
                before = {pid: _usage(pid) for pid in (os.getpid(), *wg.pids)}
        after = {pid: _usage(pid) for pid in before}
        print(f"{calls} calls in {passed:.0f} s; arena: {arena().in_use() >> 20} MB in use")
    grown: list[str] = []
    for pid, (memory, descriptors) in before.items():
        print(f"pid {pid}: {memory >> 20} -> {after[pid][0] >> 20} MB, "
              f"{descriptors} -> {after[pid][1]} descriptors")  # fmt: skip
        if after[pid][0] > memory + MEMORY_SLACK:
            grown.append(f"memory of pid {pid}")
        if after[pid][1] > descriptors + DESCRIPTOR_SLACK:
            grown.append(f"descriptors of pid {pid}")
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    grown = asyncwg.run(soak(options.seconds, options.seed))
    if grown:
        sys.exit("has grown: " + ", ".join(grown))


if __name__ == "__main__":
    main()
