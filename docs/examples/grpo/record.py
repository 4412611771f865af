"""What is written down of a run: a line for each step, a bar, and when each group was busy."""

import json
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from asyncwg import RowsStatistics

MEMORY = 0.97  # of the reward that is shown: what is left of the mean of all before


class Record:
    """The record of one run, in a file as it goes."""

    def __init__(self, mode: str, path: Path, progress: Progress, steps: int) -> None:
        self.mode = mode
        self.lines: list[dict[str, Any]] = []
        self.spans: dict[str, list[list[tuple[float, float]]]] = {}
        """Of each group, by rank: when it was busy."""
        self.rows: RowsStatistics | None = None
        self.accuracy: tuple[float, float] = (0.0, 0.0)
        """The most probable answers to the held-out questions that are right, before and after."""
        self.curve: list[tuple[int, float, float]] = []
        """Steps, seconds, and the reward on held-out questions then."""
        self.start = 0.0
        self._reward: float | None = None
        self._progress = progress
        self._bar = progress.add_task(mode, total=steps, reward=float("nan"))
        self._file = path.open("w")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def begin(self) -> None:
        """Start the clock."""
        self.start = time.monotonic()

    def step(self, reward: float, **more: float) -> None:
        """Write down a step."""
        before = reward if self._reward is None else self._reward
        self._reward = MEMORY * before + (1 - MEMORY) * reward
        line = {
            "mode": self.mode,
            "step": len(self.lines) + 1,
            "seconds": self.now,
            "reward": reward,
            "mean_reward": self._reward,
            **more,
        }
        self.lines.append(line)
        self._write(line)
        self._progress.update(self._bar, advance=1, reward=self._reward)

    def judged(self, step: int, seconds: float, reward: float) -> None:
        """Write down what the weights were worth at some time."""
        self.curve.append((step, seconds, reward))
        line = {"mode": self.mode, "step": step, "seconds": seconds, "held_out_reward": reward}
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    @property
    def now(self) -> float:
        """Seconds since the clock began."""
        return time.monotonic() - self.start

    def mean(self, key: str) -> float:
        """Return the mean over all steps of what was written down as ``key``."""
        return mean(line[key] for line in self.lines)

    def busy(self, group: str) -> float:
        """Return for which share of the run this group's ranks were busy."""
        end = self.start + self.seconds
        total = sum(
            max(min(last, end) - max(first, self.start), 0)
            for spans in self.spans[group]
            for first, last in spans
        )
        return total / self.seconds / len(self.spans[group])

    @property
    def seconds(self) -> float:
        return float(self.lines[-1]["seconds"])

    def reached(self, reward: float) -> tuple[float, float] | None:
        """Return after how many steps and seconds the held-out reward was this high for the first time."""
        for (step, seconds, before), (next_step, next_seconds, after) in pairwise(self.curve):
            if before < reward <= after:
                share = (reward - before) / (after - before)
                return step + share * (next_step - step), seconds + share * (next_seconds - seconds)
        return None


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / max(len(listed), 1)


def bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("reward {task.fields[reward]:.3f}"),
        TimeElapsedColumn(),
        console=console,
    )
