"""Rows of a batch: which are meant, and how they are taken, cut and put together.

A batch is a TensorDict with one batch dimension and a dict of arrays, with the same number of rows.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch

from asyncwg import shards
from asyncwg.errors import UsageError

if TYPE_CHECKING:
    from tensordict import TensorDict

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
Indices: TypeAlias = (
    "torch.Tensor | np.ndarray[Any, np.dtype[Any]] | Sequence[int] | Sequence[bool]"
)


def as_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` as an int.

    Raises:
        TypeError: not an integer (a bool is none).
        UsageError: less than ``minimum``.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, not the bool {value}")
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {type(value).__name__}") from None
    if count < minimum:
        raise UsageError(f"{name} must be at least {minimum}, got {count}")
    return count


def object_rows(values: Sequence[Any]) -> Array:
    """Return a 1-D object array with one element per item, also where the items are lists."""
    rows = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # ``rows[:] = values`` would look into nested lists
        rows[i] = value
    return rows


def row_indices(index: Any, rows: int) -> Array:
    """Return what a list, array or tensor of integers, or a mask, means as int64 from 0 to rows-1.

    Raises:
        TypeError: neither integers nor a mask.
        IndexError: a row that does not exist, or a mask of another length.
    """
    array = _index_array(index)
    if array.ndim != 1:
        raise TypeError(f"rows are chosen by a 1-D index, got one of shape {array.shape}")
    if array.dtype == np.bool_:
        if len(array) != rows:
            raise IndexError(f"the mask has {len(array)} entries, the data {rows} rows")
        return np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        raise TypeError(f"rows are chosen by integers or a mask, got {array.dtype}")
    array = array.astype(np.int64)
    outside = (array < -rows) | (array >= rows)
    if outside.any():
        raise IndexError(f"row {array[outside][0]} does not exist, the data has {rows} rows")
    return np.where(array < 0, array + rows, array)


def _index_array(index: Any) -> Array:
    if isinstance(index, torch.Tensor):
        if index.is_floating_point() or index.is_complex():
            raise TypeError(f"rows are chosen by integers or a mask, got {index.dtype}")
        return cast("Array", index.detach().cpu().numpy())
    try:
        array = np.asarray(index)
    except ValueError as error:
        raise TypeError(f"rows are chosen by a flat list of integers: {error}") from error
    return array.astype(np.int64) if not array.size and array.ndim == 1 else array


def take_rows(batch: TensorDict, index: Array) -> TensorDict:
    """Return a new TensorDict of copies of the rows ``index``, in its order."""
    try:
        return batch[torch.from_numpy(index)]
    except (NotImplementedError, RuntimeError) as error:
        _explain_odd_fields(batch, error)
        raise


def slice_rows(batch: TensorDict, rows: slice) -> TensorDict:
    """Return a new TensorDict of views of the rows; a negative step can only be a copy."""
    if rows.step is not None and rows.step < 0:
        return take_rows(batch, np.arange(*rows.indices(len(batch))))
    try:
        return batch[rows]
    except (NotImplementedError, RuntimeError) as error:
        _explain_odd_fields(batch, error)
        raise


def _explain_odd_fields(batch: TensorDict, error: Exception) -> None:
    for key, value in leaves(batch).items():
        if value.layout not in (torch.strided, torch.jagged) or (
            value.is_nested and value.layout is torch.strided
        ):
            raise TypeError(
                f"batch[{key!r}] can't be split by rows, its layout is {value.layout}"
                f"{' (nested)' if value.is_nested else ''}: make it dense or jagged first"
            ) from error


def leaves(batch: TensorDict) -> dict[Any, torch.Tensor]:
    """Return the tensors of ``batch``, also those in nested TensorDicts, under their full keys."""
    items = cast("Iterable[tuple[Any, Any]]", batch.items(True, True))
    return {key: value for key, value in items if isinstance(value, torch.Tensor)}


def all_keys(batch: TensorDict) -> set[Any]:
    """Return every key of ``batch``, nested ones as tuples."""
    return set(cast("Iterable[Any]", batch.keys(True)))


def concat_batches(
    batches: Sequence[TensorDict], who: str = "concat: part", *, share_one: bool = False
) -> TensorDict:
    """Return one TensorDict with the rows of all, copied.

    What has no rows must have the right keys and decides nothing else. With ``share_one``, rows
    that all come from one batch, or that stand side by side in memory already, are not copied.

    Raises:
        UsageError: they differ in keys, or the tensors under one key don't fit together.
    """
    expected = all_keys(batches[0])
    for i, batch in enumerate(batches):
        check_same_keys("batch", expected, all_keys(batch), i, who)
    filled = [batch for batch in batches if batch.batch_size[0]] or batches
    if share_one and len(filled) == 1:
        return filled[0].copy()
    try:
        join = shards.cat if share_one else torch.cat
        return cast("TensorDict", join(cast("Any", filled)))
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(_misfit(filled, who, error)) from error


def _misfit(batches: Sequence[TensorDict], who: str, error: Exception) -> str:
    per_part = [leaves(batch) for batch in batches]
    for key, first in per_part[0].items():
        for part in per_part[1:]:
            other = part[key]
            if first.is_nested or (
                first.shape[1:] == other.shape[1:] and first.device == other.device
            ):
                continue
            return (
                f"{who}s differ beyond the number of rows: batch[{key!r}] has shape "
                f"{tuple(first.shape)} on {first.device} and {tuple(other.shape)} on {other.device}"
            )
    return f"{who}s don't fit together: {error}"


def concat_arrays(
    parts: Sequence[Mapping[str, Array]], who: str = "concat: part", *, share_one: bool = False
) -> dict[str, Array]:
    """Return each array with the rows of all parts, copied or not as by `concat_batches`.

    Raises:
        UsageError: they differ in keys, or the arrays under one key don't fit together.
    """
    for i, part in enumerate(parts):
        check_same_keys("non_tensor_batch", set(parts[0]), set(part), i, who)
    joined: dict[str, Array] = {}
    for key in parts[0]:
        arrays = [part[key] for part in parts]
        filled = [array for array in arrays if len(array)] or arrays[:1]
        joined[key] = filled[0] if share_one and len(filled) == 1 else _concat(key, filled, who)
    return joined


def _concat(key: str, arrays: Sequence[Array], who: str) -> Array:
    kinds = {"number" if array.dtype.kind in "biufc" else array.dtype.kind for array in arrays}
    fit = len({array.shape[1:] for array in arrays}) == 1
    if not fit or (len(kinds) > 1 and "O" not in kinds):  # numpy would make numbers into strings
        found = ", ".join(f"{array.shape} {array.dtype}" for array in arrays)
        raise UsageError(
            f"{who}s differ beyond the number of rows: non_tensor_batch[{key!r}] is {found}"
        )
    # np.concatenate drops the masks of masked arrays without a word.
    masked = any(isinstance(array, np.ma.MaskedArray) for array in arrays)
    return cast("Array", (cast("Any", np.ma) if masked else np).concatenate(arrays))


def check_same_keys(where: str, expected: set[Any], found: set[Any], part: int, who: str) -> None:
    """Raise UsageError unless ``part`` has the keys of part 0."""
    if found == expected:
        return
    odd = min(found ^ expected, key=str)
    has, lacks = (part, 0) if odd in found else (0, part)
    raise UsageError(
        f"{who} {has} has {where}[{odd!r}], {lacks} has not; "
        "give all the same keys, for example with select() or pop()"
    )


def even_bounds(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return ``parts`` ranges of rows in order; their sizes differ by at most one."""
    size, longer = divmod(rows, parts)
    starts = [i * size + min(i, longer) for i in range(parts + 1)]
    return list(itertools.pairwise(starts))
