"""Write what was measured into the page of the docs, between two marks."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks import picture
from benchmarks.process import OURS, PEERS
from benchmarks.results import Results, digits, spread
from benchmarks.scaling import COUNTS, SIZES
from benchmarks.table import TITLES, Sheet, markdown, misses, remarks, sheets

PAGE = Path("docs/performance.md")
PICTURES = Path("docs/pictures")
BEGIN, END = "<!-- numbers: begin -->", "<!-- numbers: end -->"
NAMES = [*OURS, *PEERS]
MEGABYTE = 1e-6


def write(out: Path, page: Path = PAGE) -> list[str]:
    """Put tables and pictures of the last runs in their places; return what was written."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    text, written = [], []
    if (path := out / "latest.json").exists():
        results = Results.load(path)
        picture.bars(results, PICTURES / "bench.png")
        text += [
            "![Every workload, every library](pictures/bench.png)", "", *_machine(results), ""
        ]  # fmt: skip
        for sheet in sheets(results):
            text += [f"### {sheet.title}", "", markdown(sheet), ""]
        missed = misses(results)
        text += ["### Missed against the floor", "", *[f"- {line}" for line in missed], ""]
        text += [f"- {line}" for line in remarks(results)] + [""]
        written.append(str(path))
    if (path := out / "scaling.json").exists():
        results = Results.load(path)
        picture.curves(results, PICTURES / "bench-scaling.png")
        text += ["### More workers, more bytes", ""]
        text += ["![Cost by workers and by bytes](pictures/bench-scaling.png)", ""]
        text += [*_machine(results), "", markdown(_workers(results)), "", *_slopes(results), ""]
        text += [markdown(_sizes(results)), ""]
        text += [f"- {line}" for line in remarks(results)] + [""]
        written.append(str(path))
    if (path := out / "memory.json").exists():
        results = Results.load(path)
        text += ["### Memory", "", *_machine(results), "", markdown(_memory(results)), ""]
        text += [f"- {line}" for line in remarks(results)] + [""]
        written.append(str(path))
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    body = "\n".join(text).strip().replace("\n\n\n", "\n\n")
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}")
    return written


def _machine(results: Results) -> list[str]:
    machine = results.machine
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    # Beside the version, which stays the same for long, stands the commit.
    versions = versions.replace(
        "asyncwg ", f"commit {machine['commit']}, asyncwg " if machine.get("commit") else "asyncwg "
    )
    text = (
        f"`{machine['command']}`, {machine['when']}. {machine['cpus']} CPUs of {machine['cpu']}, "
        f"Linux {machine['kernel']}, Python {machine['python']}; {versions}. "
        f"Load average before {machine['load_before']}, after {machine.get('load_after', '?')}."
    )
    return [text]


def _curve(results: Results, name: str, workload: str, prefix: str) -> dict[int, float]:
    points = picture.scaling(results, name, workload, prefix)
    if name == "floor" and workload == "all_us":
        loops = picture.scaling(results, name, "all_loop_us", prefix)
        return {n: min(value, loops.get(n, value)) for n, value in points.items()}
    return points


def _workers(results: Results) -> Sheet:
    return _points(results, "all_us", "free:", COUNTS, 1e6, "workers (us)")


def _sizes(results: Results) -> Sheet:
    return _points(results, "broadcast_ms", "size:", SIZES, 1e3, "bytes (ms)")


def _points(
    results: Results, workload: str, prefix: str, places: tuple[int, ...], scale: float, title: str
) -> Sheet:
    curves = {name: _curve(results, name, workload, prefix) for name in NAMES}
    curves = {name: curve for name, curve in curves.items() if curve}
    lines = [
        (
            f"{place:,}",
            *[digits(c[place] * scale) if place in c else "" for c in curves.values()],
        )
        for place in places
    ]
    return Sheet("", (title, *[TITLES.get(name, name) for name in curves]), lines)


def _slopes(results: Results) -> list[str]:
    lines = []
    for state in ("free", "one"):
        ours, floor = (_curve(results, name, "all_us", f"{state}:") for name in OURS[::-1])
        if COUNTS[-1] in ours and COUNTS[-1] in floor:
            each = [
                (c[COUNTS[-1]] - c[COUNTS[0]]) / (COUNTS[-1] - COUNTS[0]) for c in (ours, floor)
            ]
            lines.append(
                f"One more worker, from {COUNTS[0]} to {COUNTS[-1]}, CPUs {state}: "
                f"{digits(each[0] * 1e6)} us in asyncwg, {digits(each[1] * 1e6)} us in the echo: "
                f"{each[0] / each[1]:.2f} times (target: ≤ 1.3)."
            )
    return lines


def _memory(results: Results) -> Sheet:
    head = ("MB", "an idle worker", "all helpers", "256 MB to all add, at their peak")
    lines = []
    for name in NAMES:
        worker, helpers, peak, before = (
            results.seconds(name, "uvloop", what, "free")
            for what in ("worker_pss", "helpers_pss", "broadcast_peak", "before_broadcast")
        )
        if worker:
            added = [p - b for p, b in zip(peak, before, strict=True)]
            lines.append(
                (
                    TITLES.get(name, name),
                    spread(worker, MEGABYTE),
                    digits(statistics.median(helpers) * MEGABYTE),
                    digits(statistics.median(added) * MEGABYTE) if added else "",
                )
            )
    return Sheet("", head, lines)
