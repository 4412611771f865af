"""Values that a method is given as handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch  # noqa: TC002 - cloudpickle resolves annotations

from asyncwg import DataProto, Dispatch, Worker, register

reads: list[str] = []
"""Values that this process has decoded."""


def _decode(name: str) -> Noted:
    reads.append(name)
    return Noted(name)


class Noted:
    """Takes note of being decoded."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Callable[[str], Noted], tuple[str]]:
        return _decode, (self.name,)


class Giver(Worker):
    """Makes values."""

    @register()
    def noted(self) -> Noted:
        return Noted(f"of rank {self.rank}")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def proto(self, rows: torch.Tensor) -> DataProto:
        return DataProto.from_dict({"x": rows})

    @register()
    def fail(self) -> None:
        raise ValueError("no value")


class Taker(Worker):
    """Gets handles."""

    @register(materialize_futures=False)
    def kind_and_reads(self, value: Any) -> tuple[str, list[str]]:
        return type(value).__name__, list(reads)

    @register(materialize_futures=False)
    def read(self, value: Any) -> tuple[list[str], list[str]]:
        values = value.get()
        assert value.get(timeout=1) is values is value.result()
        assert value.done()
        return [each.name for each in values], list(reads)

    @register(materialize_futures=False)
    async def read_async(self, value: Any) -> list[str]:
        return [each.name for each in await value]

    @register(materialize_futures=False)
    def read_inside(self, values: dict[str, Any], plain: int) -> tuple[list[str], int]:
        return [each.name for each in values["here"].get()], plain

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, materialize_futures=False)
    def shard(self, value: Any, *, factor: int = 1) -> list[float]:
        rows = value.get()
        if isinstance(rows, DataProto):
            assert rows.batch is not None
            rows = rows.batch["x"]
        return [factor * rows[0].item(), factor * rows[-1].item(), len(rows)]

    @register(materialize_futures=False)
    def hand_on(self, value: Any) -> Any:
        return value

    @register(materialize_futures=True)
    def materialized(self, value: Any) -> str:
        return type(value).__name__
