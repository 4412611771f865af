"""The pictures that stand in the docs."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from benchmarks.process import PEERS
from benchmarks.results import Results
from benchmarks.table import TITLES
from benchmarks.workloads import COLD, WORKLOADS

mpl.use("Agg")
COLOURS = {
    "floor": "#bbbbbb", "asyncwg": "#d1495b", "torch_pipes": "#edae49", "xoscar": "#66a182",
    "monarch": "#2e4057", "ray": "#8d96a3", "verl": "#9a6fb0",
}  # fmt: skip
MILLISECONDS = 1e3


def bars(results: Results, path: Path) -> None:
    """Draw every workload of every library as a bar, on one logarithmic axis of milliseconds."""
    names = ["floor", "asyncwg", *PEERS]
    names = [n for n in names if any(key.startswith(f"{n} ") for key in results.samples)]
    shown = [spec for spec in [*WORKLOADS, COLD[0]] if _median(results, "asyncwg", spec.name)]
    height = 0.86 / len(names)
    figure, axis = plt.subplots(figsize=(9, 0.75 * len(shown) + 1), layout="constrained")
    for place, name in enumerate(names):
        label = TITLES.get(name, name)
        for row, spec in enumerate(shown):
            workload = spec.name
            if name == "floor":
                way = results.floor(spec, "uvloop", "free")
                if way is None or way[0] != "floor":
                    continue
                workload = way[1]
            value = _median(results, name, workload)
            if not value:
                continue
            y = row + (place - (len(names) - 1) / 2) * height
            axis.barh(y, value * MILLISECONDS, height * 0.92, color=COLOURS[name], label=label)
            label = "_"  # once in the legend
    axis.set_xscale("log")
    axis.set_xlabel("milliseconds, logarithmic; shorter is better")
    axis.set_yticks(range(len(shown)), [spec.text for spec in shown])
    axis.set_ylim(len(shown) - 0.5, -0.5)  # the first on top
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(names), frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def curves(results: Results, path: Path) -> None:
    """Draw the cost of a call over the number of workers, and over the size of what is sent."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, colour in COLOURS.items():
        label = TITLES.get(name, name)
        counts = scaling(results, name, "all_us", "free:")
        if name == "floor":
            loops = scaling(results, name, "all_loop_us", "free:")
            counts = {n: min(value, loops.get(n, value)) for n, value in counts.items()}
        for axis, points, scale in (
            (left, counts, 1e6), (right, scaling(results, name, "broadcast_ms", "size:"), 1e3),
        ):  # fmt: skip
            heights = [value * scale for value in points.values()]
            axis.loglog(list(points), heights, "o-", color=colour, label=label, markersize=3)
    left.set_xlabel("workers")
    left.set_ylabel("us, an empty call to all")
    left.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])
    right.set_xlabel("bytes")
    right.set_ylabel("ms, sent to four workers")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def scaling(results: Results, name: str, workload: str, prefix: str) -> dict[int, float]:
    """Return the median seconds by number of workers or bytes."""
    start = f"{name} uvloop {workload} {prefix}"
    return {
        int(key.removeprefix(start)): statistics.median(value for _, value in samples)
        for key, samples in results.samples.items()
        if key.startswith(start)
    }


def _median(results: Results, name: str, workload: str) -> float:
    values = results.seconds(name, "uvloop", workload, "free")
    return statistics.median(values) if values else 0.0
