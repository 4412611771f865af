"""A table of tensors and arrays: what holds it together, and how its rows are chosen."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast, overload

import numpy as np
from tensordict import TensorDict, TensorDictBase

from asyncwg._data.pack import pack, unpack
from asyncwg._data.rows import Array, Indices, as_count, row_indices, slice_rows, take_rows
from asyncwg.errors import UsageError

TableT = TypeVar("TableT", bound="Table")


def _rebuild(cls: type[Any], state: dict[str, Any]) -> Any:
    made = object.__new__(cls)
    vars(made).update(state)
    made.batch = unpack(made.batch)
    made.non_tensor_batch = dict(made.non_tensor_batch)  # copy.copy passes the original's dicts
    made.meta_info = dict(made.meta_info)
    return made


def like(
    source: TableT,
    batch: TensorDict | None,
    non_tensor_batch: dict[str, Array],
    meta_info: Mapping[str, Any] | None = None,
) -> TableT:
    """Return a table with these parts and, as ``source``, its class and all other attributes.

    The parts must fit together. ``meta_info`` is copied, from ``source`` when there is none.
    """
    made = object.__new__(type(source))
    vars(made).update(vars(source))
    made.batch = batch
    made.non_tensor_batch = non_tensor_batch
    made.meta_info = dict(source.meta_info if meta_info is None else meta_info)
    return made


def has_rows(table: Table) -> bool:
    """Return whether there is anything but ``meta_info``; there can still be 0 rows."""
    return table.batch is not None or bool(table.non_tensor_batch)


def shallow(batch: TensorDict | None) -> TensorDict | None:
    """Return a TensorDict of its own with the same tensors; unlocked."""
    return None if batch is None else batch.copy()


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, TensorDictBase):
        raise TypeError(
            f"batch must be a TensorDict, not {type(batch).__name__}; "
            "DataProto.from_dict takes a dict of tensors"
        )
    if batch.batch_dims != 1:
        raise UsageError(
            f"batch must have one batch dimension, its batch_size is {tuple(batch.batch_size)}; "
            "make it TensorDict(..., batch_size=[rows])"
        )


def _check_array(key: str, array: Any) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"non_tensor_batch[{key!r}] must be an array, not {type(array).__name__}; "
            "DataProto.from_dict takes lists"
        )
    if not array.ndim:
        raise UsageError(f"non_tensor_batch[{key!r}] has no rows, its shape is ()")


@dataclass(eq=False)
class DataProtoItem:
    """One row of a `DataProto`; made by indexing with an integer."""

    batch: TensorDict | None = None
    """The row's tensors, as views without the batch dimension."""
    non_tensor_batch: dict[str, Any] = field(default_factory=dict[str, Any])
    """The row's element of each array."""
    meta_info: dict[str, Any] = field(default_factory=dict[str, Any])
    """The facts about the whole batch."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain dicts of tensors."""
        return _rebuild, (type(self), {**vars(self), "batch": pack(self.batch)})


