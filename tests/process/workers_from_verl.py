"""Workers for the tests of what comes from verl."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import torch
from tensordict import NonTensorData, TensorDict

import asyncwg
from asyncwg import (
    DataProto,
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from asyncwg.decorator import get_predefined_dispatch_fn


class Splitting(Worker):
    """One method for each mode that splits; all say the same of the rows that they get."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("dp", self.rank, True)

    def seen(self, rows: Any) -> dict[str, Any]:
        """Double the rows, and count and add up those that are no padding."""
        x = rows
        if isinstance(rows, DataProto):
            assert rows.batch is not None
            x = rows.batch["x"]
        doubled = DataProto.from_dict({"x": x * 2}) if x is not rows else x * 2
        real = asyncwg.current_call().rows
        return {"doubled": doubled, "rows": len(x), "real": real, "sum": float(x[:real].sum())}

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def proto(self, rows: Any) -> Any:
        return self.seen(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, rows: Any) -> Any:
        return self.seen(rows)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("dp"))
    def mesh(self, rows: Any) -> Any:
        return self.seen(rows)

    @register(dispatch_mode=get_predefined_dispatch_fn(Dispatch.DP_COMPUTE_PROTO))
    def pair(self, rows: Any) -> Any:
        return self.seen(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, rows: Any) -> Any:
        return self.seen(rows)["doubled"]


class Place(Worker):
    """Says where it is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, ...]:
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self, names: Sequence[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]


INNER: Final = {
    "actor": [(0, True), (0, False), (1, True)],
    "rollout": [(1, True), (0, True), (0, False)],
}
"""By mesh and rank: the dp rank and whether it collects."""


class Inner(Worker):
    """A worker inside another, with two meshes."""

    def __init__(self) -> None:
        super().__init__()
        for mesh, places in INNER.items():
            self._register_dispatch_collect_info(mesh, *places[self.rank])


class Outer(Worker):
    """Offers its inner worker's meshes, one of them under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        known = Inner().get_dispatch_collect()
        self.set_dispatch_collect("actor", **known)
        self.set_dispatch_collect("play", **known, source="rollout")

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def train(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows, torch.full_like(rows, self.rank)], dim=1)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("play"))
    def play(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows, torch.full_like(rows, self.rank)], dim=1)


class Facts(Worker):
    """Returns rows with facts about them."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def data_proto(self, rows: torch.Tensor, meta: dict[str, Any]) -> DataProto:
        return DataProto.from_dict({"x": rows}, meta_info=meta)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def own_time(self, rows: torch.Tensor) -> DataProto:
        return DataProto.from_dict({"x": rows}, meta_info={"time": float(self.rank)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tensordict(self, rows: torch.Tensor, temperatures: Sequence[Any]) -> TensorDict:
        temperature = NonTensorData(temperatures[self.rank], batch_size=[len(rows)])
        return TensorDict({"x": rows, "temperature": temperature}, batch_size=[len(rows)])


def give_whole(wg: Any, rows: Any) -> Any:
    return ([rows] * wg.world_size,), {}


def pick_last(_group: Any, outputs: list[Any]) -> Any:
    return outputs[-1]


class Collected(Worker):
    """A mode of the user's own, whose result goes on to another group."""

    @register(dispatch_mode={"dispatch_fn": give_whole, "collect_fn": pick_last})
    def add_rank(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 10 * self.rank


class _Role(Worker):
    """A role of the control loop that the page for verl's users shows; it learns one number."""

    def __init__(self) -> None:
        super().__init__()
        self.level = torch.zeros(1)

    def _towards(self, target: torch.Tensor, name: str) -> DataProto:
        self.level += 0.5 * (target.mean() - self.level)
        return DataProto(meta_info={"metrics": {name: float(self.level)}})


class Actor(_Role):
    """Answers with its number."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"response": self.level.repeat(len(batch))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_actor(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return self._towards(batch.batch["advantage"], "actor")


class Critic(_Role):
    """Values everything alike."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"value": self.level.repeat(len(batch))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def update_critic(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return self._towards(batch.batch["prompt"], "critic")


class Reference(_Role):
    """Stays as it was."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        assert batch.batch is not None
        return DataProto.from_dict({"ref_log_prob": -batch.batch["response"]})
