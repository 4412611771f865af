"""Arrays and meta values as TensorDict entries that are no tensors, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict

from asyncwg._data.rows import Array, object_rows
from asyncwg.errors import UsageError


def to_entries(arrays: Mapping[str, Array], meta: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Return a NonTensorStack, row by row, per array and a NonTensorData per meta value."""
    entries: dict[str, Any] = {key: _stack(array) for key, array in arrays.items()}
    for key, value in meta.items():
        entries[key] = NonTensorData(value, batch_size=[rows])
    return entries


def _stack(array: Array) -> Any:
    if not len(array):
        return NonTensorStack(batch_size=[])
    return NonTensorStack(*[NonTensorData(row) for row in array])


def from_entries(batch: TensorDict) -> tuple[dict[str, Any], dict[str, Array], dict[str, Any]]:
    """Return the tensors, the arrays and the meta values of ``batch``; nested TensorDicts stay."""
    fields: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    meta: dict[str, Any] = {}
    for key, value in cast("Iterable[tuple[str, Any]]", batch.items()):
        if isinstance(value, NonTensorStack):
            arrays[key] = _unstack(cast("Any", value).tolist())
        elif isinstance(value, NonTensorData):
            meta[key] = cast("Any", value).data
        else:
            fields[key] = value
    return fields, arrays, meta


def _unstack(rows: Sequence[Any]) -> Array:
    # Rows that were cut from a numeric or string array give that array again.
    first = rows[0] if rows else None
    if isinstance(first, (np.generic, np.ndarray)):
        alike = all(
            isinstance(row, (np.generic, np.ndarray))
            and row.dtype == first.dtype
            and row.shape == first.shape
            for row in rows
        )
        if alike and first.dtype != object:
            return np.stack(cast("Any", rows))
    return object_rows(rows)


def check_distinct(names: Mapping[str, Iterable[Any]]) -> None:
    """Raise UsageError when a key stands in two of the named groups of keys."""
    owner: dict[Any, str] = {}
    for name, keys in names.items():
        for key in keys:
            if key in owner:
                raise UsageError(
                    f"the key {key!r} is in {owner[key]} and in {name}, a TensorDict has only one "
                    "place for it: rename or pop one of them"
                )
            owner[key] = name
