"""More or fewer rows out of the same data: folding rows into a dimension, and columns into rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from asyncwg._data.rows import Array, leaves
from asyncwg.errors import UsageError

if TYPE_CHECKING:
    from tensordict import TensorDict


def fold_batch(batch: TensorDict, lead: tuple[int, int]) -> TensorDict:
    """Return views of shape (lead[0], lead[1], ...) with lead[0] rows."""
    try:
        folded = batch.reshape(*lead)
    except RuntimeError as error:
        raise UsageError(f"fold_batch_dim needs dense tensors: {error}") from error
    folded.batch_size = torch.Size(lead[:1])
    return folded


def fold_arrays(arrays: Mapping[str, Array], lead: tuple[int, int]) -> dict[str, Array]:
    """Return each array in shape (lead[0], lead[1], ...)."""
    return {key: array.reshape(*lead, *array.shape[1:]) for key, array in arrays.items()}


def leading_shape(
    batch: TensorDict | None, arrays: Mapping[str, Array], dims: int
) -> tuple[int, ...]:
    """Return the first ``dims`` sizes, which all tensors and arrays must share.

    Raises:
        UsageError: they differ, or there is nothing to read them from.
    """
    shapes = {} if batch is None else {f"batch[{k!r}]": v.shape for k, v in leaves(batch).items()}
    shapes |= {f"non_tensor_batch[{key!r}]": array.shape for key, array in arrays.items()}
    if not shapes:
        raise UsageError("unfold_batch_dim needs at least one tensor or array")
    first, lead = next((name, tuple(shape[:dims])) for name, shape in shapes.items())
    for name, shape in shapes.items():
        if len(shape) < dims or tuple(shape[:dims]) != lead:
            raise UsageError(
                f"unfold_batch_dim(batch_dims={dims}): {name} has shape {tuple(shape)}, "
                f"but {first} begins with {lead}; all must begin with the same {dims} sizes"
            )
    return lead


def unfold_batch(batch: TensorDict, lead: tuple[int, ...]) -> TensorDict:
    """Return ``batch`` with the dimensions ``lead`` made one, views where strides allow."""
    shaped = batch.copy()
    shaped.batch_size = torch.Size(lead)
    return shaped.reshape(math.prod(lead))


def unfold_arrays(arrays: Mapping[str, Array], lead: tuple[int, ...]) -> dict[str, Array]:
    """Return each array with the dimensions ``lead`` made one."""
    rows = math.prod(lead)
    return {key: array.reshape(rows, *array.shape[len(lead) :]) for key, array in arrays.items()}


def unfold_columns(
    batch: TensorDict, keys: Sequence[str], parts: int, indices: Array
) -> TensorDict:
    """Return ``batch`` with the columns of ``keys`` cut into ``parts`` rows, others repeated."""
    repeated = batch.exclude(*keys)[torch.from_numpy(indices)]
    for key in keys:
        value = cast("Any", batch.get(key))
        shape = columns_as_rows(f"batch[{key!r}]", tuple(value.shape), parts)
        repeated.set(key, value.reshape(shape))
    return repeated


def unfold_array_columns(
    arrays: Mapping[str, Array], keys: Sequence[str], parts: int
) -> dict[str, Array]:
    """Do the same for arrays."""
    unfolded: dict[str, Array] = {}
    for key, array in arrays.items():
        if key in keys:
            shape = columns_as_rows(f"non_tensor_batch[{key!r}]", array.shape, parts)
            unfolded[key] = array.reshape(shape)
        else:
            unfolded[key] = np.repeat(array, parts, axis=0)
    return unfolded


def columns_as_rows(name: str, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Return (n * parts, c / parts, ...) for a shape (n, c, ...).

    Raises:
        UsageError: there are no columns, or ``parts`` does not divide them.
    """
    if len(shape) < 2 or shape[1] % parts:
        raise UsageError(
            f"unfold_column_chunks can't cut {name} of shape {shape} into {parts} equal parts "
            "along its second dimension"
        )
    return shape[0] * parts, shape[1] // parts, *shape[2:]
