"""The GRPO example runs in all its modes, and trains on two ranks as it does on one."""

from __future__ import annotations

import asyncio
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asyncwg import ClassWithInitArgs, ResourcePool, WorkerGroup
from tests.leaks import bounded
from tests.process.test_examples import run

grpo: Any = importlib.import_module("grpo.run")
policy: Any = importlib.import_module("grpo.policy")
questions: Any = importlib.import_module("grpo.questions")
sampler: Any = importlib.import_module("grpo.sampler")
settings: Any = importlib.import_module("grpo.settings")
text: Any = importlib.import_module("grpo.text")
workers: Any = importlib.import_module("grpo.workers")

MODES = ("synchronous", "one-step-off", "asynchronous")
STEPS = 6
PROGRAM = """
import sys
sys.path.insert(0, "docs/examples")
sys.argv[0] = "grpo"
from grpo.__main__ import app
app()
"""


def test_all_modes_train_and_leave_a_log_and_a_picture(tmp_path: Path) -> None:
    small = ["--steps", str(STEPS), "--lessons", "3", "--width", "32", "--held-out", "16"]
    said = run(
        ["-", "compare", *small, "--out", str(tmp_path)],
        code=PROGRAM,
        seconds=170.0,
    )
    assert "dropped as too stale" in said
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")
    stalest = {}
    for mode in MODES:
        text = (tmp_path / f"grpo-{mode}.jsonl").read_text()
        read = [json.loads(line) for line in text.splitlines()]
        lines = [line for line in read if "reward" in line]
        assert [line["step"] for line in read if "held_out_reward" in line] == [0]
        assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
        assert all(line["mode"] == mode and line["seconds"] > 0 for line in lines)
        stalest[mode] = max(line["most_stale"] for line in lines)
    assert stalest["synchronous"] == 0
    assert stalest["one-step-off"] == 1
    assert 1 <= stalest["asynchronous"] <= settings.SMALL.most_stale


async def test_two_ranks_learn_what_one_does() -> None:
    """Rows of unlike lengths, split over ranks whose gradients are added up."""
    small = replace(settings.SMALL, width=32, longest=8)
    supply = questions.Questions(small, text.Digits())
    model = policy.build(small, torch.device("cpu"))
    made = sampler.Sampler(
        model, end=supply.text.end, padding=supply.text.padding, longest=8, slots=64, seed=0
    )
    groups = [
        sampler.Group(number, supply.prompt(number), [sampler.Answer(), sampler.Answer()])
        for number in range(5)
    ]
    for group in groups:
        made.add(group)
    while len(made):
        made.step()
    batch, tokens = grpo.batch_of(groups, [[1.0, 0.0]] * 5, supply.text.padding)

    async def learned(ranks: int) -> dict[str, torch.Tensor]:
        pool = ResourcePool([ranks], use_gpu=False)
        async with WorkerGroup(pool, ClassWithInitArgs(workers.Trainer, small)) as trainer:
            await bounded(trainer.learn(batch, tokens=tokens), 60)
            found: dict[str, torch.Tensor] = await bounded(trainer.weights(), 60)
            return found

    one, two = await asyncio.gather(learned(1), learned(2))
    before = dict(model.named_parameters())
    assert one.keys() == two.keys() == {"version", *before}
    for name in before:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-5)
    assert any(not torch.equal(one[name], before[name]) for name in before)
