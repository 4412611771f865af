"""What one more worker costs, and what one more byte costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.process import OURS
from benchmarks.results import Results
from benchmarks.run import Libraries, Say
from benchmarks.workloads import WORKERS

COUNTS = (1, 2, 4, 8, 16, 32, 64)
PEERS_UP_TO = 8
"""Their processes are heavy, and a machine that swaps measures something else."""
SIZES = tuple(1024 * 4**k for k in range(11))  # 1 kB to 1 GB
TURNS = 3
COPIES = 10
"""Copies of a value that a library may hold at once: room for them, or the size is left out."""


async def workers(
    folder: Path, results: Results, say: Say, names: Sequence[str], rounds: int
) -> None:
    """Measure an empty call to all for growing groups."""
    for n in COUNTS:
        say(f"{n} workers")
        libraries = Libraries(folder, results, say)
        try:
            for name in names:
                if name in OURS or n <= PEERS_UP_TO:
                    await libraries.add(name, "uvloop", n, 1)
            for number in range(rounds * TURNS):
                for key in libraries.keys(turn=number):
                    name = key.split()[0]
                    ways = ["all_us", "all_loop_us"] if name == "floor" else ["all_us"]
                    for way in ways:
                        for state in ("free", "one") if name in OURS else ("free",):
                            value = await libraries.measure(key, way, state)
                            if value is not None:
                                results.add(
                                    name, "uvloop", way, f"{state}:{n}", number // TURNS, value
                                )
        finally:
            await libraries.end()


async def sizes(
    folder: Path, results: Results, say: Say, names: Sequence[str], rounds: int
) -> None:
    """Measure a broadcast to four workers for growing values."""
    libraries = Libraries(folder, results, say)
    try:
        for name in names:
            await libraries.add(name, "uvloop", WORKERS, 1)
        for size in SIZES:
            if psutil.virtual_memory().available < COPIES * size:
                say(f"no room for {size} bytes: left out")
                continue
            say(f"{size} bytes")
            for key in list(libraries.processes):
                await libraries.processes[key].ask("size", 60, numel=size // 4)
            for number in range(rounds):
                for key in libraries.keys(turn=number):
                    value = await libraries.measure(key, "broadcast_ms", "free")
                    if value is not None:
                        results.add(
                            key.split()[0], "uvloop", "broadcast_ms", f"size:{size}", number, value
                        )
            # What was sent is let go before anybody gets more.
            for key in list(libraries.processes):
                await libraries.processes[key].ask("size", 60, numel=1)
            await asyncio.sleep(0.1)
    finally:
        await libraries.end()
