"""Values made from a few numbers, and whether two are equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

import asyncwg
from asyncwg import DataProto

ROWS: Final = ("tensor", "strided", "array", "shared", "batch", "list")
"""Kinds that can be split over ranks."""
OTHERS: Final = ("none", "number", "text", "bytes", "nested", "inference")


@dataclass(frozen=True, slots=True)
class Value:
    """What is sent: a kind, a size in rows or bytes, and a number that makes it different from others."""

    kind: str
    size: int
    seed: int

    def build(self) -> Any:
        """Make it."""
        size, seed = self.size, self.seed
        match self.kind:
            case "none":
                return None
            case "number":
                return seed
            case "text":
                return str(seed) * (size // 4 + 1)
            case "bytes":
                return bytes([seed % 251]) * size
            case "list":
                return [seed + row for row in range(min(size, 1000))]
            case "array":
                return np.arange(seed, seed + size, dtype=np.int32)
            case "tensor":
                return _rows(size, seed)
            case "inference":
                with torch.inference_mode():
                    return _rows(size, seed)
            case "strided":
                return _rows(2 * size, seed)[::2]
            case "shared":
                return asyncwg.share(_rows(size, seed))
            case "batch":
                return DataProto.from_dict({"x": _rows(size, seed), "y": _rows(size, -seed)})
            case "nested":
                return {"a": _rows(size, seed), "b": [np.full(size, seed), "b"], "c": (seed, None)}
            case _:
                raise ValueError(self.kind)

    @property
    def rows(self) -> int:
        """Into how many rows it can be split."""
        return min(self.size, 1000) if self.kind == "list" else self.size


def _rows(size: int, seed: int) -> torch.Tensor:
    return torch.arange(seed, seed + size, dtype=torch.int32)


def _columns(value: DataProto) -> dict[str, torch.Tensor]:
    batch: Any = value.batch
    return {str(name): batch[name] for name in batch.keys()}  # noqa: SIM118  # no dict


def item_of(rank: int, number: int, size: int) -> torch.Tensor:
    """Return what a rank's generator gives as its item ``number``."""
    return torch.full((size,), 100 * rank + number, dtype=torch.int64)


def scaled(value: Any, factor: int) -> Any:
    """Multiply rows of any kind; the worker does the same to its shard."""
    if isinstance(value, list):
        return [row * factor for row in value]
    if isinstance(value, DataProto):
        return DataProto.from_dict({name: rows * factor for name, rows in _columns(value).items()})
    return value * factor


def total(value: Any) -> int:
    """Add up all numbers of a value."""
    if isinstance(value, list | tuple):
        return sum(total(each) for each in value)
    if isinstance(value, dict):
        return sum(total(each) for each in value.values())
    if isinstance(value, DataProto):
        return sum(total(each) for each in _columns(value).values())
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.sum())
    if isinstance(value, bytes | str):
        return len(value)
    return value or 0


def spoil(value: Any) -> bool:
    """Write to a value in place; whether that was possible."""
    if isinstance(value, torch.Tensor | np.ndarray) and len(value):
        if isinstance(value, torch.Tensor) and value.is_inference():
            return False
        value += 1
        return True
    if isinstance(value, list):
        value.append(-1)
        return True
    if isinstance(value, dict):
        return [spoil(each) for each in value.values()] != []
    if isinstance(value, DataProto):
        return [spoil(each) for each in _columns(value).values()] != []
    return False


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, types and all."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, DataProto):
        return equal(_columns(one), _columns(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
