"""From a GPU to where the bytes are to stand, through pinned memory that is used again and again.

The GPU's copy engine reaches pinned memory alone at full speed, and pinning costs more than the copy. So two
pinned chunks are kept per device: while one is copied on to its place, the GPU fills the other.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Final

CHUNK: Final = 8 << 20
"""Bytes of one chunk: long enough to hide the latency of a copy, short enough to stay in the cache."""

_chunks: dict[Any, list[Any]] = {}
_lock = threading.Lock()


def completion_of(tensor: Any) -> Any:
    """Return what tells when this thread's stream has made a tensor on a GPU; None for any other tensor.

    Another thread, which copies it, has a stream of its own and would not wait.
    """
    torch: Any = sys.modules["torch"]
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
        return None
    made = torch.cuda.Event()
    made.record(torch.cuda.current_stream(tensor.device))
    return made


def copy_to_host(tensor: Any, place: memoryview, made: Any = None) -> None:
    """Write the bytes of a tensor on a device to ``place``, in C order. Returns when they are there.

    Args:
        tensor: on any device.
        place: as many bytes.
        made: from `completion_of`, in the thread that made the tensor.
    """
    torch: Any = sys.modules["torch"]
    host = torch.frombuffer(place, dtype=torch.uint8)
    if tensor.device.type != "cuda":
        host.copy_(_flat(tensor, torch))
        return
    with _lock, torch.cuda.device(tensor.device):
        if made is not None:
            torch.cuda.current_stream().wait_event(made)
        flat = _flat(tensor, torch)
        chunks = _chunks.get(tensor.device)
        if chunks is None:
            chunks = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            _chunks[tensor.device] = chunks
        _through(flat, host, chunks, torch)


def _flat(tensor: Any, torch: Any) -> Any:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _through(flat: Any, host: Any, chunks: list[Any], torch: Any) -> None:
    starts = range(0, flat.numel(), CHUNK)
    arrived = [torch.cuda.Event() for _ in chunks]
    waiting: tuple[int, int] | None = None
    for turn, start in enumerate(starts):
        number = turn % 2
        part = flat[start : start + CHUNK]
        chunks[number][: part.numel()].copy_(part, non_blocking=True)
        arrived[number].record()
        if waiting is not None:
            _take(host, chunks, arrived, *waiting)
        waiting = (number, start)
    if waiting is not None:
        _take(host, chunks, arrived, *waiting)


def _take(host: Any, chunks: list[Any], arrived: list[Any], number: int, start: int) -> None:
    arrived[number].synchronize()
    there = host[start : start + CHUNK]
    there.copy_(chunks[number][: there.numel()])


def to_device(value: Any, device: Any) -> Any:
    """Return ``value`` with its tensors on ``device``, in lists, tuples, dicts and batches too."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list):
        return [to_device(item, device) for item in value]
    if type(value) is tuple:
        return tuple(to_device(item, device) for item in value)
    tensordict: Any = sys.modules.get("tensordict")
    protocol: Any = sys.modules.get("asyncwg.protocol")
    if (tensordict is not None and isinstance(value, tensordict.TensorDictBase)) or (
        protocol is not None and isinstance(value, protocol.DataProto)
    ):
        return value.to(device)
    return value
