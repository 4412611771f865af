"""`DataProto`: rows of tensors, rows of anything else, and facts about the whole.

Names and meaning are verl's. A result never shares its dicts with the object it came from, so a
key set or removed in one does not show in the other. Whether *tensors and arrays* are shared each
method says: "views" share memory, "copies" do not. Only `pop`, `rename`, `reorder`, `union` and
`to` change the object itself; `all_gather_data_proto` changes its argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from asyncwg._data import reshape

# What is named twice here verl's users look for in this module, and is not in __all__.
from asyncwg._data.columns import list_of_dict_to_dict_of_list as list_of_dict_to_dict_of_list
from asyncwg._data.columns import union_numpy_dict as union_numpy_dict
from asyncwg._data.columns import union_tensor_dict as union_tensor_dict
from asyncwg._data.forms import Forms
from asyncwg._data.gather import gather_rows
from asyncwg._data.meta import Reducers, merge_meta
from asyncwg._data.minibatches import minibatch_indices
from asyncwg._data.rows import (
    as_count,
    concat_arrays,
    concat_batches,
    even_bounds,
    object_rows,
)
from asyncwg._data.table import DataProtoItem as DataProtoItem  # for isinstance on data[0]
from asyncwg._data.table import has_rows, like
from asyncwg.errors import UsageError
from asyncwg.shards import Bounds, Handler, register_shardable

__all__ = [
    "DataProto",
    "all_gather_data_proto",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "unpad_dataproto",
]

DataProtoT = TypeVar("DataProtoT", bound="DataProto")


class DataProto(Forms):
    """A batch: every tensor and array has one entry per row, in its first dimension.

    Subclasses are kept by all operations, with their other attributes. ``==`` is identity.

    Args:
        batch: the tensors, in a TensorDict of batch size ``[rows]``; kept itself, not a copy.
        non_tensor_batch: arrays of ``rows`` entries, often objects; the dict is copied, the
            arrays are not.
        meta_info: facts about the whole; the dict is copied.
        auto_padding: whether a group that splits this may pad it to a multiple of its ranks.

    Raises:
        TypeError: a part has the wrong type.
        UsageError: the numbers of rows differ, or ``batch`` has not exactly one batch dimension.
    """

    def to(self, device: torch.device | str | int) -> Self:
        """Move the tensors to ``device``, in place, and return self."""
        if self.batch is not None:
            self.batch = self.batch.to(cast("Any", device))
        return self

    def is_padding_enabled(self) -> bool:
        """Return whether a group that splits this may pad it (see ``auto_padding``)."""
        return self.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "") -> Self:
        """Return a new one with ``padding_size`` copies of a row at the end; this stays as it is.

        In verl this pads in place; here nothing that is padded is the caller's.

        Args:
            padding_size: rows to add; 0 gives views.
            padding_candidate: ``"first"`` for the first row; ``""`` or ``"last"`` for the last.

        Raises:
            UsageError: a negative size, no row to copy, or an unknown candidate.
        """
        size = as_count("padding_size", padding_size, 0)
        if padding_candidate not in ("", "first", "last"):
            raise UsageError(f"padding_candidate is 'first' or 'last', not {padding_candidate!r}")
        if not size:
            return self.slice()
        if not len(self):
            raise UsageError("padding copies a row, and there is none")
        row = 0 if padding_candidate == "first" else len(self) - 1
        return self.select_idxs(np.append(np.arange(len(self)), np.full(size, row)))

    def chunk(self, chunks: int, *, uneven: Literal["error", "allow"] = "error") -> list[Self]:
        """Return ``chunks`` equal parts in order, as views.

        Args:
            chunks: how many.
            uneven: ``"allow"`` gives parts whose sizes differ by at most one, the longer first;
                with fewer rows than parts some are empty.

        Raises:
            UsageError: the rows are not divisible by ``chunks``, and ``uneven`` is ``"error"``
                (also with ``auto_padding``, for a chunk could not say which rows are padding).
        """
        parts = as_count("chunks", chunks)
        if uneven not in ("error", "allow"):
            raise UsageError(f"uneven is 'error' or 'allow', not {uneven!r}")
        if uneven == "error" and len(self) % parts:
            raise UsageError(
                f"{len(self)} rows can't be cut into {parts} equal chunks; take "
                "chunk(..., uneven='allow'), or pad with pad_dataproto_to_divisor first"
            )
        return [self.slice(start, end) for start, end in even_bounds(len(self), parts)]

    def split(self, split_size: int) -> list[Self]:
        """Return parts of ``split_size`` rows in order, as views; the last may be shorter.

        Like ``torch.split``, no rows give one part of no rows, so joining gives the data back.
        """
        size = as_count("split_size", split_size)
        return [self.slice(i, i + size) for i in range(0, max(len(self), 1), size)]

    @staticmethod
    def concat(data: Sequence[DataProtoT], meta: Reducers | None = None) -> DataProtoT:
        """Return one of the class of the first part, with copies of the rows of all in order.

        Args:
            data: parts with the same keys. Parts of which none has rows give their ``meta_info``.
            meta: how to combine ``meta_info``: by key, a function of the list of the values of
                those parts that have the key. Equal values are kept once. ``"metrics"`` (a dict
                or list of dicts per part, or None) becomes a dict of lists of all parts' values;
                values that are lists already are joined, not nested.

        Raises:
            TypeError: a part is no DataProto.
            UsageError: no parts; keys or shapes differ; values of a key of ``meta_info`` differ
                and ``meta`` does not name it.
        """
        return _join(list(data), meta or {})

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Return an iterator over mini-batches, which are copies, ``epochs`` times over the rows.

        Args:
            mini_batch_size: rows in each; must divide the rows.
            epochs: how often.
            seed: makes the order of ``{"shuffle": True}`` the same each time.
            dataloader_kwargs: for ``torch.utils.data.DataLoader``, which draws row numbers.

        Raises:
            TypeError: a count that is no integer.
            UsageError: the rows are not divisible, or an option that the arguments stand for.
                All this is raised here, not at the first ``next``.
        """
        options = dict(dataloader_kwargs or {})
        drawn = minibatch_indices(len(self), mini_batch_size, epochs, seed, options)
        return (self.select_idxs(rows) for rows in drawn)


