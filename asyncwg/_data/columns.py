"""The columns of a table: choosing, taking out, renaming and adding them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast

import numpy as np

from asyncwg._data import reshape
from asyncwg._data.equal import same_value
from asyncwg._data.rows import Array, all_keys, as_count
from asyncwg._data.table import Table, has_rows, like, shallow
from asyncwg.errors import UsageError

if TYPE_CHECKING:
    from tensordict import TensorDict

Key: TypeAlias = "str | tuple[str, ...]"
"""A key of ``batch``; a tuple leads into nested TensorDicts."""


def _check_keys(argument: str, keys: Sequence[Any] | None, present: set[Any]) -> None:
    if isinstance(keys, str):
        raise TypeError(f"{argument} must be a list of keys, not the string {keys!r}")
    for key in keys or ():
        if key not in present:
            there = ", ".join(sorted(map(repr, present))) or "nothing"
            raise KeyError(f"{argument} names {key!r}, which is not there; there is {there}")


def _check_same_values(where: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key, value in theirs.items():
        if key in ours and not same_value(ours[key], value):
            raise UsageError(
                f"union: {where}[{key!r}] is in both, with other values; pop or rename it in one"
            )


def _fields(batch: TensorDict | None) -> dict[str, Any]:
    return {} if batch is None else dict(cast("Iterable[tuple[str, Any]]", batch.items()))


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the entries of the second to the first, in place, sharing them; return the first.

    Raises:
        UsageError: the batch sizes differ, or a key in both has other values (NaN is the same as
            NaN). Nothing was changed.
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise UsageError(f"union: the batch sizes differ: {sizes}")
    ours, theirs = _fields(tensor_dict1), _fields(tensor_dict2)
    _check_same_values("tensor_dict", ours, theirs)
    return tensor_dict1.update({key: theirs[key] for key in theirs if key not in ours})


def union_numpy_dict(
    tensor_dict1: dict[str, Array], tensor_dict2: Mapping[str, Array]
) -> dict[str, Array]:
    """Add the arrays of the second to the first, in place, sharing them; return the first.

    Raises:
        UsageError: a key in both has other values (NaN is the same as NaN). Nothing was changed.
    """
    _check_same_values("non_tensor_batch", tensor_dict1, tensor_dict2)
    for key, array in tensor_dict2.items():
        tensor_dict1.setdefault(key, array)
    return tensor_dict1


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return, by key, the values of all dicts, in their order; {} for no dicts.

    Raises:
        UsageError: the dicts don't all have the same keys.
    """
    found: dict[str, list[Any]] = {key: [] for key in (list_of_dict[0] if list_of_dict else ())}
    for i, entry in enumerate(list_of_dict):
        if entry.keys() != found.keys():
            odd = min(entry.keys() ^ found.keys(), key=repr)
            has = "has" if odd in entry else "lacks"
            raise UsageError(f"dict {i} {has} the key {odd!r}, unlike the first")
        for key, value in entry.items():
            found[key].append(value)
    return found


