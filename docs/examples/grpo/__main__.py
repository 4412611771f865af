"""``python -m grpo compare`` and ``python -m grpo language-model``."""

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

import asyncwg

from .compare import compare
from .language_model import improve
from .run import Cores
from .settings import LANGUAGE_MODEL, SMALL

OUT = Path(__file__).parents[1] / "out"
LEAST_RISE = 0.2  # of the reward on held-out questions, in a run of full length
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


Ranks = Annotated[int | None, typer.Option(min=1, help="Default: one for each GPU or core.")]
HeldOut = Annotated[int, typer.Option(min=1, help="Questions for the evaluation.")]
Out = Annotated[Path, typer.Option(help="Folder for logs and picture.")]


class Mode(StrEnum):
    SYNCHRONOUS = "synchronous"
    ONE_STEP_OFF = "one-step-off"
    ASYNCHRONOUS = "asynchronous"


class Placement(StrEnum):
    SEPARATE = "separate"
    SHARED = "shared"


@app.command("compare")
def compare_modes(
    mode: Annotated[
        list[Mode] | None, typer.Option(help="May be given several times; default: all.")
    ] = None,
    placement: Annotated[
        Placement, typer.Option(help="Half of the cores for each group, or all of them for both.")
    ] = Placement.SEPARATE,
    trainers: Ranks = None,
    rollouts: Ranks = None,
    steps: Annotated[int, typer.Option(min=1)] = SMALL.steps,
    lessons: Annotated[int, typer.Option(min=1, help="Steps of imitation.")] = SMALL.lessons,
    width: int = SMALL.width,
    layers: int = SMALL.layers,
    lr: float = SMALL.lr,
    target: Annotated[
        float, typer.Option(help="The reward whose time is compared.")
    ] = SMALL.target,
    held_out: HeldOut = SMALL.held_out,
    seed: int = SMALL.seed,
    out: Out = OUT,
) -> None:
    """Train a small transformer in each mode, and compare their times to the same reward."""
    cores, per_group = placed(placement)
    settings = replace(
        SMALL,
        trainers=trainers or per_group,
        rollouts=rollouts or per_group,
        steps=steps,
        lessons=lessons,
        width=width,
        layers=layers,
        lr=lr,
        target=target,
        held_out=held_out,
        seed=seed,
    )
    out.mkdir(parents=True, exist_ok=True)
    records = asyncwg.run(compare(settings, mode or list(Mode), cores, out))
    if steps >= SMALL.steps and lessons >= SMALL.lessons:
        for record in records:
            first, *_, last = [reward for *_, reward in record.curve]
            if last - first < LEAST_RISE:
                raise SystemExit(f"{record.mode}: the reward has risen from {first} to {last} only")


@app.command("language-model")
def train_language_model(
    mode: Mode = Mode.ASYNCHRONOUS,
    path: Annotated[
        str, typer.Option(help="A folder, a GGUF file, or a package that has one.")
    ] = str(LANGUAGE_MODEL.path),
    dataset: Annotated[str, typer.Option(help="Of reasoning-gym.")] = LANGUAGE_MODEL.dataset,
    trainers: Ranks = None,
    rollouts: Ranks = None,
    steps: Annotated[int, typer.Option(min=1)] = LANGUAGE_MODEL.steps,
    lr: float = LANGUAGE_MODEL.lr,
    held_out: HeldOut = LANGUAGE_MODEL.held_out,
    seed: int = LANGUAGE_MODEL.seed,
    out: Out = OUT,
) -> None:
    """Train a language model, and show what it answered before and after."""
    cores, per_group = placed(Placement.SEPARATE)
    own = dataset == LANGUAGE_MODEL.dataset
    settings = replace(
        LANGUAGE_MODEL,
        path=path,
        dataset=dataset,
        options=LANGUAGE_MODEL.options if own else {},
        trainers=trainers or per_group,
        rollouts=rollouts or per_group,
        steps=steps,
        lr=lr,
        held_out=held_out,
        seed=seed,
    )
    out.mkdir(parents=True, exist_ok=True)
    asyncwg.run(improve(settings, mode, cores, out))


def placed(placement: Placement) -> tuple[Cores, int]:
    """Return each group's cores, and how many ranks a group has by default."""
    gpus = torch.cuda.device_count()
    if gpus >= 2:  # a rank computes on its GPU, and the cores are nobody's
        return Cores(), gpus // 2
    cores = sorted(os.sched_getaffinity(0))
    if placement is Placement.SHARED or len(cores) == 1:
        return Cores(cores, cores), len(cores)
    half = len(cores) // 2
    return Cores(cores[:half], cores[half:]), half


if __name__ == "__main__":
    app()
