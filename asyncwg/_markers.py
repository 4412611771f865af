"""What users put around an argument to say what each rank gets of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shard(Generic[T]):
    """At the call site: split this value by rows, whatever its type says."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value


class Replicate(Generic[T]):
    """At the call site: give this value whole to every rank, though it is a batch."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value


class PerRank(Generic[T]):
    """At the call site: item ``i`` for rank ``i``; the length must be the number of ranks."""

    __slots__ = ("values",)

    def __init__(self, values: Iterable[T]) -> None:
        self.values = list(values)
