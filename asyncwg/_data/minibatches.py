"""Which rows come together in which mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from asyncwg._data.rows import Array, as_count
from asyncwg.errors import UsageError

_OURS: Final = frozenset({"dataset", "batch_size", "batch_sampler", "collate_fn", "generator"})
"""Options of DataLoader that the arguments of `minibatch_indices` stand for."""


def minibatch_indices(
    rows: int, size: int, epochs: int, seed: int | None, options: Mapping[str, Any]
) -> Iterator[Array]:
    """Return an iterator over the row numbers of each mini-batch of each epoch.

    A DataLoader over row numbers draws them, so ``shuffle``, ``sampler`` and the like do what they
    do there, and one seed gives one order. Everything is checked before this returns.

    Raises:
        TypeError: a count that is no integer.
        UsageError: ``size`` does not divide ``rows``, or an option is not the caller's to choose.
    """
    size, epochs = as_count("mini_batch_size", size), as_count("epochs", epochs, 0)
    if rows % size:
        raise UsageError(
            f"{rows} rows are not divisible by mini_batch_size={size}; choose another size or pad "
            "with pad_dataproto_to_divisor(data, mini_batch_size)"
        )
    taken = sorted(_OURS & options.keys())
    if taken:
        raise UsageError(
            f"dataloader_kwargs can't hold {', '.join(taken)}: mini_batch_size and seed stand "
            "for these, and the batches are always DataProto"
        )
    if not rows:
        return iter(())  # some samplers refuse to draw from nothing
    generator = None
    if seed is not None:
        generator = torch.Generator()
        generator.manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(
        cast("Any", range(rows)),
        batch_size=size,
        collate_fn=_as_array,
        generator=generator,
        **options,
    )
    return _epochs(loader, epochs)


def _epochs(loader: DataLoader[Any], epochs: int) -> Iterator[Array]:
    for _ in range(epochs):
        yield from loader


def _as_array(rows: list[int]) -> Array:
    return np.asarray(rows, dtype=np.int64)
