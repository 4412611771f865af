"""The numbers of a run, what they were measured on, and the sums done with them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from benchmarks.workloads import Workload

PACKAGES = {
    "asyncwg": "asyncwg", "torch_pipes": "torch", "ray": "ray", "monarch": "torchmonarch",
    "xoscar": "xoscar", "verl": "verl",
}  # fmt: skip


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    versions = {}
    for name in ("torch", "uvloop", *PACKAGES.values()):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        "versions": versions,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "load_before": round(os.getloadavg()[0], 2),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
    }


def _commit() -> str:
    """Return which state of this project it is, where that can be known."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return described.stdout.strip()


@dataclass
class Results:
    """Samples by ``library loop workload state``, each with its round, and what failed."""

    machine: dict[str, Any] = field(default_factory=machine)
    samples: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def add(
        self, name: str, loop: str, workload: str, state: str, number: int, seconds: float
    ) -> None:
        self.samples.setdefault(f"{name} {loop} {workload} {state}", []).append((number, seconds))

    def fail(self, name: str, loop: str, workload: str, why: str) -> None:
        self.failures[f"{name} {loop} {workload}"] = why

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls(**json.loads(path.read_text()))

    def seconds(self, name: str, loop: str, workload: str, state: str) -> list[float]:
        """Return all samples of one cell."""
        return [value for _, value in self.samples.get(f"{name} {loop} {workload} {state}", [])]

    def floor(self, spec: Workload, loop: str, state: str) -> tuple[str, str] | None:
        """Return which measurement is the floor: library and workload. The fastest way counts."""
        ways = [
            ("asyncwg", way[1:]) if way.startswith("=") else ("floor", way) for way in spec.floors
        ]
        known = [way for way in ways if self.seconds(way[0], loop, way[1], state)]
        return min(
            known,
            key=lambda w: statistics.median(self.seconds(w[0], loop, w[1], state)),
            default=None,
        )

    def ratio(self, above: tuple[str, str], below: tuple[str, str], loop: str, state: str) -> float:
        """Return how many times ``above`` takes of ``below``: the median over rounds.

        Within a round both ran within a second or two of each other, under the same load.
        """
        by_round: list[dict[int, list[float]]] = [{}, {}]
        for side, (name, workload) in zip(by_round, (above, below), strict=True):
            for number, value in self.samples.get(f"{name} {loop} {workload} {state}", []):
                side.setdefault(number, []).append(value)
        shared = by_round[0].keys() & by_round[1].keys()
        median = statistics.median
        return median(median(by_round[0][n]) / median(by_round[1][n]) for n in shared)


def spread(values: list[float], scale: float) -> str:
    """Return ``median (lower to upper quartile)`` of seconds, in the unit that ``scale`` makes."""
    values = [value * scale for value in values]
    if len(values) == 1:
        return digits(values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{digits(middle)} ({digits(low)} to {digits(high)})"


def digits(value: float) -> str:
    """Return the three digits that matter."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
