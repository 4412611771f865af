"""The proxies, views and unions of blocking groups: each stands on one of `asyncwg._surface`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from asyncwg import _surface, _union
from asyncwg._handle import Handle, mapped, send
from asyncwg._hold import Hold
from asyncwg._registered import BlockingOnGroup, BlockingOnRank
from asyncwg.errors import UsageError

Q = ParamSpec("Q")
T = TypeVar("T")


class Proxy:
    """A registered method as a plain function."""

    def __init__(
        self,
        hold: Hold,
        proxy: _surface.Proxy | _union.UnionProxy,
        waits: bool | None = None,
    ) -> None:
        self._hold = hold
        self._proxy = proxy
        self._waits = proxy.blocking if waits is None else waits
        self.__name__ = proxy.__name__
        self.__doc__ = proxy.__doc__
        self.__wrapped__ = proxy.__wrapped__

    @property
    def __signature__(self) -> inspect.Signature:
        _self, *parameters = inspect.signature(self.__wrapped__).parameters.values()
        return inspect.signature(self.__wrapped__).replace(parameters=parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method on its ranks; see `asyncwg.WorkerGroup`.

        The arguments are taken as they are when it returns, or earlier (O-7).
        """
        return send(self._hold, self._proxy, args, kwargs, self._waits)

    def options(self, *, blocking: bool | None = None, **options: Any) -> Proxy:
        """Return this proxy with other options: ``wg.step.options(blocking=False)(batch)``.

        Args:
            blocking: True to return the value, False to return a handle.
            **options: as in `asyncwg.WorkerGroup`.
        """
        waits = self._waits if blocking is None else blocking
        return Proxy(self._hold, self._proxy.options(**options), waits)

    def __repr__(self) -> str:
        return f"<blocking {repr(self._proxy).removeprefix('<')}"


