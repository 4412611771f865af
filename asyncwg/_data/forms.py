"""What a batch can be made from and turned into: dicts, TensorDicts, files, words."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncwg._data import disk, interop
from asyncwg._data.columns import Columns
from asyncwg._data.rows import Array, leaves, object_rows
from asyncwg._data.table import like, shallow
from asyncwg.errors import UsageError


def _check_batch_dims(num_batch_dims: int) -> None:
    if num_batch_dims != 1:
        raise UsageError(
            f"num_batch_dims={num_batch_dims}: a DataProto has one batch dimension; "
            "unfold_batch_dim makes several into one"
        )


def _as_batch(tensors: Mapping[str, Any]) -> TensorDict:
    rows: int | None = None
    first = ""
    for key, value in tensors.items():
        if not isinstance(value, (torch.Tensor, TensorDictBase)):
            raise TypeError(
                f"tensors[{key!r}] is a {type(value).__name__}, not a tensor; "
                "rows of anything else go into non_tensors"
            )
        if not value.ndim:
            raise UsageError(
                f"tensors[{key!r}] has no rows, its shape is (); facts about the "
                "whole go into meta_info"
            )
        if rows is None:
            rows, first = value.shape[0], key
        elif value.shape[0] != rows:
            raise UsageError(
                f"tensors[{key!r}] has {value.shape[0]} rows, tensors[{first!r}] has {rows}; "
                "all must have the same number"
            )
    return TensorDict(dict(tensors), batch_size=[cast("int", rows)])


def _as_rows(key: str, value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return cast("Array", value)
    if isinstance(value, (list, tuple)):
        return object_rows(cast("Sequence[Any]", value))
    where = "tensors" if isinstance(value, torch.Tensor) else "meta_info"
    raise TypeError(
        f"non_tensors[{key!r}] is a {type(value).__name__}, neither array nor list; "
        f"it may belong into {where}"
    )


class Forms(Columns):
    """A table with its ways from and to other forms."""

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Build one from dicts, which are left as they are; tensors and arrays are shared.

        Args:
            tensors: tensors of shape ``(rows, ...)``, or TensorDicts of as many rows.
            non_tensors: arrays of ``rows`` entries, or lists and tuples: each becomes a 1-D
                object array with one element per item, also where the items are lists.
            meta_info: facts about the whole.
            num_batch_dims: 1; there for verl's sake.
            auto_padding: let a group that splits this pad it.

        Raises:
            TypeError: a value is neither of these.
            UsageError: the numbers of rows differ, or ``num_batch_dims`` is not 1.
        """
        _check_batch_dims(num_batch_dims)
        arrays = {key: _as_rows(key, value) for key, value in (non_tensors or {}).items()}
        batch = _as_batch(tensors) if tensors else None
        return cls(batch, arrays, dict(meta_info or {}), auto_padding=auto_padding)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Any],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Build one from a dict that holds tensors (and TensorDicts) and arrays, as `from_dict`.

        Raises:
            UsageError: a value is neither tensor nor array, or the numbers of rows differ.
        """
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for key, value in data.items():
            if isinstance(value, (torch.Tensor, TensorDictBase)):
                tensors[key] = value
            elif isinstance(value, np.ndarray):
                arrays[key] = value
            else:
                raise UsageError(
                    f"data[{key!r}] is a {type(value).__name__}, neither tensor nor array; "
                    "give rows that are a list to from_dict(non_tensors=...)"
                )
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Build one from a TensorDict, which is left as it is; tensors are shared.

        ``NonTensorStack`` entries become arrays, ``NonTensorData`` entries become ``meta_info``,
        beside what ``meta_info`` gives (which wins).

        Raises:
            TypeError: not a TensorDict.
            UsageError: it has no batch dimension, or ``num_batch_dims`` is not 1.
        """
        _check_batch_dims(num_batch_dims)
        if not isinstance(tensor_dict, TensorDictBase):
            raise TypeError(f"from_tensordict takes a TensorDict, not {type(tensor_dict).__name__}")
        if not tensor_dict.batch_dims:
            raise UsageError("the TensorDict has no batch dimension; give it batch_size=[rows]")
        fields, arrays, meta = interop.from_entries(tensor_dict)
        rows = tensor_dict.batch_size[:1]
        batch = TensorDict(fields, batch_size=rows, device=tensor_dict.device)
        return cls(batch, arrays, {**meta, **(meta_info or {})})

    def to_tensordict(self) -> TensorDict:
        """Return one TensorDict that holds everything; tensors are shared.

        Arrays become ``NonTensorStack`` entries, row by row, meta values ``NonTensorData``.

        Raises:
            UsageError: two of the three parts have the same key.
        """
        batch = shallow(self.batch)
        if batch is None:
            batch = TensorDict({}, batch_size=[len(self)])
        interop.check_distinct(
            {
                "batch": cast("Any", batch.keys()),
                "non_tensor_batch": self.non_tensor_batch,
                "meta_info": self.meta_info,
            }
        )
        entries = interop.to_entries(self.non_tensor_batch, self.meta_info, len(self))
        return batch.update(entries)

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write this to a file, which then holds all of it or what it held before.

        Tensors are written detached and from the CPU.
        """
        batch = None if self.batch is None else disk.compact(self.batch)
        disk.write_atomically(filepath, like(self, batch, self.non_tensor_batch))

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Read what `save_to_disk` wrote, with tensors on the CPU. Only load files you trust.

        Raises:
            TypeError: the file holds something else.
        """
        loaded = disk.read(filepath)
        if not isinstance(loaded, cls):
            raise TypeError(f"{filepath} holds a {type(loaded).__name__}, not a {cls.__name__}")
        return loaded

    def get_data_info(self) -> str:
        """Return the names, shapes and types of all parts, a line each."""
        tensors = {} if self.batch is None else leaves(self.batch)
        lines = [f"{type(self).__name__} of {len(self)} rows"]
        for key, tensor in tensors.items():
            lines.append(f"  batch[{key!r}]: {tuple(tensor.shape)} {tensor.dtype} {tensor.device}")
        for key, array in self.non_tensor_batch.items():
            lines.append(f"  non_tensor_batch[{key!r}]: {array.shape} {array.dtype}")
        lines.extend(
            f"  meta_info[{key!r}]: {type(self.meta_info[key]).__name__}" for key in self.meta_info
        )
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Print how many GiB the tensors take, and the arrays (pickled, as they would travel)."""
        tensors = 0 if self.batch is None else sum(t.nbytes for t in leaves(self.batch).values())
        arrays = len(pickle.dumps(self.non_tensor_batch))
        sys.stdout.write(
            f"{prefix + ', ' if prefix else ''}tensors: {tensors / 2**30:.6f} GiB, "
            f"arrays: {arrays / 2**30:.6f} GiB\n"
        )
