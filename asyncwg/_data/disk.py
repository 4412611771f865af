"""A batch in a file: whole or not at all, and readable on a machine without the device."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from tensordict import TensorDict


def compact(batch: TensorDict) -> TensorDict:
    """Return ``batch`` on the CPU, detached, each tensor with no more storage than it fills.

    Pickle writes the storage behind a view; without this, ten rows of a large batch would take
    the place of all.
    """
    # A device of None unties the result; without the argument it is tied to the batch's.
    device = None if batch.device is None else torch.device("cpu")
    compacted = batch.apply(_compact_tensor, device=device)
    return cast("TensorDict", compacted)


def _compact_tensor(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    if tensor.is_nested or tensor.layout is not torch.strided:
        return tensor
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def write_atomically(path: str | os.PathLike[str], value: Any) -> None:
    """Pickle ``value`` into ``path``; a reader sees the old file or the new one, never a part.

    The data is on disk before it takes the old file's place.
    """
    target = Path(path)
    # In the same folder, for a file system can only replace within itself.
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            pickle.dump(value, file, protocol=pickle.HIGHEST_PROTOCOL)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def read(path: str | os.PathLike[str]) -> Any:
    """Unpickle what ``path`` holds."""
    with Path(path).open("rb") as file:
        return pickle.load(file)
