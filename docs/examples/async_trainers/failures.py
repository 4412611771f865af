"""Failures: a rank is killed, everything that belongs together ends, and training goes on."""

import asyncio
import os
import signal
from typing import Any

import torch
import torch.distributed as dist

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup

STEPS, SAVE_EVERY = 10, 3


class Trainer(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.init_process_group()
        self.weights, self.steps = torch.zeros(4), 0

    @asyncwg.register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def step(self, batch: torch.Tensor) -> int:
        gradient = self.weights - batch.mean(0)
        dist.all_reduce(gradient)
        self.weights -= 0.1 * gradient
        self.steps += 1
        return self.steps

    @asyncwg.register()
    def now(self) -> tuple[int, list[float]]:
        return self.steps, self.weights.tolist()

    def save_state(self) -> Any:
        return self.weights, self.steps

    def load_state(self, state: Any) -> None:
        self.weights, self.steps = state


async def make(batches: asyncio.Queue[torch.Tensor], first: int) -> None:
    for number in range(first, STEPS):
        source = torch.Generator().manual_seed(number)
        await batches.put(torch.randn(8, 4, generator=source))


async def train(
    trainer: WorkerGroup, batches: asyncio.Queue[torch.Tensor], first: int, accident: int | None
) -> None:
    for number in range(first, STEPS):
        if number == accident and first == 0:
            os.kill(trainer.pids[1], signal.SIGKILL)
        await trainer.step(await batches.get())
        if (number + 1) % SAVE_EVERY == 0:
            await trainer.save()  # all ranks' states, or none


async def life(trainer: WorkerGroup, accident: int | None) -> None:
    """Train from the last saved step to the end, or until something dies."""
    first, _weights = await trainer[0].now()
    batches: asyncio.Queue[torch.Tensor] = asyncio.Queue(maxsize=2)
    try:
        async with asyncio.TaskGroup() as tasks:  # if one fails, the other is cancelled
            tasks.create_task(make(batches, first))
            tasks.create_task(train(trainer, batches, first, accident))
    except* (asyncwg.WorkerDiedError, asyncwg.GroupBrokenError) as failed:
        error = failed.exceptions[0]
        died = error.__cause__ or error
        print(f"from step {first}: rank {died.rank} was ended by {died.signal_name}")
    else:
        print(f"from step {first}: to the end")


async def main() -> None:
    weights = []
    for accident in (None, 5):
        async with WorkerGroup(
            ResourcePool([2], use_gpu=False), ClassWithInitArgs(Trainer)
        ) as trainer:
            await trainer.save()
            await life(trainer, accident)
            while not trainer.alive:
                await trainer.restart()  # new processes, __init__, then load_state
                await life(trainer, accident)
            weights.append(await trainer.now())
    print(f"the same weights as without the accident: {weights[0] == weights[1]}")


asyncwg.run(main())