class Callee:
    """A group, a view on some of its ranks, or a union: what proxies hang on."""

    def __init__(self, hold: Hold, inner: Any) -> None:
        self._hold = hold
        self._inner = inner

    @property
    def world_size(self) -> int:
        """Number of ranks here."""
        size: int = self._inner.world_size
        return size

    def ready(self) -> None:
        """Wait until every rank here has room for another call; for whoever makes many handles."""
        self._hold.running().run(self._inner.ready)

    def execute_all(self, method_name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call a method, registered or not, on every rank here; the same as ``execute_all_async``.

        As in verl it returns at once. The arguments go to every rank as they are, `PerRank` gives each its
        own; nothing is guessed from the lengths of lists.
        """
        handle: Handle[Any] = send(
            self._hold,
            functools.partial(self._inner.execute_all, method_name),
            args,
            kwargs,
            waits=False,
        )
        return handle

    execute_all_async = execute_all

    def execute_all_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, registered or not, on every rank here; a list by rank (a value on one rank)."""
        call = functools.partial(self._inner.execute_all, method_name)
        return send(self._hold, call, args, kwargs, waits=True)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``function(worker, *args, **kwargs)`` on every rank here; a list by rank."""
        call = functools.partial(self._inner.run, function)
        return send(self._hold, call, args, kwargs, waits=True)

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        found = None if inner is None else getattr(inner, name)
        if isinstance(found, _surface.Proxy | _union.UnionProxy):
            proxy = self.__dict__[name] = Proxy(self._hold, found)
            return proxy
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_names_of_methods(self._inner)})

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner).removeprefix('<')}"


class Surface(Callee):
    """A group, or a view on some of its ranks."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Arrive in another process as an `asyncwg.WorkerGroup`, or a view of one, that calls this group.

        Raises:
            UsageError: the group is neither detached nor attachable.
        """
        return self._inner.__reduce_ex__(protocol)

    def execute_rank_zero(self, method_name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call a method on the first rank here; the same as ``execute_rank_zero_async``, as in verl."""
        handle: Handle[Any] = send(
            self._hold,
            functools.partial(self._inner.execute_rank_zero, method_name),
            args,
            kwargs,
            waits=False,
        )
        return handle

    execute_rank_zero_async = execute_rank_zero

    def execute_rank_zero_sync(self, method_name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method, registered or not, on the first rank here; its value."""
        call = functools.partial(self._inner.execute_rank_zero, method_name)
        return send(self._hold, call, args, kwargs, waits=True)

    @property
    def any(self) -> AnyRank:
        """Whichever rank here has the least to do: ``wg.any.generate(prompt)``."""
        return AnyRank(self._hold, self._inner.any)

    def map(
        self,
        method: str | Callable[..., Any],
        items: Iterable[Any],
        *,
        ordered: bool = False,
        max_inflight: int | None = None,
        with_items: bool = False,
    ) -> Iterator[Any]:
        """Call a method once for each item, on whichever rank has the least to do, and yield the results.

        ``for result in wg.map("generate", prompts)``: as `asyncwg.WorkerGroup.map`, and ``items`` are read
        in this thread.
        """
        if not isinstance(items, Iterable):
            raise UsageError(f"map() takes items that can be iterated over, not {items!r}")
        found = self._inner._mapped(method, max_inflight)  # noqa: SLF001  # one of us
        return mapped(self._hold, found, items, ordered=ordered, with_items=with_items)

    def rank(self, index: int) -> RankView:
        """Return the view on one rank; the same as ``wg[index]``."""
        return self[index]

    def call(self, method: BlockingOnGroup[Q, T], /, *args: Q.args, **kwargs: Q.kwargs) -> T:
        """Call a registered method given as a function: ``wg.call(Trainer.step, batch)``.

        The same as ``wg.step(batch)``, and type checkers know it: see `asyncwg.WorkerGroup`.

        Raises:
            AttributeError: the group's class has no such registered method.
        """
        name = self._inner._name_of(method)  # noqa: SLF001  # one of us
        result: T = getattr(self, name)(*args, **kwargs)
        return result

    @overload
    def __getitem__(self, index: int) -> RankView: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: int | slice) -> View:
        """Return a view: ``wg[1:3]`` on some ranks, ``wg[0]`` on one, whose calls give its value.

        Raises:
            IndexError: there is no such rank, or no rank at all in the slice.
        """
        inner = self._inner[index]
        return (RankView if isinstance(inner, _surface.RankView) else View)(self._hold, inner)


class View(Surface):
    """Some ranks of a group; see `asyncwg.WorkerGroup`."""


class RankView(View):
    """One rank of a group: calls give its value."""

    def call(  # type: ignore[override]  # a call on one rank gives its value, not a list of one
        self, method: BlockingOnRank[Q, T], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> T:
        """Call a registered method given as a function; the result is what the rank gives."""
        name = self._inner._name_of(method)  # noqa: SLF001  # one of us
        result: T = getattr(self, name)(*args, **kwargs)
        return result


class AnyRank:
    """One of some ranks, chosen call by call: the one with the fewest calls under way."""

    def __init__(self, hold: Hold, inner: _surface.AnyRank) -> None:
        self._hold = hold
        self._inner = inner

    def __getattr__(self, name: str) -> Proxy:
        proxy = self.__dict__[name] = Proxy(self._hold, getattr(self._inner, name))
        return proxy

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_names_of_methods(self._inner)})

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner).removeprefix('<')}"


class Union(Callee):
    """Several groups, or views of groups, whose ranks are called as those of one; see `asyncwg.WorkerGroup`.

    Made by ``WorkerGroup.union(...)``. Its members live as long as it.
    """

    def __init__(self, members: Sequence[Surface]) -> None:
        inner = _union.Union([member._inner for member in members])  # noqa: SLF001  # one of us
        super().__init__(members[0]._hold, inner)  # noqa: SLF001  # all have one thread
        self._members = tuple(members)

    @property
    def members(self) -> tuple[Surface, ...]:
        """The groups and views."""
        return self._members

    def __getitem__(self, rank: int) -> RankView:
        """Return the view on one rank, counted through the members."""
        left = rank + self.world_size if rank < 0 else rank
        if left >= 0:
            for member in self._members:
                if left < member.world_size:
                    return member[left]
                left -= member.world_size
        raise IndexError(f"no rank {rank} in {self!r}")


def _names_of_methods(inner: object) -> list[str]:
    return [name for name in set(dir(inner)) - set(dir(type(inner))) if not name.startswith("_")]
