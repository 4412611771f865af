"""``python -m benchmarks``: measure, show, write down."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import asyncwg
from benchmarks import attach, loop, memory, overlap, run, scaling, table
from benchmarks import report as report_
from benchmarks.loops import LOOPS
from benchmarks.process import MODULES, OURS, missing
from benchmarks.results import Results
from benchmarks.workloads import WORKLOADS

app = typer.Typer(add_completion=False, help="What a call costs, beside the floor and the peers.")
errors = Console(stderr=True, highlight=False)

Out = Annotated[Path, typer.Option(help="Folder for the numbers and the logs.")]
Only = Annotated[str, typer.Option(help="Libraries, with commas; else all that are installed.")]
Rounds = Annotated[int, typer.Option(help="How often everything is repeated.")]
OUT = Path("benchmarks/out")
QUICK_ROUNDS, COLD_ROUNDS = 3, 3


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    only: Only = "",
    workloads: Annotated[str, typer.Option(help="Workloads, with commas; else all.")] = "",
    rounds: Rounds = 5,
    quick: Annotated[bool, typer.Option(help="asyncwg and the floor alone, few rounds.")] = False,
    pin: Annotated[
        str, typer.Option(help="Where short calls run: free, one (CPU for all), two.")
    ] = "free,one,two",
    loops: Annotated[str, typer.Option(help="Loops of the floor and asyncwg.")] = ",".join(LOOPS),
    out: Out = OUT,
) -> None:
    """Measure the floor, asyncwg and the peers in one run."""
    if context.invoked_subcommand is not None:
        return
    names, results = _begin(only or (",".join(OURS) if quick else ""), out)
    asked = set(workloads.split(",")) if workloads else None
    chosen = [w.name for w in WORKLOADS if asked is None or w.name in asked]
    # What goes by the name of a time in seconds needs a fresh process: all of these are one thing.
    cold = asked is None or any(name.endswith("_s") for name in asked)
    rounds = min(rounds, QUICK_ROUNDS) if quick else rounds
    path = out / ("quick.json" if quick or only or workloads else "latest.json")
    measuring = _measure(
        results, names, chosen, cold, rounds, pin.split(","), loops.split(","), out
    )
    _finish(results, measuring, path)
    table.show(results)


@app.command("scaling")
def scaling_(only: Only = "", rounds: Rounds = 3, out: Out = OUT) -> None:
    """Measure a call for 1 to 64 workers, and for 1 kB to 1 GB."""
    names, results = _begin(only, out)

    async def both() -> None:
        await scaling.workers(out, results, _say, names, rounds)
        await scaling.sizes(out, results, _say, names, rounds)

    _finish(results, both(), out / "scaling.json")
    errors.print("'python -m benchmarks report' shows them")


@app.command("memory")
def memory_(only: Only = "", rounds: Rounds = 3, out: Out = OUT) -> None:
    """Measure the memory of idle groups and of a broadcast."""
    names, results = _begin(only, out)
    _finish(results, memory.memory(out, results, _say, names, rounds), out / "memory.json")
    errors.print("'python -m benchmarks report' shows them")


@app.command("loop")
def loop_() -> None:
    """Measure what the event loop feels while a gigabyte travels, and sending what is shared."""
    for line in asyncwg.run(loop.measure()):
        print(line)


@app.command("overlap")
def overlap_() -> None:
    """Measure how close a trainer that is one step off comes to perfect overlap."""
    for line in overlap.measure():
        print(line)


@app.command("attach")
def attach_() -> None:
    """Measure calls of a group in another process, beside those of a group of one's own."""
    for line in asyncwg.run(attach.measure()):
        print(line)


@app.command("all")
def everything(context: typer.Context, out: Out = OUT) -> None:
    """Measure everything there is."""
    context.invoked_subcommand = None
    measure(context, out=out)
    scaling_(out=out)
    memory_(out=out)


@app.command()
def report(out: Out = OUT) -> None:
    """Write the numbers of the last runs into docs/performance.md, and draw its pictures."""
    for path in report_.write(out):
        errors.print(f"written from {path}")


def _begin(only: str, out: Path) -> tuple[list[str], Results]:
    names = only.split(",") if only else list(MODULES)
    if "floor" not in names:
        names.insert(0, "floor")  # a time without its floor says nothing
    for name in names:
        if name not in MODULES:
            raise typer.BadParameter(f"{name} is none of {', '.join(MODULES)}")
    out.mkdir(parents=True, exist_ok=True)
    results = Results()
    results.missing = [name for name in names if missing(name)]
    return [name for name in names if name not in results.missing], results


def _finish(results: Results, measuring: Coroutine[Any, Any, None], path: Path) -> None:
    asyncio.run(measuring)
    results.machine["load_after"] = round(os.getloadavg()[0], 2)
    results.save(path)
    errors.print(f"numbers: {path}")


async def _measure(
    results: Results, names: list[str], workloads: list[str], cold: bool, rounds: int,
    states: list[str], loops: list[str], out: Path,
) -> None:  # fmt: skip
    libraries = run.Libraries(out, results, _say)
    try:
        for name, loop in _placed(names if workloads else [], loops):
            await libraries.add(name, loop)
        await run.warm_rounds(libraries, workloads, states, rounds)
    finally:
        await libraries.end()
    if cold:
        await run.cold_rounds(out, results, _say, names, min(rounds, COLD_ROUNDS))


def _placed(names: Iterable[str], loops: list[str]) -> Iterable[tuple[str, str]]:
    """Give the peers one loop: what they cost does not depend on it."""
    return ((n, loop) for n in names for loop in (loops if n in OURS else loops[:1]))


def _say(text: str) -> None:
    if errors.is_terminal or not text.startswith("round"):
        errors.print(text)


if __name__ == "__main__":
    app()
