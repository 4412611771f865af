"""The results as tables: on a terminal, and as markdown."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.loops import LOOPS
from benchmarks.process import PEERS
from benchmarks.results import Results, digits, spread
from benchmarks.workloads import COLD, FLOOR_ONLY, PEER_TARGETS, WORKLOADS, Workload

STATES = ("free", "one", "two")
PLACES = [(loop, state) for loop in LOOPS for state in STATES]
TITLES = {"torch_pipes": "torch pipes", "monarch": "Monarch", "ray": "Ray"}
FLOOR_HEAD = ("workload", "loop, CPUs", "floor", "asyncwg", "ratio", "target", "")


class Sheet(NamedTuple):
    """A table as text."""

    title: str
    head: tuple[str, ...]
    lines: list[tuple[str, ...]]


def sheets(results: Results) -> list[Sheet]:
    """Return all tables for which there are numbers."""
    against_floor = [
        line
        for spec in [*WORKLOADS, *COLD]
        for loop in LOOPS
        for state in STATES
        if (line := _floor_line(results, spec, loop, state))
    ]
    found = [Sheet("Against the floor", FLOOR_HEAD, against_floor)]
    peers = [p for p in PEERS if any(k.startswith(f"{p} ") for k in results.samples)]
    if peers:
        head = ("workload", "asyncwg", *[TITLES.get(peer, peer) for peer in peers])
        lines = [_peer_line(results, spec, peers) for spec in [*WORKLOADS, *COLD]]
        found.append(Sheet("Against the peers", head, lines))
    head = ("workload", *[TITLES.get(name, name) for name in ("asyncwg", *peers)])
    firsts = [line for spec in WORKLOADS if (line := _first_line(results, spec, peers))]
    if firsts:
        found.append(Sheet("The first call after a pause", head, firsts))
    ways = [line for spec in FLOOR_ONLY if (line := _way_line(results, spec))]
    found.append(Sheet("The floor, each way", ("", *[f"{x}, {y}" for x, y in PLACES]), ways))
    return found


def _first_line(results: Results, spec: Workload, peers: list[str]) -> tuple[str, ...] | None:
    cells = []
    for name in ("asyncwg", *peers):
        values = results.seconds(name, "uvloop", spec.name, "first")
        cells.append(spread(values, spec.scale) if values else "")
    return (spec.name, *cells) if any(cells) else None


def _way_line(results: Results, spec: Workload) -> tuple[str, ...] | None:
    cells = []
    for loop, state in PLACES:
        values = results.seconds("floor", loop, spec.name, state)
        cells.append(spread(values, spec.scale) + f" {spec.unit}" if values else "")
    return (spec.text, *cells) if any(cells) else None


def _floor_line(results: Results, spec: Workload, loop: str, state: str) -> tuple[str, ...] | None:
    ours = results.seconds("asyncwg", loop, spec.name, state)
    if not ours:
        failed = results.failures.get(f"asyncwg {loop} {spec.name}")
        return (spec.name, f"{loop}, {state}", "", failed, "", "", "missed") if failed else None
    floor = results.floor(spec, loop, state)
    ratio, floor_text = statistics.median(ours) / spec.target, ""
    met = ratio <= 1
    if floor is not None:
        floor_text = spread(results.seconds(floor[0], loop, floor[1], state), spec.scale)
        ratio = results.ratio(("asyncwg", spec.name), floor, loop, state)
        met = ratio <= spec.target
    return (
        spec.name,
        "" if spec.unit == "s" else loop if spec.large else f"{loop}, {state}",
        floor_text,
        spread(ours, spec.scale),
        f"{ratio:.2f}" if floor is not None else "",
        f"≤ {spec.target:g}" if spec.floors else f"≤ {spec.target:g} s",
        "ok" if met else "missed",
    )


def _peer_line(results: Results, spec: Workload, peers: list[str]) -> tuple[str, ...]:
    ours = results.seconds("asyncwg", "uvloop", spec.name, "free")
    cells = [spec.name, spread(ours, spec.scale) if ours else ""]
    for peer in peers:
        values = results.seconds(peer, "uvloop", spec.name, "free")
        if not values:
            cells.append(results.failures.get(f"{peer} uvloop {spec.name}", "")[:60])
            continue
        text = digits(statistics.median(values) * spec.scale)
        if ours:
            times = results.ratio((peer, spec.name), ("asyncwg", spec.name), "uvloop", "free")
            text += f", {digits(times)} x"
            target = PEER_TARGETS.get(spec.name, {}).get(peer)
            if target is not None:
                text += f" ({'ok' if times >= target else 'missed'}: ≥ {target})"
        cells.append(text)
    return tuple(cells)


def show(results: Results) -> None:
    """Print the tables."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=220)  # a table that goes to a file must not be cut
    for sheet in sheets(results):
        table = Table(*sheet.head, title=f"{sheet.title}: medians (quartiles) in us, ms or s")
        for line in sheet.lines:
            table.add_row(*line, style="red" if line[-1] == "missed" else "")
        console.print(table)
    for line in remarks(results):
        console.print(line)


def remarks(results: Results) -> list[str]:
    """Return what could not be measured, and why."""
    lines = [f"{name} is not installed: left out." for name in results.missing]
    return lines + [
        f"{key}: {why}" for key, why in results.failures.items() if why != "not offered"
    ]


def misses(results: Results) -> list[str]:
    """Return the targets that asyncwg misses, each with how far."""
    found: dict[str, list[str]] = {}
    for sheet in sheets(results):
        if sheet.head == FLOOR_HEAD:
            for workload, where, _, ours, ratio, target, met in sheet.lines:
                if met == "missed":
                    cell = f"{ratio or ours}{f' on {where}' if where else ''}"
                    found.setdefault(f"{workload} ({target})", []).append(cell)
    return [f"{what}: {'; '.join(cells)}" for what, cells in found.items()]


def markdown(sheet: Sheet) -> str:
    """Return a sheet as a markdown table."""
    rows = [sheet.head, tuple("---" for _ in sheet.head), *sheet.lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