def _check_parts(parts: Sequence[Any]) -> None:
    if not parts:
        raise UsageError("concat needs at least one part")
    for i, part in enumerate(parts):
        if not isinstance(part, DataProto):
            raise TypeError(f"concat: part {i} is a {type(part).__name__}, not a DataProto")
        if (part.batch is None) != (parts[0].batch is None):
            raise UsageError(
                f"concat: only one of parts 0 and {i} has a batch; give all the same keys"
            )


def _join(
    parts: Sequence[DataProtoT], reducers: Reducers, *, share_one: bool = False
) -> DataProtoT:
    _check_parts(parts)
    batches = [part.batch for part in parts if part.batch is not None]
    batch = concat_batches(batches, share_one=share_one) if batches else None
    arrays = concat_arrays([part.non_tensor_batch for part in parts], share_one=share_one)
    merged = merge_meta([part.meta_info for part in parts], reducers)
    joined = like(parts[0], batch, arrays, merged)
    joined.auto_padding = any(part.auto_padding for part in parts)
    return joined


def pad_dataproto_to_divisor(data: DataProtoT, size_divisor: int) -> tuple[DataProtoT, int]:
    """Return ``data`` with rows added until ``size_divisor`` divides them, and how many were.

    The added rows repeat the rows from the first on, as often as needed. ``data`` stays as it is;
    where nothing is to add (also for 0 rows), the result has views of it.

    Raises:
        UsageError: ``size_divisor`` is less than 1.
    """
    divisor = as_count("size_divisor", size_divisor)
    missing = -len(data) % divisor
    if not missing:
        return data.slice(), 0
    return data.select_idxs(np.arange(len(data) + missing) % len(data)), missing


