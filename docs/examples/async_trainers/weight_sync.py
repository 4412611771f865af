"""Two groups as one: a collective over both, and weights that go from rank to rank."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import asyncwg
from asyncwg import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup

WIDTH, LINK = 64, "weights"


class Policy(Worker):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    @asyncwg.register()
    def largest_difference(self) -> float:
        """Enter with all ranks of both groups: how far apart are the weights of any two of them?"""
        flat = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        most, least = flat.clone(), flat.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.links[LINK])
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.links[LINK])
        return (most - least).max().item()

    def state_dict(self) -> dict[str, Tensor]:  # need not be registered
        return self.net.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.net.load_state_dict(state)


async def main() -> None:
    pools = [ResourcePool([2], use_gpu=False) for _ in range(2)]
    async with (
        WorkerGroup(pools[0], ClassWithInitArgs(Policy, seed=1), name="trainer") as trainer,
        WorkerGroup(pools[1], ClassWithInitArgs(Policy, seed=2), name="rollout") as rollout,
        asyncwg.link(trainer, rollout, name=LINK) as link,
    ):
        before = await link.both.largest_difference()
        await link.broadcast_state("state_dict", "load_state_dict")
        after = await link.both.largest_difference()
        print(f"ranks in the collective: {link.both.world_size}")
        print(f"the weights differ before: {max(before) > 0}, and after: {max(after) > 0}")


asyncwg.run(main())
