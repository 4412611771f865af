"""A TensorDict as plain dicts of tensors, so that a pickler meets each tensor by itself.

TensorDict's own way joins all tensors into one storage first: a copy of everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from tensordict import TensorDict

if TYPE_CHECKING:
    import torch


class Packed(NamedTuple):
    """What `unpack` needs to build the TensorDict again."""

    fields: dict[str, Any]
    batch_size: tuple[int, ...]
    has_device: bool
    names: Any


def pack(batch: Any) -> Any:
    """Return a `Packed` for a TensorDict, and anything else (a lazy stack) as it is."""
    if type(batch) is not TensorDict:
        return batch
    items = cast("Iterable[tuple[str, Any]]", batch.items())
    return Packed(
        {key: pack(value) for key, value in items},
        tuple(batch.batch_size),
        batch.device is not None,
        batch.names if any(batch.names) else None,
    )


def unpack(packed: Any) -> Any:
    """Return the TensorDict; unlocked, for whoever unpickles it owns it.

    It is tied to a device if the original was: to the one on which its tensors have arrived.
    """
    if not isinstance(packed, Packed):
        return packed
    fields = {key: unpack(value) for key, value in packed.fields.items()}
    device = _common_device(fields) if packed.has_device else None
    batch = TensorDict(fields, batch_size=packed.batch_size, device=device)
    if packed.names is not None:
        batch.names = packed.names  # the constructor refuses them where a nested one has more
    return batch


def _common_device(fields: dict[str, Any]) -> torch.device | None:
    devices = {value.device for value in fields.values()} - {None}
    return cast("torch.device", devices.pop()) if len(devices) == 1 else None
