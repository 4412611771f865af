"""A worker for the tests of answers that are written beside the next call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from asyncwg import Dispatch, Worker, register
from tests.process.workers_life import Fifo

ELEMENTS: Final = 1 << 17
"""Of float32: more bytes than are copied aside."""


def _full(number: int) -> torch.Tensor:
    return torch.full((ELEMENTS,), float(number))


def _spoil_storage(storage: Any) -> None:
    torch.empty(0).set_(storage).fill_(-1)


def _spoil(value: Any) -> None:
    value[:] = -1


class _Both:
    """A value, and a way for the worker to write to it later, if there is one."""

    def __init__(self, value: Any, spoil: Callable[[], None] | None = None) -> None:
        self.value = value
        self.spoil = spoil


def _tensor(number: int, keep: Callable[[Any], Any], spoil: Callable[[Any], None]) -> _Both:
    value = _full(number)
    kept = keep(value)
    return _Both(value, lambda: spoil(kept))


def _array(number: int, keep: Callable[[Any], Any], spoil: Callable[[Any], None]) -> _Both:
    value = _full(number).numpy().copy()
    kept = keep(value)
    return _Both(value, lambda: spoil(kept))


def _lent(number: int) -> _Both:
    array = _full(number).numpy().copy()
    return _Both(torch.from_numpy(array), lambda: _spoil(array))


WAYS: Final[dict[str, Callable[[int], _Both]]] = {
    "nobody has the tensor": lambda number: _Both(_full(number)),
    "nobody has the array": lambda number: _Both(_full(number).numpy().copy()),
    "nobody has the dict": lambda number: _Both({"a": _full(number), "b": [_full(number)]}),
    "the tensor is kept": lambda number: _tensor(number, lambda value: value, _spoil),
    "a view is kept": lambda number: _tensor(number, lambda value: value.view(2, -1), _spoil),
    "its data is kept": lambda number: _tensor(number, lambda value: value.data, _spoil),
    "its storage is kept": lambda number: _tensor(
        number, lambda value: value.untyped_storage(), _spoil_storage
    ),
    "an array of it is kept": lambda number: _tensor(number, lambda value: value.numpy(), _spoil),
    "what lent its memory is kept": _lent,
    "the array is kept": lambda number: _array(number, lambda value: value, _spoil),
    "a slice of the array is kept": lambda number: _array(number, lambda value: value[:], _spoil),
    "a tensor over the array is kept": lambda number: _array(number, torch.from_numpy, _spoil),
}
"""Ways to return a value: who can write to it afterwards."""


class Beside(Worker):
    """Returns large values, and writes to what it has kept of them in its next call."""

    def __init__(self, closed: Fifo | None = None) -> None:
        super().__init__()
        self._closed = closed
        self._spoil: Callable[[], None] | None = None

    @register()
    def hold(self, started: Fifo, release: Fifo) -> None:
        started.put()
        release.take()

    @register()
    def give(self, way: str, number: int) -> Any:
        both = WAYS[way](number)
        self._spoil = both.spoil
        return both.value

    @register()
    def spoil(self) -> None:
        """Write to what the last `give` has kept."""
        if self._spoil is not None:
            self._spoil()

    @register()
    def fresh(self, number: int) -> torch.Tensor:
        return _full(number)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Give a large row for each number."""
        return numbers[:, None].expand(-1, ELEMENTS).clone()

    @register()
    def number(self) -> int:
        return 7

    @register()
    def fail(self) -> None:
        raise ValueError("it was meant to")

    @register()
    async def ping(self) -> None:
        """Answer, whatever the main thread does."""

    def close(self) -> None:
        if self._closed is not None:
            self._closed.put()
