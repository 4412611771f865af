"""Workers of two groups that are called as one."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from asyncwg import Dispatch, Execute, Worker, make_nd_compute_dataproto_dispatch_fn, register
from tests.process.workers_life import FOREVER, Fifo


class Member(Worker):
    """One side."""

    def __init__(self, side: str) -> None:
        super().__init__()
        self.side = side
        self.log: list[Any] = []

    @register()
    def who(self, value: Any = None) -> tuple[str, int, Any]:
        self.log.append(value)
        return self.side, self.rank, value

    @register()
    def notes(self) -> list[Any]:
        return self.log

    @register()
    def hold(self, started: Fifo, release: Fifo, value: Any = None) -> Any:
        self.log.append(value)
        started.put()
        release.take()
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def doubled(self, rows: torch.Tensor) -> torch.Tensor:
        self.log.append(len(rows))
        return 2 * rows

    @register()
    def total(self, values: torch.Tensor) -> float:
        return float(values.sum())

    @register()
    def sum_of_all(self, url: str, rank: int, size: int) -> float:
        """Enter a collective of both groups."""
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size)
        try:
            tensor = torch.full((1,), float(rank))
            dist.all_reduce(tensor)
            return float(tensor)
        finally:
            dist.destroy_process_group()

    @register()
    def fail_on(self, side: str) -> str:
        if side == self.side:
            raise ValueError(f"{side} has failed")
        return self.side

    @register()
    def fail_and_leave_the_other_waiting(self, side: str, started: Fifo) -> None:
        """One side raises when the other waits for what will not come."""
        if side == self.side:
            started.take()
            raise ValueError(f"{side} has failed")
        started.put()
        time.sleep(FOREVER)

    @register(execute_mode=Execute.RANK_ZERO)
    def alone(self) -> str:
        return self.side

    @register(make_nd_compute_dataproto_dispatch_fn("dp"))
    def over_a_mesh(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


class Other(Member):
    """Registered otherwise."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def who(self, value: Any = None) -> tuple[str, int, Any]:
        return self.side, self.rank, value
