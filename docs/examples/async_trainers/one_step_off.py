"""One step off: the next batch is generated while the trainer works on the one before."""

from typing import Any

import torch
from torch import Tensor

import asyncwg
from asyncwg import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

STEPS, ROWS, KINDS = 40, 64, 8  # prompts are 0 to 7, and so are answers


class Policy(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.zeros(KINDS, KINDS)  # of each answer to each prompt
        self.version = 0
        self.dice = torch.Generator().manual_seed(self.rank)


class Rollout(Policy):
    @asyncwg.register()
    def generate(self) -> dict[str, Any]:
        prompt = torch.randint(KINDS, (ROWS,), generator=self.dice)
        answer = torch.multinomial(self.scores[prompt].softmax(1), 1, generator=self.dice)[:, 0]
        reward = (answer == KINDS - 1 - prompt).float()
        return {"prompt": prompt, "answer": answer, "reward": reward, "version": self.version}

    @asyncwg.register()
    def load(self, weights: tuple[Tensor, int]) -> None:
        self.scores, self.version = weights


class Trainer(Policy):
    @asyncwg.register()
    def step(self, batch: dict[str, Any]) -> dict[str, float]:
        logits = self.scores.clone().requires_grad_()
        chosen = logits[batch["prompt"]].log_softmax(1).gather(1, batch["answer"][:, None])[:, 0]
        (-chosen * (batch["reward"] - batch["reward"].mean())).sum().backward()
        self.scores -= 0.5 * logits.grad
        self.version += 1
        off = self.version - 1 - batch["version"]
        return {"staleness": off, "reward": batch["reward"].mean().item()}

    @asyncwg.register()
    def weights(self) -> tuple[Tensor, int]:
        return self.scores, self.version


async def synchronous(trainer: WorkerGroup, rollout: WorkerGroup) -> list[dict[str, float]]:
    steps = []
    for _ in range(STEPS):
        batch = await rollout.generate()  # the trainer waits
        steps.append(await trainer.step(batch))  # the rollout waits
        await rollout.load(await trainer.weights())  # both wait
    return steps


async def one_step_off(trainer: WorkerGroup, rollout: WorkerGroup) -> list[dict[str, float]]:
    steps = []
    batch = rollout.generate()
    for _ in range(STEPS):
        ahead = rollout.generate()  # on its way before the trainer begins
        step = trainer.step(batch)  # takes the rows when they are there
        loaded = rollout.load(trainer.weights())  # keeps its place, behind `ahead`
        steps.append(await step)
        await loaded
        batch = ahead
    await batch
    return steps


async def main() -> None:
    for loop in (synchronous, one_step_off):
        async with (
            WorkerGroup(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Trainer)) as trainer,
            WorkerGroup(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Rollout)) as rollout,
        ):
            steps = await loop(trainer[0], rollout[0])
        stale = [step["staleness"] for step in steps]
        rewards = [step["reward"] for step in steps]
        print(f"{loop.__name__}: staleness {stale[:4]} ... {stale[-1]}")
        print(f"  reward {rewards[0]:.2f} at first, {sum(rewards[-10:]) / 10:.2f} in the end")


asyncwg.run(main())
