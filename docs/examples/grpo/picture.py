"""The picture: reward over time in the three modes, and who was busy when."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from .record import Record

COLOURS = {"synchronous": "tab:red", "one-step-off": "tab:blue", "asynchronous": "tab:green"}
WINDOW = 12  # steps that the timeline shows


def draw(records: Sequence[Record], target: float | None, path: Path) -> None:
    """Draw what ``records`` hold to a file, and a line at the reward ``target``."""
    figure = Figure(figsize=(10, 7), layout="constrained")  # without pyplot, so without a screen
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    for record in records:
        seconds = [line["seconds"] for line in record.lines]
        colour = COLOURS[record.mode]
        rewards = [line["reward"] for line in record.lines]
        upper.plot(seconds, rewards, ".", color=colour, alpha=min(0.5, 50 / len(rewards)))
        _, times, judged = zip(*record.curve, strict=True)
        upper.plot(times, judged, color=colour, label=record.mode)
    if target is not None:
        upper.axhline(target, color="grey", linewidth=0.8, linestyle="--")
    upper.set(title="Reward", xlabel="seconds", ylabel="held-out questions; dots: of a step")
    upper.set_xlim(left=0)
    upper.legend(loc="lower right")
    names = []
    for record in records:
        middle = len(record.lines) // 2
        first = record.start + record.lines[middle]["seconds"]
        for group, ranks in record.spans.items():
            for rank, spans in enumerate(ranks):
                shown = [(begin - first, end - begin) for begin, end in spans if end > first]
                colour = COLOURS[record.mode]
                lower.broken_barh(shown, (len(names) - 0.4, 0.8), color=colour)
                names.append(f"{record.mode}: {group} {rank}")
    slowest = max(record.seconds / len(record.lines) for record in records)
    lower.set(title="Who was busy when", xlabel="seconds, from the middle of the run")
    lower.set_xlim(0, WINDOW * slowest)
    lower.set_yticks(range(len(names)), names)
    lower.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