def unpad_dataproto(data: DataProtoT, pad_size: int) -> DataProtoT:
    """Return ``data`` without its last ``pad_size`` rows, as views.

    Raises:
        UsageError: ``pad_size`` is negative or more than there is.
    """
    size = as_count("pad_size", pad_size, 0)
    if size > len(data):
        raise UsageError(f"can't take {size} rows of padding from {len(data)} rows")
    return data.slice(0, len(data) - size)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Return the rows as one `DataProto`, copied: for a ``DataLoader`` over one.

    Arrays keep their dtype where the rows have one. Facts about the whole that the rows came from
    are left out, as in verl.

    Raises:
        UsageError: there are no rows, or they don't have the same keys and shapes.
    """
    if not items:
        raise UsageError("collate_fn needs at least one row")
    without = [
        i for i, item in enumerate(items) if (item.batch is None) != (items[0].batch is None)
    ]
    if without:
        raise UsageError(f"only one of rows 0 and {without[0]} has a batch; give all the same keys")
    batch = None
    if items[0].batch is not None:
        rows = [item.batch.unsqueeze(0) for item in items if item.batch is not None]
        batch = concat_batches(rows, "collate_fn: row")
    columns = list_of_dict_to_dict_of_list([item.non_tensor_batch for item in items])
    return DataProto(batch, {key: _stacked(rows) for key, rows in columns.items()})


def _stacked(rows: list[Any]) -> np.ndarray[Any, Any]:
    kinds = {
        (row.dtype, row.shape) if isinstance(row, np.generic | np.ndarray) else None for row in rows
    }
    return np.stack(rows) if len(kinds) == 1 and None not in kinds else object_rows(rows)


def fold_batch_dim(data: DataProtoT, new_batch_size: int) -> DataProtoT:
    """Return ``data`` with ``new_batch_size`` rows, each of several old ones, as views.

    A tensor of shape ``(n, ...)`` becomes ``(new_batch_size, n / new_batch_size, ...)``.

    Raises:
        UsageError: ``new_batch_size`` does not divide the rows, or a tensor is not dense.
    """
    size = as_count("new_batch_size", new_batch_size)
    if len(data) % size:
        raise UsageError(f"{len(data)} rows can't be folded into {size} rows of the same size")
    lead = (size, len(data) // size)
    batch = None if data.batch is None else reshape.fold_batch(data.batch, lead)
    return like(data, batch, reshape.fold_arrays(data.non_tensor_batch, lead))


def unfold_batch_dim(data: DataProtoT, batch_dims: int = 2) -> DataProtoT:
    """Return ``data`` with the first ``batch_dims`` dimensions made one; undoes `fold_batch_dim`.

    A tensor of shape ``(n, k, ...)`` becomes ``(n * k, ...)``. Views where strides allow.

    Raises:
        UsageError: the parts don't all begin with the same ``batch_dims`` sizes.
    """
    dims = as_count("batch_dims", batch_dims)
    lead = reshape.leading_shape(data.batch, data.non_tensor_batch, dims)
    batch = None if data.batch is None else reshape.unfold_batch(data.batch, lead)
    return like(data, batch, reshape.unfold_arrays(data.non_tensor_batch, lead))


def all_gather_data_proto(
    data: DataProto, process_group: dist.ProcessGroup | None = None, size: int | None = None
) -> None:
    """Give every rank of a process group the rows of all, in rank order, in place.

    Ranks may have different numbers of rows. Tensors keep their dtype and device, and arrive
    detached; ``meta_info`` stays each rank's own. Arrays are unpickled: gather only from ranks
    you trust.

    Args:
        data: this rank's part.
        process_group: None for all ranks.
        size: the number of ranks, to check it.

    Raises:
        TypeError: ``data`` is no DataProto.
        UsageError: there is no process group, it has not ``size`` ranks or not this one, or the
            parts of the ranks don't fit together (then on every rank). ``data`` is unchanged.
    """
    if not isinstance(data, DataProto):
        raise TypeError(f"all_gather_data_proto takes a DataProto, not {type(data).__name__}")
    if not dist.is_initialized():
        raise UsageError("torch.distributed has no process group yet: call init_process_group")
    ranks = dist.get_world_size(process_group)
    if ranks < 1:
        raise UsageError("this process is not in the process group")
    if size is not None and size != ranks:
        raise UsageError(f"size={size}, but the process group has {ranks} ranks")
    data.batch, data.non_tensor_batch = gather_rows(
        data.batch, data.non_tensor_batch, process_group
    )


def _rows(data: DataProto) -> int | None:
    return len(data) if has_rows(data) else None


def _cut(data: DataProto, bounds: Bounds) -> list[DataProto]:
    return [data.slice(start, stop) for start, stop in bounds]


def _pad(data: DataProto, count: int) -> DataProto:
    return data.padding(count)


def _join_results(parts: Sequence[DataProto]) -> DataProto:
    # They have just arrived and belong to nobody, so the only one with rows needs no copy.
    return _join(parts, {}, share_one=True)


def _wants_padding(data: DataProto) -> bool:
    return data.is_padding_enabled()


register_shardable(
    DataProto, Handler(_rows, _cut, _pad, _join_results, _wants_padding, joins_rowless=True)
)
