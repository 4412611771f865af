"""Whether anybody else can write to the memory of a result that its method has let go."""

from __future__ import annotations

import sys
import tempfile
import weakref
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
import torch

from asyncwg._wire import codec
from asyncwg._wire.sole import ASIDE, sole

BIG = 1 << 17
"""Elements: more bytes than are copied aside, whatever they are."""


class Keeper:
    """A worker that keeps what it returns, in some way."""

    def __init__(self) -> None:
        self.kept: list[Any] = []


class Special(torch.Tensor):
    pass


def tensor() -> torch.Tensor:
    return torch.ones(BIG)


def array() -> Any:
    return np.ones(BIG)


def read_only(value: Any) -> Any:
    value.flags.writeable = False
    return value


def shared(value: Any) -> Any:
    return value.share_memory_()


def exported(value: Any) -> Any:
    return value.__dlpack__()


def imported(value: Any) -> Any:
    module: Any = torch
    return module.from_dlpack(value)


def returned(make: Callable[[], Any], keep: Callable[[Any], Any] | None = None) -> bool:
    """Return whether what ``make`` gives is found sole, where ``keep`` of it lives on."""
    value = make()
    kept = None if keep is None else keep(value)
    sources = codec.encode(value).buffers
    del value
    found = sole(sources)
    del kept
    return found is not None


SOLE: dict[str, Callable[[], Any]] = {
    "a tensor": tensor,
    "a bfloat16 tensor": lambda: torch.ones(BIG * 2, dtype=torch.bfloat16),
    "several in a dict": lambda: {"a": tensor(), "b": [tensor(), array()]},
    "views of one tensor": lambda: list(torch.ones(2, BIG)),
    "a slice": lambda: torch.ones(2 * BIG)[BIG:],
    "one tensor twice": lambda: [tensor()] * 2,
    "a tensor with a graph": lambda: torch.ones(BIG, requires_grad=True).exp(),
    "a parameter": lambda: torch.nn.Parameter(tensor()),
    "a subclass": lambda: tensor().as_subclass(Special),
    "a tensor reshaped in place": lambda: tensor().resize_(2, BIG // 2),
    "a tensor of inference mode": lambda: torch.inference_mode()(tensor)(),
    "an array": array,
    "a reshaped array": lambda: array().reshape(2, -1),
    "the halves of an array": lambda: np.split(np.ones(2 * BIG), 2),
    "a read-only array": lambda: read_only(array()),
    "bytes": lambda: bytes(BIG * 4),
}


@pytest.mark.parametrize("make", SOLE.values(), ids=SOLE)
def test_what_nobody_else_has_is_found_sole(make: Callable[[], Any]) -> None:
    assert returned(make)


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the tensor": (tensor, lambda value: value),
    "a slice": (tensor, lambda value: value[1:2]),
    "a transposed view": (lambda: torch.ones(2, BIG), lambda value: value.T),
    "the whole of a slice": (lambda: torch.ones(2, BIG)[0], lambda value: value._base),
    "its data": (tensor, lambda value: value.data),
    "a detached alias": (tensor, lambda value: value.detach()),
    "its storage": (tensor, lambda value: value.untyped_storage()),
    "an array of it": (tensor, lambda value: value.numpy()),
    "a memoryview of it": (tensor, lambda value: memoryview(value.numpy())),
    "an exported capsule": (tensor, exported),
    "what autograd saved of it": (
        lambda: torch.ones(BIG, requires_grad=True).exp(),
        lambda value: value.grad_fn,
    ),
    "a graph in which it was an input": (
        lambda: torch.ones(BIG, requires_grad=True),
        lambda value: value * value,
    ),
    "one of two views": (lambda: list(torch.ones(2, BIG)), lambda value: value[1]),
    "what two views are of": (lambda: list(torch.ones(2, BIG)), lambda value: value[1]._base),
    "a list": (lambda: [tensor()], lambda value: value),
    "one of several": (lambda: [tensor(), tensor()], lambda value: value[1]),
    "the tensor of a subclass": (lambda: tensor().as_subclass(Special), lambda value: value),
    "a parameter of a module": (lambda: torch.nn.Parameter(tensor()), lambda value: value),
    "the array": (array, lambda value: value),
    "a slice of the array": (array, lambda value: value[1:2]),
    "the owner of a view": (lambda: array().reshape(2, -1), lambda value: value.base),
    "the view itself": (lambda: array().reshape(2, -1), lambda value: value),
    "one half": (lambda: np.split(np.ones(2 * BIG), 2), lambda value: value[0]),
    "a tensor over the array": (array, torch.from_numpy),
    "a memoryview of the array": (array, memoryview),
    "a ctypes view of the array": (array, lambda value: np.ctypeslib.as_ctypes(value)),
    "a weak reference to the array": (array, weakref.ref),
    "a weak reference to its owner": (
        lambda: array().reshape(2, -1),
        lambda value: weakref.ref(value.base),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "keep"), KEPT.values(), ids=KEPT)
