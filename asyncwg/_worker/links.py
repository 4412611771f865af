"""What a link does in the workers: join a process group over two groups, move a state dict through it.

These functions run in the main thread of each rank, all of them in one call of both groups.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from asyncwg._worker import context
from asyncwg.errors import UsageError

_ALIGN: Final = 16
"""Bytes. What the widest dtype needs."""
_HOST: Final = "127.0.0.1"

_sources: dict[str, Any] = {}
"""By link, the process group over rank 0 of the first side and all of the second, of this process."""


class Entry(NamedTuple):
    """Where one tensor of a state dict stands."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    bucket: int
    offset: int
    nbytes: int


class Layout(NamedTuple):
    """What a state dict consists of. Rank 0 tells it to the others."""

    entries: list[Entry]
    sizes: list[int]
    """Bytes of each bucket."""
    others: dict[str, Any]
    """What is no tensor."""
    order: list[str]


def join(
    worker: Any,
    name: str,
    port: int,
    rank: int,
    firsts: int,
    size: int,
    backend: str,
    timeout: float,
) -> None:
    """Join the process group of a link, as ``worker.links[name]``. The default group is left alone.

    Args:
        worker: the user's object.
        name: of the link.
        port: of the store that the controller made for it.
        rank: of this worker in the link: first the ranks of the first side.
        firsts: how many ranks the first side has.
        size: ranks in all.
        backend: ``"nccl"`` or ``"gloo"``.
        timeout: seconds that joining, and each collective, may take.
    """
    import torch  # import here: only for those who use it
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    limit = timedelta(seconds=timeout)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # not in its stub's __all__
    store = make(_HOST, port, is_master=False, timeout=limit)
    if "links" not in vars(worker):
        worker.links = {}
    worker.links[name] = _group(f"asyncwg-link-{port}", store, rank, size, backend, limit)
    if rank == 0 or rank >= firsts:
        place = 0 if rank == 0 else rank - firsts + 1
        members = size - firsts + 1
        _sources[name] = _group(f"asyncwg-link-{port}-0", store, place, members, backend, limit)


def _group(name: str, store: Any, rank: int, size: int, backend: str, timeout: timedelta) -> Any:
    """Make a process group of its own, which needs no default group and is not made from one.

    torch offers no public way to that.
    """
    import torch.distributed as dist  # import here: torch is loaded already
    import torch.distributed.distributed_c10d as c10d

    make: Any = c10d._new_process_group_helper  # noqa: SLF001
    group, _ = make(size, rank, [], dist.Backend(backend), store, group_name=name, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}  # noqa: SLF001
    return group


def leave(worker: Any, name: str) -> None:
    """Leave the process group of a link."""
    import torch.distributed as dist  # import here: torch is loaded already

    for group in (vars(worker).get("links", {}).pop(name, None), _sources.pop(name, None)):
        if group is not None:
            dist.destroy_process_group(group)


def give_state(worker: Any, name: str, method: str, bucket: int) -> None:
    """Make the state dict on this rank, and on rank 0 send it to the second side, bucket by bucket."""
    state = _call(getattr(worker, method))
    if name not in vars(worker).get("links", {}):
        raise _not_joined(name)
    group = _sources.get(name)
    if group is None:
        return  # only rank 0 sends; the others were needed to make the state
    if not isinstance(state, Mapping):
        raise UsageError(f"{method} must return a state dict, not {state!r}")
    layout, tensors = _layout(state, bucket)
    _tell(layout, group)
    _send(layout, tensors, group)


def take_state(worker: Any, name: str, method: str) -> Any:
    """Receive a state dict and load it; returns what the method that loads it returns."""
    group = _sources.get(name)
    if group is None:
        raise _not_joined(name)
    state = _receive(_told(group), group)
    return _call(getattr(worker, method), state)


