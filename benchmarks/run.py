"""The run: every library in turn, one repetition of one workload at a time, in several rounds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import OURS, NoAnswerError, Process
from benchmarks.results import Results
from benchmarks.workloads import BIG, BY_NAME, WORKERS

START_LIMIT, LIMIT = 90.0, 60.0
TURNS = 3
"""How often a round repeats a short workload, so that libraries alternate within a second."""

Say = Callable[[str], None]


class Libraries:
    """The long-lived processes. One that fails is started again, and not asked for that again."""

    def __init__(self, folder: Path, results: Results, say: Say) -> None:
        self.folder, self.results, self.say = folder, results, say
        self.processes: dict[str, Process] = {}
        self.failed: set[tuple[str, str]] = set()
        self.n, self.numel = WORKERS, BIG

    async def add(self, name: str, loop: str, n: int = WORKERS, numel: int = BIG) -> bool:
        """Start a library; say so and go on where it does not."""
        self.n, self.numel = n, numel
        process = Process(name, loop, self.folder)
        await process.spawn()
        try:
            await process.ask("start", START_LIMIT, n=n, numel=numel)
        except NoAnswerError as error:
            self.results.fail(name, loop, "start_s", str(error))
            self.say(f"{name} on {loop} does not start: {error}")
            await process.end()
            return False
        self.processes[f"{name} {loop}"] = process
        return True

    def keys(self, turn: int) -> list[str]:
        """Return them there and back, so that nobody always stands behind the same neighbour."""
        keys = list(self.processes)
        return keys if turn % 2 else keys[::-1]

    async def measure(
        self, key: str, workload: str, state: str
    ) -> tuple[float, float | None] | None:
        """Return one repetition, see `measure.repetition`, or None."""
        process = self.processes.get(key)
        if process is None or (key, workload) in self.failed:
            return None
        try:
            answer = await process.ask("measure", LIMIT, workload=workload, state=state)
            return answer[0], answer[1]
        except NoAnswerError as error:
            self.failed.add((key, workload))
            self.results.fail(process.name, process.loop, workload, str(error))
            if str(error) != "not offered":
                self.say(f"{key}: {workload}: {error}")
            if process.process is None:
                del self.processes[key]
                await self.add(process.name, process.loop, self.n, self.numel)
            return None

    async def resize(self, numel: int) -> None:
        """Have all take tensors of another size from now on."""
        self.numel = numel
        for key, process in list(self.processes.items()):
            try:
                await process.ask("size", LIMIT, numel=numel)
            except NoAnswerError as error:
                self.results.fail(process.name, process.loop, "size", str(error))
                self.say(f"{key}: no other size: {error}")
                await process.end()
                del self.processes[key]

    async def end(self) -> None:
        """End them all."""
        await asyncio.gather(*[process.end() for process in self.processes.values()])


def asked(name: str, workload: str) -> Sequence[str]:
    """Return what a library is asked to measure for a workload: the floor has several ways."""
    if name != "floor":
        return [workload]
    return {
        "one_us": ["pair_us", "one_us", "one_loop_us"],
        "all_us": ["all_us", "all_loop_us"],
        "pipelined_us": ["one_us", "one_loop_us"],
        "small4k_all_us": [],
        "broadcast_ms": ["broadcast_ms", "broadcast_two_ms"],
        "echo_ms": ["echo_ms", "echo_warm_ms"],
        "gather_ms": ["gather_ms", "gather_warm_ms"],
    }.get(workload, [workload])


async def warm_rounds(
    libraries: Libraries, workloads: Iterable[str], states: Sequence[str], rounds: int
) -> None:
    """Measure everything that needs no fresh process."""
    for number in range(rounds):
        for workload in workloads:
            large = BY_NAME[workload].large
            libraries.say(f"round {number + 1} of {rounds}: {workload}")
            for state in ["free"] if large else states:
                for turn in range(1 if large else TURNS):
                    for key in libraries.keys(number + turn):
                        name, loop = key.split()
                        if name not in OURS and state != "free":
                            continue  # their own helpers on one CPU would be a handicap, not a state
                        for one in asked(name, workload):
                            answer = await libraries.measure(key, one, state)
                            if answer is None:
                                continue
                            value, before = answer
                            libraries.results.add(name, loop, one, state, number, value)
                            if before is not None:
                                libraries.results.add(name, loop, one, "first", number, before)


async def cold_rounds(
    folder: Path, results: Results, say: Say, names: Sequence[str], rounds: int
) -> None:
    """Measure start and stop: each time in a fresh process."""
    for number in range(rounds):
        for name in names:
            say(f"round {number + 1} of {rounds}: start and stop of {name}")
            if name == "floor":
                results.add(name, "uvloop", "import_torch_s", "free", number, await import_torch())
                continue
            process = Process(name, "uvloop", folder)
            await process.spawn()
            part = "start_s"
            try:
                for part in ("start_s", "second_start_s"):
                    took = await process.ask("start", START_LIMIT, n=WORKERS, numel=1)
                    results.add(name, "uvloop", part, "free", number, took)
                part = "close_s"
                await process.ask("close", LIMIT)
                took = await process.ask("close", LIMIT)
                results.add(name, "uvloop", part, "free", number, took)
            except NoAnswerError as error:
                results.fail(name, "uvloop", part, str(error))
                say(f"{name}: {part}: {error}")
            await process.end()


async def import_torch() -> float:
    """Return the seconds of ``import torch`` in a fresh interpreter, without the interpreter's own."""
    program = (
        "from time import perf_counter as t; s = t(); import torch; print(t() - s)"  # as workers do
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    output: Any = await process.communicate()
    return float(output[0])
