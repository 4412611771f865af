"""Fully asynchronous: ranks generate without a pause, and the trainer takes rows that are fresh enough."""

import asyncio

import torch
from torch import Tensor

import asyncwg
from asyncwg import ClassWithInitArgs, ResourcePool, Rows, RowsClosed, Worker, WorkerGroup

STEPS, ROWS, KINDS, STALEST = 60, 64, 8, 2
Row = dict[str, Tensor]


class Rollout(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.version = torch.zeros(KINDS, KINDS), 0
        self.dice = torch.Generator().manual_seed(self.rank)

    @asyncwg.register()
    def generate(self) -> tuple[Row, int]:
        prompt = torch.randint(KINDS, (8,), generator=self.dice)
        answer = torch.multinomial(self.scores[prompt].softmax(1), 1, generator=self.dice)[:, 0]
        reward = (answer == KINDS - 1 - prompt).float()
        return {"prompt": prompt, "answer": answer, "reward": reward}, self.version

    @asyncwg.register()
    def load(self, scores: Tensor, version: int) -> None:
        self.scores, self.version = scores, version


class Trainer(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.scores = torch.zeros(KINDS, KINDS)

    @asyncwg.register()
    def step(self, batch: Row) -> float:
        logits = self.scores.clone().requires_grad_()
        chosen = logits[batch["prompt"]].log_softmax(1).gather(1, batch["answer"][:, None])[:, 0]
        (-chosen * (batch["reward"] - batch["reward"].mean())).sum().backward()
        self.scores -= 0.5 * logits.grad
        return batch["reward"].mean().item()

    @asyncwg.register()
    def weights(self) -> Tensor:
        return self.scores


def collate(rows: list[Row]) -> Row:
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


async def roll(rollout: WorkerGroup, rank: int, rows: Rows[Row]) -> None:
    try:
        while True:
            row, version = await rollout[rank].generate()
            await rows.put(row, version)  # waits while the trainer is far behind
    except RowsClosed:
        pass


async def train(trainer: WorkerGroup, rollout: WorkerGroup, rows: Rows[Row]) -> list[float]:
    rewards = []
    for _ in range(STEPS):
        batch = await rows.take(ROWS // 8, collate=collate)
        rewards.append(await trainer.step(batch))
        rows.advance()  # before the new weights are out: no row may be from the future
        await rollout.load(trainer.weights(), rows.version)
    rows.close()
    return rewards


async def main() -> None:
    rows: Rows[Row] = Rows(maxsize=32, max_staleness=STALEST)
    async with (
        WorkerGroup(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Trainer)) as trainer,
        WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Rollout)) as rollout,
        asyncio.TaskGroup() as tasks,
    ):
        for rank in range(rollout.world_size):
            tasks.create_task(roll(rollout, rank, rows))
        rewards = await train(trainer[0], rollout, rows)
    seen = rows.statistics()
    print(f"{STEPS} steps on {seen.taken} rows")
    print(f"none was more than {STALEST} versions old: {seen.max_staleness <= STALEST}")
    print(f"rows lost: {seen.put - seen.taken - seen.dropped - seen.waiting}")
    print(f"mean reward of the last ten steps is above 0.7: {sum(rewards[-10:]) > 7}")


asyncwg.run(main())
