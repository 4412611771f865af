"""Results that stand side by side in the arena already: the joined one is a view of them all."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

Find = Callable[[int], tuple[Any, int] | None]
"""From an address to the array of its block, and the position in it."""


def joined(parts: Sequence[Any], find: Find) -> Any:
    """Return the tensors or arrays ``parts`` as one, by rows, if they stand side by side; else None."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and all(type(part) is torch.Tensor for part in parts):
        return _joined_tensors(parts, find, torch)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and all(type(part) is numpy.ndarray for part in parts):
        return _joined_arrays(parts, find, numpy)
    return None


def _joined_tensors(parts: Sequence[Any], find: Find, torch: Any) -> Any:
    first = parts[0]
    if first.device.type != "cpu" or not all(
        part.layout is torch.strided and part.is_contiguous() and not part.requires_grad
        for part in parts
    ):
        return None
    shapes = [tuple(part.shape) for part in parts]
    if not _alike(shapes, [part.dtype for part in parts]):
        return None
    place = _place([(part.data_ptr(), part.nbytes) for part in parts], find)
    if place is None:
        return None
    array, position, size = place
    flat = torch.frombuffer(array, dtype=torch.uint8, count=size, offset=position)
    return flat.view(first.dtype).view(_together(shapes))


def _joined_arrays(parts: Sequence[Any], find: Find, numpy: Any) -> Any:
    if not all(part.flags.c_contiguous and not part.dtype.hasobject for part in parts):
        return None
    if not _alike([part.shape for part in parts], [part.dtype for part in parts]):
        return None
    place = _place([(part.ctypes.data, part.nbytes) for part in parts], find)
    if place is None:
        return None
    array, position, size = place
    dtype = parts[0].dtype
    flat = numpy.frombuffer(array, dtype, size // dtype.itemsize, position)
    return flat.reshape(_together([part.shape for part in parts]))


def _alike(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any]) -> bool:
    return (
        len({shape[1:] for shape in shapes}) == 1
        and len(set(dtypes)) == 1
        and bool(shapes[0])
        and all(math.prod(shape) for shape in shapes)
    )


def _together(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _place(spans: Sequence[tuple[int, int]], find: Find) -> tuple[Any, int, int] | None:
    for (address, size), (following, _) in itertools.pairwise(spans):
        if address + size != following:
            return None
    found = find(spans[0][0])
    if found is None:
        return None
    array, position = found
    total = sum(size for _, size in spans)
    return (array, position, total) if position + total <= len(array) else None
