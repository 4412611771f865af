"""``WorkerGroup.union``: several groups called as one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from asyncwg import _joint
from asyncwg._catalog import Catalog
from asyncwg._core import Core
from asyncwg._job import CallOptions, Job, Target
from asyncwg._modes import CustomMode, MeshMode
from asyncwg._surface import Surface, View, changed_options, inside
from asyncwg.call import Call
from asyncwg.decorator import Dispatch, Execute
from asyncwg.errors import UsageError

__all__ = ["Union"]

Jobs = Callable[[Core, Catalog, Target, tuple[Any, ...], dict[str, Any]], Job]
"""Makes one member's share of a call."""


class Union:
    """Several groups, or views of groups, whose ranks are called as those of one.

    ``await WorkerGroup.union(trainer, rollout).sync_weights()`` calls a method that every member has
    registered, with the same mode, on all ranks of all members. The call reaches all of them in one
    step, behind what is already on its way to any of them, so a collective in it is entered by all.
    Ranks are counted through the members in the order given: dispatch splits over all of them,
    `PerRank` has an item for each, and results come in that order.

    The first failure of a rank is a failure for all: members whose ranks have not answered
    ``error_grace`` later are broken off too, unless ``on_error`` is ``"wait"``. A call that is
    cancelled is dropped by all members or by none. An ``idempotent`` method is not repeated here.

    It owns nothing and needs no end; its members live as long as it.
    """

    def __init__(self, members: Sequence[Surface]) -> None:
        self._members = tuple(members)
        _check_members(self._members)

    @property
    def members(self) -> tuple[Surface, ...]:
        """The groups and views."""
        return self._members

    @property
    def world_size(self) -> int:
        """Number of ranks in all members."""
        return sum(member.world_size for member in self._members)

    async def ready(self) -> None:
        """Wait until every rank of every member has room for another call; see `WorkerGroup.ready`."""
        await asyncio.gather(*(member.ready() for member in self._members))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Call[Any]:
        """Call a method, registered or not, on every rank, with the arguments as they are.

        Raises:
            AttributeError: a member's class has no such method.
        """

        def job(
            core: Core,
            catalog: Catalog,
            target: Target,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Job:
            return catalog.job_for(target, method_name, args, kwargs, core.options)

        return self._submit(job, args, kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call[Any]:
        """Run ``function(worker, *args, **kwargs)`` on every rank; a list by rank."""
        if not callable(function):
            raise UsageError(f"run() takes a function, not {function!r}")

        def job(
            core: Core,
            catalog: Catalog,
            target: Target,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Job:
            return catalog.job_of(target, function, args, kwargs, core.options)

        return self._submit(job, args, kwargs)

    def __getitem__(self, rank: int) -> View:
        """Return the view on one rank, counted through the members."""
        left = rank + self.world_size if rank < 0 else rank
        if left >= 0:
            for member in self._members:
                if left < member.world_size:
                    return member[left]
                left -= member.world_size
        raise IndexError(f"no rank {rank} in {self!r}")

    def __getattr__(self, name: str) -> UnionProxy:
        members: tuple[Surface, ...] = self.__dict__.get("_members", ())
        for member in members:
            _, _, catalog = inside(member)
            if name not in catalog.methods:
                raise AttributeError(catalog.no_method(name))
        if not members:
            raise AttributeError(name)
        return UnionProxy(self, name, {})

    def __dir__(self) -> list[str]:
        common = set.intersection(*(set(inside(member)[2].methods) for member in self._members))
        return sorted({*super().__dir__(), *common})

    def __repr__(self) -> str:
        return f"<union of {', '.join(map(repr, self._members))}>"

    def _submit(self, job: Jobs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call[Any]:
        shares: list[_joint.Member] = []
        for member in self._members:
            core, (ranks, _), catalog = inside(member)
            target = Target(ranks, False)
            sender = core.sender_for_call()
            share = job(core, catalog, target, args, kwargs)
            shares.append((sender, sender.calls, share, core.name))
        return _joint.submit(shares, self)


class UnionProxy:
    """A registered method on a union. Calling it sends at once and returns a `Call`."""

    def __init__(self, union: Union, name: str, options: dict[str, Any]) -> None:
        self._union = union
        self._name = name
        self._options = options
        _, _, lead = inside(union.members[0])
        self._mode = lead.modes[name]
        method = lead.methods[name]
        self.__name__ = method.name
        self.__doc__ = method.function.__doc__
        self.__wrapped__ = method.function
        self.blocking = method.options.blocking
        for member in union.members:
            _, _, catalog = inside(member)
            other = catalog.methods[name]
            if catalog.modes[name] != self._mode:
                raise UsageError(
                    f"{method.label} and {other.label} are registered with different dispatch modes: "
                    "in a union both ranks' arguments are given out by one"
                )
            if other.options.execute is not Execute.ALL or self._mode is Dispatch.RANK_ZERO:
                raise UsageError(f"{other.label} runs on one rank: call it on its own group")
            if other.kind in ("generator", "async generator"):
                raise UsageError(f"{other.label} is a generator: call it on its own group")
        if isinstance(self._mode, MeshMode):
            raise UsageError(
                f"{method.label} is split over mesh {self._mode.mesh!r}, which no union has"
            )

    def options(self, **options: Any) -> UnionProxy:
        """Return this proxy with other options; see the proxies of `WorkerGroup`."""
        changed = changed_options(CallOptions(), options, f"{self._name}.options()")
        if changed.sticky is not None:
            raise UsageError(f"{self._name}.options(): sticky is for calls to one rank of a group")
        return UnionProxy(self._union, self._name, {**self._options, **options})

    def __call__(self, *args: Any, **kwargs: Any) -> Call[Any]:
        """Send the call to every rank of every member, now.

        Raises:
            TypeError: the arguments don't fit a member's method, or one can't be pickled.
            DispatchError: they can't be given out over the ranks.
            GroupClosedError: a member does not run.
            GroupBrokenError: a member broke.
        """

        def job(
            core: Core,
            catalog: Catalog,
            target: Target,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Job:
            method = catalog.methods[self._name]
            if not isinstance(self._mode, CustomMode):
                try:
                    inspect.signature(method.function).bind(None, *args, **kwargs)
                except TypeError as error:
                    raise TypeError(f"{method.label}: {error}") from None
            own = {"timeout": method.options.timeout, "uneven": method.options.uneven}
            options = replace(core.options, **{**own, **self._options})
            number = catalog.numbers[self._name]
            return Job(target, method, self._mode, number, args, kwargs, options)

        return self._union._submit(job, args, kwargs)  # noqa: SLF001  # its other half

    def __repr__(self) -> str:
        return f"<proxy of {self._name} of {self._union!r}>"


def _check_members(members: Sequence[Surface]) -> None:
    if len(members) < 2:
        raise UsageError("a union takes two groups or more: WorkerGroup.union(trainer, rollout)")
    seen: set[tuple[int, int]] = set()
    for member in members:
        if not isinstance(member, Surface):
            raise UsageError(f"a union takes groups and views of groups, not {member!r}")
        core, target, _ = inside(member)
        if not core.own:
            raise UsageError(
                f"{member!r} is another program's: a union is of groups of one program, which gives all "
                "their ranks one order of calls"
            )
        ranks = {(id(core), rank) for rank in target.ranks}
        if not seen.isdisjoint(ranks):
            raise UsageError(f"{member!r} is in the union twice: a rank runs a call once")
        seen |= ranks
