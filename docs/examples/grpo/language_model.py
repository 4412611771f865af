"""The language model: how many held-out questions it answers right before and after RL."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .modes import MODES
from .picture import draw
from .record import Record, bars, mean
from .run import Cores, Run, start
from .sampler import Group
from .settings import Settings

SHOWN = 10  # questions that are shown with their answers
console = Console()


async def improve(settings: Settings, mode: str, cores: Cores, out: Path) -> Record:
    """Train in ``mode``, show what changed, and leave a log and the picture in the folder ``out``."""
    began = time.monotonic()
    os.environ.setdefault("TQDM_DISABLE", "1")  # bars of the workers would cross the one here
    log = out / "grpo-language-model.jsonl"
    with bars(console) as progress, Record(mode, log, progress, settings.steps) as record:
        async with start(settings, record, None, cores) as run:
            console.print(f"loaded in {time.monotonic() - began:.0f} s")
            before = await run.evaluate()
            first = mean(map(run.right, before))
            console.print(f"before: {first:.1%} of {len(before)} held-out questions right")
            await MODES[mode](run)
            await run.publish()
            after = await run.evaluate()
            record.accuracy = first, mean(map(run.right, after))
            for step, seconds, accuracy in zip(
                (0, settings.steps), (0.0, record.seconds), record.accuracy, strict=True
            ):
                record.judged(step, seconds, accuracy)
    console.print(examples(run, before, after))
    console.print(summary(run, before, after))
    console.print(f"{time.monotonic() - began:.0f} s in all")
    draw([record], None, out / "grpo-language-model.png")
    console.print(f"log and picture: {out}")
    return record


def examples(run: Run, before: Sequence[Group], after: Sequence[Group]) -> Table:
    """Return a table of some questions and both answers to each."""
    table = Table("question", "before", "after", title="Held-out questions")
    for old, new in list(zip(before, after, strict=True))[:SHOWN]:
        question = run.questions.entry(old.number)["question"]
        table.add_row(Text(question), said(run, old), said(run, new))
    return table


def said(run: Run, group: Group) -> Text:
    """Return the answer as it was written, green if it is right."""
    written = run.questions.text.text(group.answers[0].tokens)
    return Text(written.strip(), "green" if run.right(group) else "red")


def summary(run: Run, before: Sequence[Group], after: Sequence[Group]) -> Table:
    """Return a table that tells what is arithmetic from what is form."""
    text, longest = run.questions.text, run.settings.longest

    def row(name: str, groups: Sequence[Group]) -> None:
        answers = [group.answers[0].tokens for group in groups]
        right = mean(map(run.right, groups))
        answered = mean(text.answer(text.text(answer)) != "" for answer in answers)
        whole = mean(answer[-1] == text.end for answer in answers)
        length = mean(map(len, answers))
        table.add_row(
            name, f"{right:.1%}", f"{answered:.1%}", f"{whole:.1%}", f"{length:.1f}/{longest}"
        )

    table = Table("", "right", "with an answer", "brought to an end", "tokens")
    row("before", before)
    row("after", after)
    return table
