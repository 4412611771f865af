"""Rows of the result, and the two ways to show them: on a terminal and as markdown."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.loops import LOOPS
from benchmarks.process import PEERS
from benchmarks.results import Results, number, spread
from benchmarks.workloads import COLD, WORKLOADS, Workload

STATES = ("free", "one", "two")
TITLES = {"floor": "floor", "torch_pipes": "torch pipes"}


class Row(NamedTuple):
    """One line of the table, all as text."""

    workload: str
    where: str
    floor: str
    ours: str
    ratio: str
    target: str
    peers: list[str]


def peers_of(results: Results) -> list[str]:
    """Return the peers that have a number or a failure."""
    return [
        p
        for p in PEERS
        if any(k.startswith(f"{p} ") for k in {**results.samples, **results.failures})
    ]


def rows(results: Results) -> list[Row]:
    """Return all lines for which asyncwg or the floor has a number."""
    found = []
    for spec in [*WORKLOADS, *COLD]:
        for loop in LOOPS:
            for state in STATES:
                if row := _row(results, spec, loop, state):
                    found.append(row)
    return found


def _row(results: Results, spec: Workload, loop: str, state: str) -> Row | None:
    ours = results.seconds("asyncwg", loop, spec.name, state)
    floor = results.floor(spec, loop, state)
    if not ours and floor is None:
        return None
    ratio = floor_text = ""
    if floor is not None:
        values = results.seconds(floor[0], loop, floor[1], state)
        floor_text = spread(values, floor[1] if floor[1] != "import_torch_s" else spec.name)
        if ours:
            ratio = f"{results.ratio(('asyncwg', spec.name), floor, loop, state):.2f}"
    elif ours and spec.name in ("second_start_s", "close_s"):
        ratio = f"{statistics.median(ours) / spec.target:.2f}"
    target = f"≤ {spec.target:g} x" if spec.floors else f"≤ {spec.target:g} s"
    met = ""
    if ratio:
        met = " ok" if float(ratio) <= (spec.target if spec.floors else 1) else " missed"
    peers = [_peer(results, peer, spec.name, ours, loop, state) for peer in peers_of(results)]
    where = "" if spec.unit == "s" else f"{loop}, {state}" if not spec.large else loop
    return Row(
        spec.name,
        where,
        floor_text,
        spread(ours, spec.name) if ours else "",
        ratio,
        target + met,
        peers,
    )


def _peer(
    results: Results, peer: str, workload: str, ours: list[float], loop: str, state: str
) -> str:
    values = results.seconds(peer, "uvloop", workload, state)
    if loop != "uvloop" or state != "free":
        return ""
    if not values:
        return results.failures.get(f"{peer} uvloop {workload}", "")[:40]
    text = spread(values, workload)
    if ours:
        text += f" {number(statistics.median(values) / statistics.median(ours))}x"
    return text


def show(results: Results) -> None:
    """Print the table."""
    table = Table(title="medians (quartiles); µs, ms or s as the name says")
    for heading in ("workload", "loop, CPUs", "floor", "asyncwg", "ratio", "target"):
        table.add_column(heading)
    peers = peers_of(results)
    for peer in peers:
        table.add_column(f"{TITLES.get(peer, peer)} (x ours)")
    for row in rows(results):
        style = "red" if row.target.endswith("missed") else ""
        table.add_row(*row[:6], *row.peers, style=style)
    # As wide as it needs to be: a table that goes to a file must not be cut.
    console = Console()
    if not console.is_terminal:
        console = Console(width=150 + 28 * len(peers))
    console.print(table)
    for name in results.missing:
        console.print(f"{name} is not installed: left out")
    for key, why in results.failures.items():
        if why != "not offered":
            console.print(f"{key}: {why}")