def state_of(worker: Any, method: str, first: int) -> Any:
    """Make the state dict on this rank; its value on the first of the side alone."""
    import torch  # import here: only for those who use it

    state = _call(getattr(worker, method))
    if context.place is not None and context.place.rank != first:
        return None
    if not isinstance(state, Mapping):
        raise UsageError(f"{method} must return a state dict, not {state!r}")
    return {
        name: value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def load(worker: Any, method: str, states: Any, by_rank: bool) -> Any:
    """Load the state dict of the first rank; returns what the method that loads it returns."""
    return _call(getattr(worker, method), states[0] if by_rank else states)


def _call(method: Any, *args: Any) -> Any:
    value = method(*args)
    if not inspect.isawaitable(value):
        return value
    if context.loop is None:
        return asyncio.run(_awaited(value))
    return asyncio.run_coroutine_threadsafe(_awaited(value), context.loop).result()


async def _awaited(value: Any) -> Any:
    return await value


def _not_joined(name: str) -> UsageError:
    return UsageError(
        f"this rank has not joined link {name!r}: a group that was started again is linked again"
    )


def _layout(state: Mapping[str, Any], bucket: int) -> tuple[Layout, dict[str, Any]]:
    import torch  # import here: torch is loaded already

    tensors = {
        name: value.detach() for name, value in state.items() if isinstance(value, torch.Tensor)
    }
    entries: list[Entry] = []
    sizes: list[int] = []
    end = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if not sizes or (end + nbytes > bucket and end):
            sizes.append(0)
            end = 0
        shape = tuple(tensor.shape)
        entries.append(Entry(name, tensor.dtype, shape, len(sizes) - 1, end, nbytes))
        end += -(-nbytes // _ALIGN) * _ALIGN
        sizes[-1] = end
    others = {name: value for name, value in state.items() if name not in tensors}
    return Layout(entries, sizes, others, list(state)), tensors


def _device(group: Any) -> Any:
    import torch  # import here: torch is loaded already
    import torch.distributed as dist

    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tell(layout: Layout, group: Any) -> None:
    import torch.distributed as dist  # import here: torch is loaded already

    dist.broadcast_object_list([layout], src=0, group=group, device=_device(group))


def _told(group: Any) -> Layout:
    import torch.distributed as dist  # import here: torch is loaded already

    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0, group=group, device=_device(group))
    layout: Layout = box[0]
    return layout


def _send(layout: Layout, tensors: Mapping[str, Any], group: Any) -> None:
    """Fill one bucket while the one before is on its way; two take turns."""
    import torch  # import here: torch is loaded already
    import torch.distributed as dist

    room = torch.empty(2, max(layout.sizes, default=0), dtype=torch.uint8, device=_device(group))
    work: list[Any] = [None, None]
    by_bucket = _by_bucket(layout)
    for number, size in enumerate(layout.sizes):
        turn = number % 2
        if work[turn] is not None:
            work[turn].wait()
        bucket = room[turn, :size]
        for entry in by_bucket[number]:
            _view(bucket, entry).copy_(tensors[entry.name])
        if size:
            work[turn] = dist.broadcast(bucket, 0, group=group, async_op=True)
    for each in work:
        if each is not None:
            each.wait()


def _receive(layout: Layout, group: Any) -> dict[str, Any]:
    """Take all buckets; the tensors are views of them."""
    import torch  # import here: torch is loaded already
    import torch.distributed as dist

    device = _device(group)
    buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in layout.sizes]
    full = [bucket for bucket in buckets if bucket.numel()]
    works: list[Any] = [dist.broadcast(each, 0, group=group, async_op=True) for each in full]
    for work in works:
        work.wait()
    found = {entry.name: _view(buckets[entry.bucket], entry) for entry in layout.entries}
    return {name: found[name] if name in found else layout.others[name] for name in layout.order}


def _by_bucket(layout: Layout) -> list[list[Entry]]:
    entries: list[list[Entry]] = [[] for _ in layout.sizes]
    for entry in layout.entries:
        entries[entry.bucket].append(entry)
    return entries


def _view(bucket: Any, entry: Entry) -> Any:
    flat = bucket[entry.offset : entry.offset + entry.nbytes]
    return flat.view(entry.dtype).view(entry.shape)
