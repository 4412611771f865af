"""A pipeline over groups: calls are handed on before they are awaited, and rows don't pass the controller."""

import asyncio

import torch
import torch.distributed as dist
from torch import Tensor, nn

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup

PARTS, ROWS, WIDTH = 6, 8, 4


class Rollout(Worker):
    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: Tensor) -> Tensor:
        return torch.stack([prompts * power for power in range(1, WIDTH + 1)], dim=1).float()


class Reward(Worker):
    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, answers: Tensor) -> Tensor:
        return answers.mean(1, keepdim=True)


class Trainer(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.init_process_group()
        torch.manual_seed(0)
        self.net = nn.Linear(WIDTH, 1)

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def accumulate(self, answers: Tensor, rewards: Tensor) -> None:
        nn.functional.mse_loss(self.net(answers), rewards, reduction="sum").backward()

    @asyncwg.register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gradient(self) -> float:
        flat = nn.utils.parameters_to_vector([p.grad for p in self.net.parameters()])
        dist.all_reduce(flat)
        self.net.zero_grad()
        return flat.norm().item()


def prompts(part: int) -> Tensor:
    return torch.arange(part * ROWS, (part + 1) * ROWS)


async def in_turn(rollout: WorkerGroup, reward: WorkerGroup, trainer: WorkerGroup) -> list[float]:
    for part in range(PARTS):
        answers = await rollout.generate(prompts(part))
        await trainer.accumulate(answers, await reward.score(answers))
    return await trainer.gradient()


async def pipelined(rollout: WorkerGroup, reward: WorkerGroup, trainer: WorkerGroup) -> list[float]:
    parts = []
    for part in range(PARTS):
        await rollout.ready()  # not more than the ranks can take
        answers = rollout.generate(prompts(part))
        parts.append(trainer.accumulate(answers, reward.score(answers)))
    gradient = trainer.gradient()  # its place is behind all parts
    await asyncio.gather(*parts)
    return await gradient


async def main() -> None:
    async with (
        WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Rollout)) as rollout,
        WorkerGroup(ResourcePool([1], use_gpu=False), ClassWithInitArgs(Reward)) as reward,
        WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Trainer)) as trainer,
    ):
        first = await in_turn(rollout, reward, trainer)
        second = await pipelined(rollout, reward, trainer)
    print(f"the same gradient on every rank, one after the other and pipelined: {first == second}")


asyncwg.run(main())
