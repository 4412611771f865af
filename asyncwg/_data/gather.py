"""The rows of all ranks of a process group, on every rank.

First each rank tells the others what it has, in one object gather; that also carries what has no
plain memory (arrays, jagged tensors). Then the bytes of each dense tensor go by themselves. All
ranks judge the same descriptions, so where they don't fit all raise, and none waits for ever.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
import torch.distributed as dist

from asyncwg._data.pack import Packed, pack, unpack
from asyncwg._data.rows import Array, check_same_keys, concat_arrays, concat_batches, leaves
from asyncwg.errors import UsageError

if TYPE_CHECKING:
    from tensordict import TensorDict

_WHO: Final = "all_gather_data_proto: rank"


class _Description(NamedTuple):
    """What one rank has. ``tensors``: (dtype, shape of one row) of what goes as bytes, by key."""

    rows: int | None
    tensors: dict[Any, tuple[torch.dtype, tuple[int, ...]]]
    odd: Packed | None
    arrays: dict[str, Array]


def gather_rows(
    batch: TensorDict | None, arrays: Mapping[str, Array], group: Any
) -> tuple[TensorDict | None, dict[str, Array]]:
    """Return the rows of all ranks in rank order, on the device of ``batch``.

    Raises:
        UsageError: the ranks differ in keys, dtypes or shapes beyond the rows, or one has what
            can't be pickled. Every rank raises it.
    """
    dense = {} if batch is None else {k: v for k, v in leaves(batch).items() if _is_dense(v)}
    described = _exchange(lambda: _describe(batch, dense, arrays), group)
    _check_alike(described)
    gathered_arrays = concat_arrays([one.arrays for one in described], _WHO)
    if batch is None:
        return None, gathered_arrays
    whole = _odd_rows(batch, described)
    counts = [cast("int", one.rows) for one in described]
    # Each rank's dict has an order of its own; the collectives need one for all.
    for key in sorted(dense, key=str):
        whole.set(key, _gather_tensor(dense[key], counts, group))
    return whole.select(*batch.keys()), gathered_arrays


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized


def _describe(
    batch: TensorDict | None, dense: Mapping[Any, torch.Tensor], arrays: Mapping[str, Array]
) -> _Description:
    if batch is None:
        return _Description(None, {}, None, dict(arrays))
    tensors = {key: (value.dtype, tuple(value.shape[1:])) for key, value in dense.items()}
    odd = pack(batch.exclude(*dense).cpu())
    return _Description(batch.batch_size[0], tensors, odd, dict(arrays))


def _exchange(describe: Callable[[], _Description], group: Any) -> list[_Description]:
    try:
        mine: bytes | str = pickle.dumps(describe())
    except Exception as error:  # noqa: BLE001  # the others wait: they must hear of it, whatever it is
        mine = f"{type(error).__name__}: {error}"
    received: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(received, mine, group=group)
    for rank, one in enumerate(received):
        if isinstance(one, str):
            raise UsageError(f"all_gather_data_proto: the data of rank {rank} can't travel: {one}")
    return [pickle.loads(one) for one in received]


def _check_alike(described: Sequence[_Description]) -> None:
    first = described[0]
    for rank, one in enumerate(described):
        if (one.rows is None) != (first.rows is None):
            raise UsageError(f"all_gather_data_proto: only one of ranks 0 and {rank} has tensors")
        check_same_keys("batch", set(first.tensors), set(one.tensors), rank, _WHO)
        for key, kind in one.tensors.items():
            if kind != first.tensors[key]:
                raise UsageError(
                    f"all_gather_data_proto: a row of batch[{key!r}] is {kind} on rank {rank} "
                    f"and {first.tensors[key]} on rank 0; make them alike first"
                )


def _gather_tensor(tensor: torch.Tensor, counts: Sequence[int], group: Any) -> torch.Tensor:
    # As bytes: gloo has no bfloat16, float8 or bool gather, and bytes are the same for all.
    # Collectives want equal sizes: every rank sends as many rows as the longest has.
    longest = max(counts)
    data = tensor.detach().resolve_conj().resolve_neg().contiguous()
    shape = tuple(data.shape[1:])
    row_bytes = data.element_size() * math.prod(shape)
    if not longest or not row_bytes:
        return data.new_empty((sum(counts), *shape))
    carrier = _carrier(data.device, group)
    sent = torch.zeros(longest * row_bytes, dtype=torch.uint8, device=carrier)
    sent[: data.nbytes] = data.reshape(-1).view(torch.uint8)
    received = torch.empty(len(counts), longest * row_bytes, dtype=torch.uint8, device=carrier)
    dist.all_gather(list(received.unbind(0)), sent, group=group)
    parts = [
        row[: count * row_bytes].view(data.dtype).reshape(count, *shape)
        for row, count in zip(received, counts, strict=True)
    ]
    return torch.cat(parts).to(data.device)


def _carrier(device: torch.device, group: Any) -> torch.device:
    backend = dist.get_backend(group)
    if backend == "gloo":
        return torch.device("cpu")
    if backend == "nccl" and device.type != "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _odd_rows(batch: TensorDict, described: Sequence[_Description]) -> TensorDict:
    """Return all that came with the descriptions: odd fields, and the shells of nested ones."""
    whole = concat_batches([unpack(one.odd) for one in described], _WHO)
    home = batch.device or next((value.device for value in leaves(batch).values()), None)
    if home is not None:
        whole = whole.to(home)
    if batch.device is None:
        whole.clear_device_()
    return whole