@dataclass(eq=False)
class Table:
    """What `asyncwg.protocol.DataProto` is made of, without its keys and other forms.

    Raises:
        TypeError: a part has the wrong type.
        UsageError: the numbers of rows differ, or ``batch`` has not exactly one batch dimension.
    """

    batch: TensorDict | None = None
    """The tensors, batch size ``[rows]``; the object itself is kept, not a copy."""
    non_tensor_batch: dict[str, Array] = field(default_factory=dict[str, Array])
    """Arrays of ``rows`` entries, often objects; the dict is copied, the arrays are not."""
    meta_info: dict[str, Any] = field(default_factory=dict[str, Any])
    """Facts about the whole batch, in a copy of the dict."""
    auto_padding: bool = field(default=False, kw_only=True)
    """Whether a group that splits this may pad it to a multiple of its ranks."""

    def __post_init__(self) -> None:
        self.non_tensor_batch = dict(self.non_tensor_batch or {})
        self.meta_info = dict(self.meta_info or {})
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise as the class says when the parts don't fit together."""
        rows: int | None = None
        first = "batch"
        if self.batch is not None:
            _check_batch(self.batch)
            rows = self.batch.batch_size[0]
        for key, array in self.non_tensor_batch.items():
            _check_array(key, array)
            if rows is None:
                rows, first = len(array), f"non_tensor_batch[{key!r}]"
            elif len(array) != rows:
                raise UsageError(
                    f"non_tensor_batch[{key!r}] has {len(array)} rows, {first} has {rows}; "
                    "all must have the same number"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain dicts of tensors, each by itself. A locked batch arrives unlocked."""
        return _rebuild, (type(self), {**vars(self), "batch": pack(self.batch)})

    def __len__(self) -> int:
        """Return the number of rows; 0 where there is only ``meta_info``."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((len(array) for array in self.non_tensor_batch.values()), 0)

    def __iter__(self) -> Iterator[DataProtoItem]:
        """Iterate over the rows."""
        return (self._item(i) for i in range(len(self)))

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: builtins.slice | Indices) -> Self: ...
    def __getitem__(self, index: Any) -> Any:
        """Return a `DataProtoItem` for an integer, and a table for a slice, list, array or mask.

        Integers and slices give views; lists, arrays, tensors and masks give copies.

        Raises:
            IndexError: a row that does not exist, or a mask of another length.
            TypeError: any other index.
        """
        if isinstance(index, builtins.slice):
            return self.slice(index.start, index.stop, index.step)
        if isinstance(index, list) or getattr(index, "ndim", None):
            return self.select_idxs(index)
        if isinstance(index, (str, tuple)):
            raise TypeError(
                f"rows are not named by {index!r}; the columns are in data.batch and "
                "data.non_tensor_batch"
            )
        return self._item(as_count("a row", index, minimum=-sys.maxsize))

    def _item(self, row: int) -> DataProtoItem:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} does not exist, the data has {len(self)} rows")
        batch = None if self.batch is None else self.batch[row]
        arrays = {key: array[row] for key, array in self.non_tensor_batch.items()}
        return DataProtoItem(batch, arrays, dict(self.meta_info))

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Return rows ``start`` to before ``end``, as views; a negative step copies tensors."""
        rows = builtins.slice(start, end, step)
        batch = None if self.batch is None else slice_rows(self.batch, rows)
        return like(self, batch, {key: a[rows] for key, a in self.non_tensor_batch.items()})

    def select_idxs(self, idxs: Indices) -> Self:
        """Return copies of the rows that a list, array or tensor of integers, or a mask, names.

        Raises:
            IndexError: a row that does not exist, or a mask of another length.
            TypeError: not 1-D, or neither integers nor a mask.
        """
        index = row_indices(idxs, len(self))
        batch = None if self.batch is None else take_rows(self.batch, index)
        return like(self, batch, {key: a[index] for key, a in self.non_tensor_batch.items()})

    def reorder(self, indices: Indices) -> None:
        """Bring the rows into the order ``indices``, in place. Returns None.

        Raises:
            UsageError: ``indices`` does not name every row once; `select_idxs` takes any.
        """
        index = row_indices(indices, len(self))
        if len(index) != len(self) or len(np.unique(index)) != len(self):
            raise UsageError(
                f"reorder needs each of the {len(self)} rows once; select_idxs(indices) takes any"
            )
        ordered = self.select_idxs(index)
        self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return copies of the rows, each row several times in a row, or all rows several times.

        Raises:
            UsageError: a negative count.
        """
        times = as_count("repeat_times", repeat_times, 0)
        rows = np.arange(len(self))
        index = np.repeat(rows, times) if interleave else np.tile(rows, times)
        return self.select_idxs(index)

    def sample_level_repeat(self, repeat_times: Indices) -> Self:
        """Return copies of the rows, row i ``repeat_times[i]`` times in a row.

        Raises:
            UsageError: not one count per row, or a negative one.
        """
        counts = [as_count("repeat_times", count, 0) for count in cast("Any", repeat_times)]
        if len(counts) != len(self):
            raise UsageError(f"repeat_times has {len(counts)} counts, the data {len(self)} rows")
        index = np.repeat(np.arange(len(self)), np.asarray(counts, dtype=np.int64))
        return self.select_idxs(index)