class Columns(Table):
    """A `Table` whose columns can be chosen, taken out, renamed and added."""

    def select(
        self,
        batch_keys: Sequence[Key] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return one with only these keys; None means all. Tensors and arrays are shared.

        Args:
            batch_keys: keys of ``batch``.
            non_tensor_batch_keys: keys of ``non_tensor_batch``.
            meta_info_keys: keys of ``meta_info``.
            deepcopy: copy tensors, arrays and meta values instead.

        Raises:
            KeyError: a key is missing.
        """
        self._check_own_keys(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = shallow(self.batch)
        if batch is not None and batch_keys is not None:
            batch = batch.select(*batch_keys)
        arrays, meta = dict(self.non_tensor_batch), dict(self.meta_info)
        if non_tensor_batch_keys is not None:
            arrays = {key: arrays[key] for key in non_tensor_batch_keys}
        if meta_info_keys is not None:
            meta = {key: meta[key] for key in meta_info_keys}
        if deepcopy:
            batch = None if batch is None else batch.clone()
            arrays, meta = copy.deepcopy(arrays), copy.deepcopy(meta)
        return like(self, batch, arrays, meta)

    def pop(
        self,
        batch_keys: Sequence[Key] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Remove these keys, in place, and return one that holds what was removed.

        Raises:
            KeyError: a key is missing; nothing was removed.
        """
        self._check_own_keys(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = None
        if self.batch is not None and batch_keys:
            batch = self.batch.select(*batch_keys)
            self.batch = self.batch.exclude(*batch_keys)
        arrays = {key: self.non_tensor_batch.pop(key) for key in non_tensor_batch_keys or ()}
        meta = {key: self.meta_info.pop(key) for key in meta_info_keys or ()}
        return like(self, batch, arrays, meta)

    def _check_own_keys(
        self,
        batch_keys: Sequence[Key] | None,
        non_tensor_batch_keys: Sequence[str] | None,
        meta_info_keys: Sequence[str] | None,
    ) -> None:
        in_batch = set[Any]() if self.batch is None else all_keys(self.batch)
        _check_keys("batch_keys", batch_keys, in_batch)
        _check_keys("non_tensor_batch_keys", non_tensor_batch_keys, set(self.non_tensor_batch))
        _check_keys("meta_info_keys", meta_info_keys, set(self.meta_info))

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename keys of ``batch``, in place, and return self. Names can be swapped.

        Raises:
            KeyError: an old key is missing.
            UsageError: not one new name per old one, or a new one is taken.
        """
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        present = set(_fields(self.batch))
        _check_keys("old_keys", old, present)
        if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
            raise UsageError(f"rename needs one new name for each key, got {old} and {new}")
        taken = sorted((present - set(old)) & set(new))
        if taken:
            raise UsageError(f"rename would overwrite batch[{taken[0]!r}]; pop it first")
        if self.batch is not None:
            renamed = self.batch.exclude(*old)
            for old_key, new_key in zip(old, new, strict=True):
                renamed.set(new_key, self.batch.get(old_key))
            self.batch = renamed
        return self

    def union(self, other: Columns) -> Self:
        """Add the keys of ``other``, in place, sharing its tensors and arrays; return self.

        Raises:
            TypeError: ``other`` is no DataProto.
            UsageError: the numbers of rows differ, or a key in both has other values (NaN is the
                same as NaN). Nothing was changed.
        """
        if not isinstance(other, Columns):
            raise TypeError(f"union takes a DataProto, not {type(other).__name__}")
        if has_rows(self) and has_rows(other) and len(self) != len(other):
            raise UsageError(f"union: {len(self)} rows here and {len(other)} in the other")
        ours, theirs = _fields(self.batch), _fields(other.batch)
        _check_same_values("batch", ours, theirs)
        _check_same_values("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        _check_same_values("meta_info", self.meta_info, other.meta_info)
        if self.batch is None:
            self.batch = shallow(other.batch)
        elif theirs.keys() - ours.keys():
            new = {key: value for key, value in theirs.items() if key not in ours}
            self.batch = self.batch.copy().update(new)
        self.non_tensor_batch = {**self.non_tensor_batch, **other.non_tensor_batch}
        self.meta_info = {**self.meta_info, **other.meta_info}
        self.auto_padding = self.auto_padding or other.auto_padding
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Return ``n_split`` rows for each: columns of ``split_keys`` are cut, others repeated.

        A tensor of shape ``(n, c, ...)`` under one of ``split_keys`` becomes
        ``(n * n_split, c / n_split, ...)``; without ``split_keys`` all are repeated.

        Raises:
            KeyError: a key is in neither part.
            UsageError: ``n_split`` does not divide the columns.
        """
        parts = as_count("n_split", n_split)
        keys = list(split_keys or ())
        in_batch = set[Any]() if self.batch is None else all_keys(self.batch)
        _check_keys("split_keys", keys, in_batch | self.non_tensor_batch.keys())
        batch = None
        if self.batch is not None:
            repeated = np.repeat(np.arange(len(self)), parts)
            here = [key for key in keys if key in in_batch]
            batch = reshape.unfold_columns(self.batch, here, parts, repeated)
        arrays = reshape.unfold_array_columns(self.non_tensor_batch, keys, parts)
        return like(self, batch, arrays)