def test_what_somebody_else_has_is_not_found_sole(
    make: Callable[[], Any], keep: Callable[[Any], Any]
) -> None:
    assert not returned(make, keep)


LENT: dict[str, Callable[[], Any]] = {
    "numpy": lambda: torch.from_numpy(array()),
    "a buffer": lambda: torch.frombuffer(bytearray(4 * BIG), dtype=torch.float32),
    "dlpack": lambda: imported(array()),
    "shared memory": lambda: shared(tensor()),
    "a buffer, to numpy": lambda: np.frombuffer(bytearray(4 * BIG), np.uint8),
    "a buffer, to numpy, sliced": lambda: np.frombuffer(bytearray(8 * BIG), np.uint8)[4 * BIG :],
    "torch, to numpy": lambda: tensor().numpy(),
}


@pytest.mark.parametrize("make", LENT.values(), ids=LENT)
def test_memory_that_something_else_lent_is_not_found_sole(make: Callable[[], Any]) -> None:
    """Its lender may be reached in ways that nobody counts."""
    assert not returned(make)


def test_memory_of_a_file_is_not_found_sole() -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(4 * BIG)
        name = file.name
        assert not returned(lambda: torch.from_file(name, shared=True, size=BIG))
        assert not returned(lambda: torch.from_file(name, shared=False, size=BIG))
        assert not returned(lambda: np.memmap(name, np.uint8, "r+").view(np.ndarray))


@pytest.mark.parametrize("make", [tensor, array])
def test_what_a_worker_keeps_in_itself_is_not_found_sole(make: Callable[[], Any]) -> None:
    worker = Keeper()

    def method() -> Any:
        value = make()
        worker.kept.append({"deep": [value[5:6]]})
        return value

    assert not returned(method)
    worker.kept.clear()
    assert returned(make)


@pytest.mark.parametrize("make", [tensor, array])
def test_what_a_generators_frame_holds_is_not_found_sole(make: Callable[[], Any]) -> None:
    def items() -> Generator[Any, None, None]:
        value = make()
        yield value
        value[0] = 2

    running = items()
    assert not returned(lambda: next(running))
    running.close()


def test_what_was_kept_before_is_found_sole_when_it_is_not_kept_any_more() -> None:
    kept = [tensor()]
    assert not returned(lambda: kept[0])
    assert returned(kept.pop)


def test_what_is_not_contiguous_is_not_found_sole() -> None:
    assert not returned(lambda: torch.ones(BIG, 2).T)


def test_small_buffers_that_others_have_are_copied_beside_large_ones_that_nobody_has() -> None:
    small = torch.from_numpy(np.arange(ASIDE // 8))
    value = [torch.ones(BIG), small]
    sources = codec.encode(value).buffers
    del value
    found = sole(sources)
    assert found is not None
    small[:] = -1
    assert found[0] is sources[0]
    assert bytes(found[1]) == np.arange(ASIDE // 8).tobytes()


def test_small_buffers_are_copied_up_to_a_sum_alone() -> None:
    small = [torch.from_numpy(np.arange(ASIDE // 8)) for _ in range(2)]
    assert not returned(lambda: [torch.ones(BIG), *small])


def test_nothing_is_found_sole_where_references_are_not_counted_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from asyncwg._wire import sole as module

    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    module._alone_storage.cache_clear()
    module._alone_array.cache_clear()
    try:
        assert not returned(tensor)
        assert not returned(array)
    finally:
        module._alone_storage.cache_clear()
        module._alone_array.cache_clear()
