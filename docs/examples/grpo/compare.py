"""The comparison: the modes one after the other, from the same weights to the same reward."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .imitation import imitate
from .modes import MODES
from .picture import draw
from .record import Record, bars
from .run import Cores, start
from .settings import Settings

console = Console()


async def compare(
    settings: Settings, modes: Sequence[str], cores: Cores, out: Path
) -> list[Record]:
    """Run ``modes``, show how they did, and leave a log of each and the picture in the folder ``out``."""
    ranks = torch.cuda.device_count() or len(os.sched_getaffinity(0))
    state = await imitate(
        settings, ranks, lambda steps: track(steps, "     imitation", console=console)
    )
    records = []
    with bars(console) as progress:
        for mode in modes:
            log = out / f"grpo-{mode}.jsonl"
            with Record(mode, log, progress, settings.steps) as record:
                async with start(settings, record, state, cores) as run:
                    before = await run.held_out()
                    await MODES[mode](run)
                    await run.publish()
                    record.accuracy = before, await run.held_out()
                    await run.judge()
            records.append(record)
    console.print(summary(records, settings.target))
    draw(records, settings.target, out / "grpo.png")
    console.print(f"logs and picture: {out}")
    return records


def summary(records: Sequence[Record], target: float) -> Table:
    """Return a table with a column for each mode."""
    first = records[0].reached(target)
    table = Table("", *(record.mode for record in records))

    def row(name: str, value: Callable[[Record], str]) -> None:
        table.add_row(name, *map(value, records))

    def to_target(show: Callable[[float, float], str]) -> Callable[[Record], str]:
        def value(record: Record) -> str:
            reached = record.reached(target)
            return "never" if reached is None else show(*reached)

        return value

    row(f"seconds to {target:g}", to_target(lambda _, seconds: f"{seconds:.1f}"))
    if first is not None:
        relative = to_target(lambda _, seconds: f"{seconds / first[1]:.2f}")
        row(f"relative to {records[0].mode}", relative)
    row("steps to it", to_target(lambda steps, _: f"{steps:.0f}"))
    row("seconds per step", lambda record: f"{record.seconds / len(record.lines):.3f}")
    row("trainer busy", lambda record: f"{record.busy('trainer'):.0%}")
    row("rollout busy", lambda record: f"{record.busy('rollout'):.0%}")
    row("staleness", lambda record: f"{record.mean('staleness'):.2f}")
    row("most stale", lambda record: f"{max(line['most_stale'] for line in record.lines)}")
    row("dropped as too stale", lambda record: f"{record.rows.dropped if record.rows else 0}")
    row("reward, first and last", lambda record: _span([reward for *_, reward in record.curve]))
    row("most probable answers", lambda record: _span(record.accuracy))
    return table


def _span(values: Sequence[float]) -> str:
    return f"{values[0]:.3f}, {values[-1]:.3f}"
