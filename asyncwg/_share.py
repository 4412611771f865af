"""Tensors that stay in shared memory: sending one costs no copy, whatever its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncwg._driver.arena import arena
from asyncwg.errors import UsageError

if TYPE_CHECKING:
    import torch


def shared_empty(shape: int | Sequence[int], dtype: Any = None) -> torch.Tensor:
    """Return an uninitialised tensor in shared memory, on the CPU.

    It is sent by reference: do not write to it between a call that sends it and the end of
    ``await call.released()``. Its readers get it copy-on-write, so what they write stays theirs. Slices of
    it, and the shards of a split, are sent by reference too. The memory is given back when the
    last view of it is gone.

    Args:
        shape: as for ``torch.empty``.
        dtype: a ``torch.dtype``; None for torch's default.

    Raises:
        ResourceError: there is no room for it.
    """
    import torch  # import here: the package must not load it

    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(size < 0 for size in sizes):
        raise UsageError(f"a shape has no negative numbers: {sizes}")
    kind: torch.dtype = torch.get_default_dtype() if dtype is None else dtype
    count = math.prod(sizes)
    if not count:
        return torch.empty(sizes, dtype=kind)
    nbytes = count * kind.itemsize
    array = arena().share(nbytes)
    return torch.frombuffer(array, dtype=torch.uint8, count=nbytes).view(kind).view(sizes)


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in shared memory; see `shared_empty`."""
    import torch  # import here: the package must not load it

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise UsageError(f"share() takes a dense tensor, not {tensor!r}")
    shared = shared_empty(tensor.shape, tensor.dtype)
    shared.copy_(tensor.detach())
    return shared
