"""What a group takes while it does nothing, and at the height of a broadcast."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from benchmarks.process import NoAnswerError, Process
from benchmarks.results import Results
from benchmarks.run import LIMIT, START_LIMIT, Say
from benchmarks.workloads import BIG, WORKERS

PAUSE = 0.01  # between two looks: each takes a while itself
SETTLE = 1.0


def pss(pids: Iterable[int]) -> int:
    """Return the proportional set size in bytes: a page shared by n processes counts 1/n for each."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        lines = [line for line in text.splitlines() if line.startswith("Pss:")]
        total += sum(int(line.split()[1]) * 1024 for line in lines)
    return total


async def memory(
    folder: Path, results: Results, say: Say, names: Sequence[str], rounds: int
) -> None:
    """Measure each library by itself, in a fresh process."""
    for number in range(rounds):
        for name in names:
            if name == "floor":
                continue
            say(f"memory of {name}")
            process = Process(name, "uvloop", folder)
            await process.spawn()
            try:
                await _one(process, results, number)
            except NoAnswerError as error:
                results.fail(name, "uvloop", "memory", str(error))
            await process.end()


async def _one(process: Process, results: Results, number: int) -> None:
    await process.ask("start", START_LIMIT, n=WORKERS, numel=BIG)
    await process.ask("measure", LIMIT, workload="all_us", state="free")
    await asyncio.sleep(SETTLE)  # what was started for the start has ended
    workers = await process.ask("pids", LIMIT)
    assert process.process is not None
    controller = psutil.Process(process.process.pid)
    below = [child.pid for child in controller.children(recursive=True)]

    def add(what: str, value: float) -> None:
        results.add(process.name, "uvloop", what, "free", number, value)

    add("worker_pss", pss(workers) / WORKERS)
    add("helpers_pss", pss(set(below) - set(workers)))
    tree = [controller.pid, *below]
    await process.ask("make", LIMIT)  # the tensor itself is the controller's, and there in any case
    before = await asyncio.to_thread(pss, tree)
    asked = asyncio.create_task(
        process.ask("measure", LIMIT, workload="broadcast_ms", state="free")
    )
    peak = before
    while not asked.done():
        peak = max(peak, await asyncio.to_thread(pss, tree))
        await asyncio.sleep(PAUSE)
    await asked
    after = await asyncio.to_thread(pss, tree)  # what is kept for the next one counts too
    add("broadcast_peak", max(peak, after))
    add("before_broadcast", before)
