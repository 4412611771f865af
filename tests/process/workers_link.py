"""Two groups that are linked."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from asyncwg import Worker, register
from tests.process.workers_life import FOREVER


def state_of(seed: int) -> dict[str, Any]:
    """A state dict with all that is awkward."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(30, 20, generator=generator)
    return {
        "layer.weight": torch.nn.Parameter(matrix),
        "layer.transposed": matrix.T,
        "column": matrix[:, 3],
        "half": matrix.to(torch.bfloat16),
        "flags": matrix > 0,
        "scalar": torch.tensor(seed),
        "nothing": torch.empty(0, 5),
        "step": seed,
        "large": torch.arange(300_000) + seed,
        "config": {"name": "tiny"},
    }


def same(state: Any, seed: int) -> bool:
    expected = state_of(seed)
    return list(state) == list(expected) and all(
        (
            value.dtype == state[name].dtype
            and torch.equal(value.detach(), state[name])
            and not state[name].requires_grad
        )
        if isinstance(value, torch.Tensor)
        else value == state[name]
        for name, value in expected.items()
    )


class Trainer(Worker):
    """Has the state; each rank another one."""

    @register()
    def init(self) -> None:
        self.init_process_group()

    @register()
    def own_sum(self) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return float(tensor)

    @register()
    def linked_sum(self, name: str) -> float:
        tensor = torch.full((1,), float(self.rank + 1))
        dist.all_reduce(tensor, group=self.links[name])
        return float(tensor)

    def state(self) -> dict[str, Any]:
        return state_of(7 + self.rank)

    async def state_async(self) -> dict[str, Any]:
        return self.state()

    def no_state(self) -> int:
        return 3

    def fail(self) -> dict[str, Any]:
        if self.rank == 0:
            raise ValueError("no state today")
        return {}

    def hang(self) -> dict[str, Any]:
        time.sleep(FOREVER)
        return {}


class Rollout(Trainer):
    """Takes the state."""

    def load(self, state: Any) -> bool:
        return same(state, 7)

    async def load_async(self, state: Any) -> bool:
        return same(state, 7)

    def refuse(self, _state: Any) -> None:
        if self.rank == 1:
            raise ValueError("does not fit")

    @register()
    async def ping(self) -> int:
        return self.rank
