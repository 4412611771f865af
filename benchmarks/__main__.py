"""``python -m benchmarks``: measure, show, write down."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import run, table
from benchmarks.loops import LOOPS
from benchmarks.process import MODULES, OURS, missing
from benchmarks.results import Results
from benchmarks.workloads import BIG, WORKERS, WORKLOADS

app = typer.Typer(add_completion=False, help="What a call costs, beside the floor and the peers.")
errors = Console(stderr=True, highlight=False)
OUT = Path("benchmarks/out")
Out = Annotated[Path, typer.Option(help="Folder for the numbers and the logs.")]


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    only: Annotated[str, typer.Option(help="Libraries, with commas; all that are installed.")] = "",
    workloads: Annotated[str, typer.Option(help="Workloads, with commas; all.")] = "",
    rounds: Annotated[int, typer.Option(help="How often everything is repeated.")] = 5,
    quick: Annotated[bool, typer.Option(help="asyncwg and the floor alone, few rounds.")] = False,
    pin: Annotated[
        str, typer.Option(help="States to measure short calls in: free, one CPU, two CPUs.")
    ] = "free,one,two",
    loops: Annotated[str, typer.Option(help="Event loops of the floor and asyncwg.")] = ",".join(
        LOOPS
    ),
    out: Out = OUT,
) -> None:
    """Measure the floor, asyncwg and the peers in one run."""
    if context.invoked_subcommand is not None:
        return
    names = only.split(",") if only else list(OURS if quick else MODULES)
    if only and "floor" not in names:
        names.insert(0, "floor")  # a time without its floor says nothing
    chosen = [w.name for w in WORKLOADS if not workloads or w.name in workloads.split(",")]
    cold = not workloads or any(part.endswith("_s") for part in workloads.split(","))
    for name in names:
        if name not in MODULES:
            raise typer.BadParameter(f"{name} is none of {', '.join(MODULES)}")
    out.mkdir(parents=True, exist_ok=True)
    results = Results()
    results.missing = [name for name in names if missing(name)]
    names = [name for name in names if name not in results.missing]
    rounds = min(rounds, 3) if quick else rounds
    asyncio.run(
        _measure(results, names, chosen, cold, rounds, pin.split(","), loops.split(","), out)
    )
    results.machine["load_after"] = round(os.getloadavg()[0], 2)
    path = out / ("quick.json" if quick or only or workloads else "latest.json")
    results.save(path)
    table.show(results)
    errors.print(f"numbers: {path}")


async def _measure(
    results: Results, names: list[str], workloads: list[str], cold: bool, rounds: int,
    states: list[str], loops: list[str], out: Path,
) -> None:  # fmt: skip
    with errors.status("starting") as status:
        libraries = run.Libraries(out, results, lambda text: _say(status.update, text))
        try:
            for name in names if workloads else ():
                # The peers are asked on one loop: what they cost does not depend on it.
                for loop in loops if name in OURS else loops[:1]:
                    await libraries.add(name, loop, WORKERS, BIG)
            await run.warm_rounds(libraries, workloads, states, rounds)
        finally:
            await libraries.end()
        if cold:
            await run.cold_rounds(out, results, libraries.say, names, rounds)


def _say(update: object, text: str) -> None:
    if errors.is_terminal and text.startswith("round"):
        update(text)  # type: ignore[operator]
    elif not text.startswith("round"):
        errors.print(text)


if __name__ == "__main__":
    app()
