"""``asyncwg.link``: two groups that exchange tensors without the controller."""

from __future__ import annotations

import asyncio
from typing import Any, Self

from asyncwg import distributed
from asyncwg._job import nearest
from asyncwg._surface import Surface, inside
from asyncwg._union import Union
from asyncwg._worker import links
from asyncwg.decorator import PerRank
from asyncwg.errors import AsyncwgError, UsageError

__all__ = ["Link", "link"]

BUCKET: int = 64 << 20
"""Bytes that travel at a time: large enough that a broadcast is bound by bandwidth, small enough that
two of them are no burden."""


def link(
    first: Surface,
    second: Surface,
    backend: str | None = None,
    *,
    name: str | None = None,
    timeout: float = 600.0,
) -> Link:
    """Link two groups: ``async with asyncwg.link(trainer, rollout) as link``.

    Inside, the ranks of both are one process group, which each worker sees as ``self.links[name]``:
    first the ranks of ``first``, then those of ``second``. Neither group's default process group is touched.

    Args:
        first: a group, or a view of one; its first rank gives what `Link.broadcast_state` sends.
        second: another one.
        backend: ``"nccl"`` or ``"gloo"``; None for NCCL where both groups are on GPUs, else gloo, and then
            states travel through shared memory, which is faster on one machine.
        name: of the link; None for ``"first-second"``.
        timeout: seconds that joining, and each collective, may take.

    Raises:
        UsageError: the two share ranks, or are no groups.
    """
    return Link(first, second, backend, name=name, timeout=timeout)


class Link:
    """Two groups as one process group, while its ``async with`` lasts; see `link`."""

    def __init__(
        self,
        first: Surface,
        second: Surface,
        backend: str | None,
        *,
        name: str | None,
        timeout: float,
    ) -> None:
        if backend not in (None, "nccl", "gloo"):
            raise UsageError(f"backend must be 'nccl', 'gloo' or None, not {backend!r}")
        self.both = Union([first, second])
        """Both sides, to be called as one: both enter a collective together, or neither."""
        self._first, self._second = first, second
        sides = [inside(side)[0] for side in (first, second)]
        self.name = "-".join(core.name for core in sides) if name is None else name
        """The key of ``self.links`` in the workers."""
        on_gpus = all(core.pool.use_gpu for core in sides)
        self.backend = backend or ("nccl" if on_gpus else "gloo")
        """What the process group runs on."""
        self._through_arena = backend is None and not on_gpus
        self._timeout = timeout
        self._store: distributed.Store | None = None

    async def __aenter__(self) -> Self:
        """Form the process group, on all ranks of both groups or on none.

        Raises:
            UsageError: it is open already.
            WorkerGroupError: a rank could not join. As with any call of both groups, a rank that does
                not answer is broken off with its group.
        """
        if self._store is not None:
            raise UsageError(f"link {self.name!r} is open already")
        self._store = distributed.Store(asyncio.get_running_loop())
        size, firsts = self.both.world_size, self._first.world_size
        try:
            await self.both.run(
                links.join, self.name, self._store.port, PerRank(list(range(size))), firsts, size,
                self.backend, self._timeout,
            )  # fmt: skip
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        """Leave the process group. After a failure inside, what goes wrong here is not told too."""
        try:
            await self.both.run(links.leave, self.name)
        except AsyncwgError as leaving:
            if error is None:
                raise
            error.add_note(f"and then link {self.name!r} could not be left: {leaving}")
        finally:
            self._close()

    async def broadcast_state(
        self, state_method: str, load_method: str, *, bucket: int = BUCKET
    ) -> list[Any]:
        """Move a state dict from the first rank of the first side to every rank of the second.

        ``state_method`` runs on all ranks of the first side, as gathering a sharded model needs; what the
        first of them returns counts. ``load_method`` is called with it on every rank of the second side.
        Neither needs to be registered; both may be ``async def``. Tensors arrive as they were: dtype,
        shape and names in their order, contiguous, on the device of the backend; other values go along.

        With a backend of its own the state goes from rank to rank in buckets, one filled while the one before
        is on its way; otherwise through shared memory, with one copy for all readers.

        Args:
            state_method: returns the state dict.
            load_method: takes it.
            bucket: bytes of a bucket; a larger tensor has one of its own.

        Returns:
            What ``load_method`` returned, by rank of the second side.

        Raises:
            UsageError: the link is not open, or the state is no dict.
            AttributeError: a side has no such method.
            WorkerGroupError: what either method raised. One failure ends both sides' part in it.

        Cancelling it drops the call on all ranks of both sides, or lets it end there for nobody.
        """
        if self._store is None:
            raise UsageError(f"link {self.name!r} is not open: use it with 'async with'")
        for side, method in ((self._first, state_method), (self._second, load_method)):
            cls = inside(side)[2].cls
            if not callable(getattr(cls, method, None)):
                raise AttributeError(  # noqa: TRY004  # what a misspelt name raises everywhere
                    f"{cls.__name__} has no method {method!r}{nearest(method, dir(cls))}"
                )
        if self._through_arena:
            _, (ranks, single), _ = inside(self._first)
            _, (_, alone), _ = inside(self._second)
            states = self._first.run(links.state_of, state_method, ranks[0])
            loaded = await self._second.run(links.load, load_method, states, not single)
            return [loaded] if alone else list(loaded)
        firsts = self._first.world_size
        sides = PerRank([True] * firsts + [False] * self._second.world_size)
        done: list[Any] = await self.both.run(
            _move, sides, self.name, state_method, load_method, bucket
        )
        return done[firsts:]

    def _close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def __repr__(self) -> str:
        return f"<Link {self.name!r} of {self._first!r} and {self._second!r}, {self.backend}>"


def _move(
    worker: Any, gives: bool, name: str, state_method: str, load_method: str, bucket: int
) -> Any:
    if gives:
        return links.give_state(worker, name, state_method, bucket)
    return links.take_state(worker, name, load_method)
