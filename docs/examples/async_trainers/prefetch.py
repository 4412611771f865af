"""Prefetch: the next batch is made, split and sent while the ranks train on the one before."""

import asyncio

import torch
import torch.distributed as dist
from torch import Tensor, nn

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup

STEPS, ROWS, WIDTH = 8, 64, 16


class Trainer(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.init_process_group()
        torch.manual_seed(0)  # the same weights on every rank
        self.net = nn.Linear(WIDTH, 1)

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def step(self, batch: dict[str, Tensor]) -> float:
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.net.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in self.net.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= 0.1 * parameter.grad / self.world_size
        return loss.item()


def load(number: int) -> dict[str, Tensor]:
    """Stand for whatever makes a batch: reading, decoding, tokenising."""
    source = torch.Generator().manual_seed(number)
    x = torch.randn(ROWS, WIDTH, generator=source)
    return {"x": x, "y": x.sum(1, keepdim=True)}


async def one_after_the_other(trainer: WorkerGroup) -> list[list[float]]:
    return [await trainer.step(load(number)) for number in range(STEPS)]


async def prefetched(trainer: WorkerGroup) -> list[list[float]]:
    losses = []
    step = trainer.step(load(0))  # under way from here on
    for number in range(1, STEPS):
        batch = await asyncio.to_thread(load, number)  # the ranks train meanwhile
        following = trainer.step(batch)  # waits at the ranks, behind the step that runs
        losses.append(await step)
        step = following
    return [*losses, await step]


async def main() -> None:
    losses = []
    for loop in (one_after_the_other, prefetched):
        async with WorkerGroup(
            ResourcePool([2], use_gpu=False), ClassWithInitArgs(Trainer)
        ) as trainer:
            losses.append(await loop(trainer))
    print(f"{STEPS} steps, the same losses: {losses[0] == losses[1]}")
    print(f"rank 0: {losses[1][0][0]:.2f} at first, {losses[1][-1][0]:.2f} in the end")


asyncwg.run(main())
