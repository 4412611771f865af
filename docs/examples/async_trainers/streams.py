"""A stream: answers are scored as they are finished, and generation ends when there are enough."""

import asyncio
from collections.abc import Iterator

import torch
from torch import Tensor

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup

PROMPTS, WANTED, LENGTH, WINDOW = 1000, 12, 16, 2


class Rollout(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.dice = torch.Generator().manual_seed(self.rank)
        self.made = 0

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: Tensor) -> Iterator[Tensor]:
        for prompt in prompts:
            self.made += 1
            yield prompt + torch.randn(LENGTH, generator=self.dice).cumsum(0)

    @asyncwg.register()
    def count(self) -> int:
        return self.made


class Reward(Worker):
    @asyncwg.register()
    def score(self, answer: Tensor) -> float:
        return answer.diff().abs().mean().item()


async def main() -> None:
    async with (
        WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Rollout)) as rollout,
        WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Reward)) as reward,
    ):
        scores, read = [], [0, 0]
        async for rank, answer in rollout.generate(torch.arange(PROMPTS)):
            read[rank] += 1
            scores.append(reward.any.score(answer))  # a call: it is scored while others are made
            if len(scores) == WANTED:
                break  # closes the generators on both ranks, at the same item
        values = await asyncio.gather(*scores)
        made = await rollout.count()  # served when the generators have ended
    ahead = max(made) - max(read)
    print(f"{len(values)} answers of {PROMPTS} were wanted and have a score")
    print(f"both ranks stopped at the same item: {made[0] == made[1]}")
    print(f"never more than {WINDOW} items ahead of the reader: {ahead <= WINDOW}")


asyncwg.run(main())
