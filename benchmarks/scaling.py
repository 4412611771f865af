"""What one more worker costs, and what one more byte costs."""

from __future__ import annotations

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
COPIES = 12
"""Copies of a value that a library may hold at once: room for them, or the size is left out."""
TOGETHER = 16 << 20


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
                            answer = await libraries.measure(key, way, state)
                            if answer is not None:
                                value = answer[0]
                                results.add(
                                    name, "uvloop", way, f"{state}:{n}", number // TURNS, value
                                )
        finally:
            await libraries.end()


async def sizes(
    folder: Path, results: Results, say: Say, names: Sequence[str], rounds: int
) -> None:
    """Measure a broadcast to four workers for growing values.

    Libraries take turns while values are small. With big ones each has the machine for itself: all
    of them together would hold a multiple of every value.
    """
    small = [size for size in SIZES if size <= TOGETHER]
    big = [size for size in SIZES if size > TOGETHER]
    for group, some in [(list(names), small), *[([name], big) for name in names]]:
        libraries = Libraries(folder, results, say)
        try:
            for name in group:
                await libraries.add(name, "uvloop", WORKERS, 1)
            for size in some:
                if psutil.virtual_memory().available < COPIES * size:
                    say(f"no room for {size} bytes in {', '.join(group)}: left out")
                    continue
                say(f"{size} bytes: {', '.join(group)}")
                await _size(libraries, results, size, rounds)
        finally:
            await libraries.end()


async def _size(libraries: Libraries, results: Results, size: int, rounds: int) -> None:
    await libraries.resize(size // 4)
    for number in range(rounds):
        for key in libraries.keys(turn=number):
            answer = await libraries.measure(key, "broadcast_ms", "free")
            if answer is not None:
                name = key.split()[0]
                results.add(name, "uvloop", "broadcast_ms", f"size:{size}", number, answer[0])
    await libraries.resize(1)  # what was sent is let go before anybody gets more
