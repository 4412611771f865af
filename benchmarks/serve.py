"""A process that holds one library: ``python -m benchmarks.serve NAME LOOP``.

It reads one request a line from stdin and answers each with one line, both JSON. Every library has
a process of its own that lives through the whole run, so that their repetitions can take turns.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from time import perf_counter
from typing import Any, TextIO

import psutil

from benchmarks.adapter import Adapter
from benchmarks.loops import runner
from benchmarks.measure import Values, repetition

CPUS = sorted(os.sched_getaffinity(0))
STATES = {
    "free": (CPUS, CPUS),
    "one": (CPUS[:1], CPUS[:1]),  # controller and workers on the same CPU
    "two": (CPUS[:1], CPUS[-1:]),  # the controller on one, all workers on another
}


def pin(state: str) -> None:
    """Move this process and everything below it to the CPUs of a state."""
    here, below = STATES[state]
    children = [child.pid for child in psutil.Process().children(recursive=True)]
    for pid, cpus in [(os.getpid(), here), *[(pid, below) for pid in children]]:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), cpus)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended meanwhile


def gone(pids: list[int]) -> None:
    """Wait until no process of these is left. A zombie has ended: its parent merely has not looked."""
    while any(map(_runs, pids)):
        time.sleep(0.001)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Server:
    """The groups of this process, and what they are asked for."""

    def __init__(self, adapter: type[Adapter]) -> None:
        self.adapter = adapter
        self.groups: list[Adapter] = []
        self.values = Values(1)
        self.state = "free"
        self.seen: set[str] = set()

    async def start(self, n: int, numel: int) -> float:
        group = self.adapter()
        started = perf_counter()
        await group.start(n)
        took = perf_counter() - started
        self.groups.append(group)
        self.values = Values(n, numel)
        return took

    async def close(self) -> float:
        group = self.groups.pop()
        pids = await group.pids()
        started = perf_counter()
        await group.close(last=not self.groups)
        await asyncio.to_thread(gone, pids)
        return perf_counter() - started

    async def measure(self, workload: str, state: str) -> tuple[float, float | None]:
        if state != self.state:
            pin(state)
            self.state = state
        check = workload not in self.seen
        self.seen.add(workload)
        return await repetition(self.groups[-1], workload, self.values, check=check)

    async def size(self, numel: int) -> None:
        """Take tensors of another size from now on."""
        self.values = Values(self.values.n, numel)
        self.seen.clear()

    async def make(self) -> None:
        """Make the big tensor, without sending it."""
        _ = self.values.big

    async def pids(self) -> list[int]:
        return await self.groups[-1].pids()


async def serve(server: Server, replies: TextIO) -> None:
    """Answer requests until stdin ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        request: dict[str, Any] = json.loads(line)
        try:
            answer = {"value": await getattr(server, request.pop("op"))(**request)}
        except NotImplementedError:
            answer = {"error": "not offered"}
        except Exception as error:  # noqa: BLE001  # a library that is broken is a result
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def main(name: str, loop: str) -> None:
    # Libraries print what they like: it goes to stderr, the answers stay alone.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    adapter = importlib.import_module(f"benchmarks.adapters.{name}").Adapter
    with runner(loop) as run:
        run.run(serve(Server(adapter), replies))


if __name__ == "__main__":
    main(*sys.argv[1:])
