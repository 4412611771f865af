"""What a group and its views have in common: the proxies of the registered methods, and views."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Callable, Iterable
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeVar, overload

from asyncwg._catalog import Catalog
from asyncwg._core import Core
from asyncwg._job import CallOptions, Job, Quick, Target, nearest, quick_of
from asyncwg._map import Mapping, Results
from asyncwg._modes import CustomMode, Mode
from asyncwg._registered import OnGroup, OnRank
from asyncwg.call import Call
from asyncwg.decorator import Execute, Method
from asyncwg.errors import UsageError

Q = ParamSpec("Q")
T = TypeVar("T")


def changed_options(before: CallOptions, changes: dict[str, Any], what: str) -> CallOptions:
    """Return ``before`` with changes.

    Raises:
        TypeError: ``what`` has no such option.
        UsageError: a value that can't be right.
    """
    known = [field.name for field in fields(CallOptions)]
    for name in changes:
        if name not in known:
            raise TypeError(f"{what} has no option {name!r}{nearest(name, known)}")
    return replace(before, **changes)


class Proxy:
    """A registered method on a group or a view. Calling it sends at once and returns a `Call`."""

    def __init__(
        self,
        core: Core,
        target: Target,
        method: Method,
        mode: Mode,
        number: int,
        options: CallOptions,
    ) -> None:
        self._core = core
        self._target = target
        self._method = method
        self._mode = mode
        self._options = options
        self._fixed = (target, method, mode, number)
        self._quick: Quick | None = None
        self._shapes: set[tuple[Any, ...]] = set()
        self.__name__ = method.name
        self.__qualname__ = method.label
        self.__doc__ = method.function.__doc__
        self.__wrapped__ = method.function

    @property
    def blocking(self) -> bool:
        """Whether a group of `asyncwg.blocking` waits for its calls."""
        return self._method.options.blocking

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._method.function)
        _self, *parameters = signature.parameters.values()
        return signature.replace(parameters=parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Call[Any]:
        """Send the call to its ranks, now. A generator method gives a `Stream`.

        Raises:
            TypeError: the arguments don't fit the method, or one can't be pickled.
            DispatchError: they can't be given out over the ranks.
            GroupClosedError: the group does not run.
            GroupBrokenError: it broke.
        """
        if not args and not kwargs and self._quick is not None:
            return self._core.submit_quick(self._quick)
        shape = (len(args), *kwargs)
        if shape not in self._shapes:
            self._check(args, kwargs)
            self._shapes.add(shape)
            if shape == (0,):
                self._quick = quick_of(Job(*self._fixed, (), {}, self._options))
        return self._core.submit(Job(*self._fixed, args, kwargs, self._options))

    def options(self, **options: Any) -> Proxy:
        """Return this proxy with other options: ``await wg.step.options(timeout=5)(batch)``.

        Args:
            **options: ``timeout`` (seconds until the call fails with `CallTimeoutError`),
                ``uneven`` (as in `register`), ``on_error`` (``"abort"`` or ``"wait"``, as in
                `WorkerGroup`), ``hang_after`` (as in `WorkerGroup`), ``copy``
                (``"now"`` to copy large tensors before the call returns, where
                they are written to by what moves no version counter: ``.data``, a numpy alias, fused
                optimizers, collectives), ``sticky`` (where one rank is chosen: a key whose calls all
                go to the same one).

        Raises:
            TypeError: there is no such option.
            UsageError: a value that can't be right, or ``sticky`` where no rank is chosen.
        """
        changed = changed_options(self._options, options, f"{self._method.label}.options()")
        if changed.sticky is not None and self._method.options.execute is not Execute.ANY:
            raise UsageError(
                f"{self._method.label}.options(): sticky is for calls that go to one rank of many: "
                f"write .any.{self.__name__}.options(sticky=...)"
            )
        return Proxy(self._core, *self._fixed, changed)

    def on_any(self) -> Proxy:
        """Return this proxy for one rank, the one with the least to do."""
        target, method, mode, number = self._fixed
        options = replace(method.options, execute=Execute.ANY)
        return Proxy(
            self._core, target, method._replace(options=options), mode, number, self._options
        )

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(self._mode, CustomMode):
            return  # its dispatch function may turn them into anything
        try:
            self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._method.label}: {error}") from None

    def __repr__(self) -> str:
        return f"<proxy of {self._method.label} of group {self._core.name!r}>"


class Surface:
    """A group, the group of one role, or a view on some of their ranks: what proxies hang on."""

    def __init__(self, core: Core, target: Target, catalog: Catalog) -> None:
        self._core = core
        self._target = target
        self._catalog = catalog

    @property
    def world_size(self) -> int:
        """Number of ranks here."""
        return len(self._target.ranks)

    async def ready(self) -> None:
        """Wait until every rank here has room for another call.

        A rank has room while it has fewer than `WINDOW_CALLS` unanswered calls and less than
        `WINDOW_BYTES` wait for it to read. A producer that awaits this before each call makes no
        more than the ranks can take; calls made without it wait in the controller's memory.

        Raises:
            GroupClosedError: the group does not run.
            GroupBrokenError: it broke.
        """
        await self._core.ready(self._target.ranks)

    def execute_all(self, method_name: str, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Call a method, registered or not, on every rank here, with the arguments as they are.

        `PerRank` gives each rank its own. The result is a list by rank (a value on a one-rank
        view).
        """
        return self._execute(self._target, method_name, args, kwargs)

    def execute_rank_zero(self, method_name: str, /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Call a method, registered or not, on the first rank here; the result is its value."""
        return self._execute(Target(self._target.ranks[:1], True), method_name, args, kwargs)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Call[Any]:
        """Run ``function(worker, *args, **kwargs)`` on every rank here; a list by rank."""
        if not callable(function):
            raise UsageError(f"run() takes a function, not {function!r}")
        job = self._catalog.job_of(self._target, function, args, kwargs, self._core.options)
        return self._core.submit(job)

    def call(self, method: OnGroup[Q, T], /, *args: Q.args, **kwargs: Q.kwargs) -> Call[T]:
        """Call a registered method given as a function: ``wg.call(Trainer.step, batch)``.

        The same as ``wg.step(batch)``, and type checkers know it: the arguments are the method's
        own, the result is what its dispatch mode makes of it. Where it is a list by rank, the type
        is a list; where results are joined, it is what one rank gives.

        Raises:
            AttributeError: the group's class has no such registered method.
        """
        call: Call[T] = getattr(self, self._name_of(method))(*args, **kwargs)
        return call

    def _name_of(self, function: Any) -> str:
        """Return the name of the proxy of a registered method that is given as a function."""
        for proxy, method in self._catalog.methods.items():
            if method.function is getattr(function, "__func__", function):
                return proxy
        raise AttributeError(
            f"{getattr(function, '__qualname__', function)!r} is no registered method of "
            f"{self._catalog.cls.__name__}"
        )

    def _execute(
        self, target: Target, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call[Any]:
        return self._core.submit(
            self._catalog.job_for(target, name, args, kwargs, self._core.options)
        )

    def _proxy(self, name: str) -> Proxy:
        """Return the proxy of a registered method on these ranks."""
        catalog = self._catalog
        method = catalog.methods[name]
        options = replace(
            self._core.options, timeout=method.options.timeout, uneven=method.options.uneven
        )
        return Proxy(
            self._core, self._target, method, catalog.modes[name], catalog.numbers[name], options
        )

    @property
    def any(self) -> AnyRank:
        """Whichever rank here has the least to do: ``await wg.any.generate(prompt)``; see `AnyRank`."""
        return AnyRank(self, self._target, self._catalog)

    def map(
        self,
        method: str | Callable[..., Any],
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool = False,
        max_inflight: int | None = None,
        with_items: bool = False,
    ) -> Results:
        """Call a method once for each item, on whichever rank has the least to do, and yield the results.

        ``async for result in wg.map("generate", prompts)``. Items are read as results are: never more
        than ``max_inflight`` are on their way, or done and not read. Leaving the loop cancels what is
        on its way, as ``close()`` of what this returns does. A failure ends it, with a note that says
        which item it was; so does an error of ``items`` itself.

        Args:
            method: name of a registered method, or the function; it gets one item, whole, as its
                only argument.
            items: what is to be done; also an asynchronous iterator, or an endless one.
            ordered: yield results in the order of the items, and not as they come.
            max_inflight: None for two for each rank, or ``max_concurrency`` for each where a method
                has that.
            with_items: yield ``(item, result)``.

        Raises:
            UsageError: a generator method, or no items.
            AttributeError: no such method.
        """
        proxy, label, most = self._mapped(method, max_inflight)
        work = Mapping(proxy, label, items, ordered=ordered, most=most)
        return Results(work, with_items=with_items)

    def _mapped(self, method: Any, most: int | None) -> tuple[Proxy, str, int]:
        """Return what `map` calls, its label, and how many calls are on their way at once."""
        name = method if isinstance(method, str) else self._name_of(method)
        proxy: Proxy = getattr(self.any, name)
        found = self._catalog.methods[name]
        if found.is_stream:
            raise UsageError(f"{found.label} is a generator: map() takes what returns a value")
        if most is None:
            most = self.world_size * (found.options.max_concurrency or 2)
        if most < 1:
            raise UsageError(f"max_inflight must be at least 1, not {most!r}")
        return proxy, found.label, most

    @overload
    def __getitem__(self, index: int) -> RankView: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: int | slice) -> View:
        """Return a view: ``wg[1:3]`` on some ranks, ``wg[0]`` on one, whose calls give its value.

        Raises:
            IndexError: there is no such rank, or no rank at all in the slice.
        """
        if isinstance(index, slice):
            ranks = self._target.ranks[index]
            if not ranks:
                raise IndexError(f"no rank in [{index.start}:{index.stop}] of {self!r}")
            return View(self, Target(ranks, False))
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"a rank is an int or a slice, not {index!r}")
        try:
            rank = self._target.ranks[index]
        except IndexError:
            raise IndexError(f"no rank {index} in {self!r}") from None
        return RankView(self, Target((rank,), True))

    def __getattr__(self, name: str) -> Any:
        catalog = self.__dict__.get("_catalog")
        if catalog is not None and name in catalog.methods:
            proxy = self._proxy(name)
            self.__dict__[name] = proxy
            return proxy
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}"
            if catalog is None
            else catalog.no_method(name)
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._catalog.methods})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled; groups that others may call know better.

        Raises:
            UsageError: always, here.
        """
        raise UsageError(
            f"{self!r} can't be pickled: pickle the group, started with attachable=True or detached=True"
        )

    def rank(self, index: int) -> RankView:
        """Return the view on one rank; the same as ``wg[index]``."""
        return self[index]


class AnyRank:
    """One of some ranks, chosen call by call: the one with the fewest calls under way.

    A call gives the value of that rank, which gets the arguments whole. With
    ``options(sticky=key)`` calls with the same key go to the same rank while its process lives: for
    caches. The 65,536 keys that were used last are remembered.

    Made by ``wg.any``, also of a view.
    """

    def __init__(self, parent: Surface, target: Target, catalog: Catalog) -> None:
        self._parent = parent
        self._target = target
        self._catalog = catalog

    def __getattr__(self, name: str) -> Proxy:
        catalog = self.__dict__.get("_catalog")
        if catalog is None or name not in catalog.methods:
            raise AttributeError(name if catalog is None else catalog.no_method(name))
        proxy = self._parent._proxy(name).on_any()  # noqa: SLF001  # made by it
        self.__dict__[name] = proxy
        return proxy

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._catalog.methods})

    def __repr__(self) -> str:
        return f"<any of ranks {list(self._target.ranks)} of {self._parent!r}>"


class View(Surface):
    """Some ranks of a group. Dispatch is over these ranks alone, and the first is rank zero.

    Made by ``wg[...]``. It keeps its group, which would end if its user kept the view alone.
    """

    def __init__(self, parent: Surface, target: Target) -> None:
        super().__init__(parent._core, target, parent._catalog)  # noqa: SLF001  # a part of it
        self._parent = parent

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Arrive in another process as the same view of the group that arrives there."""
        return _view_of, (self._parent, tuple(self._target))

    def __repr__(self) -> str:
        ranks = self._target.ranks
        shown = str(ranks[0]) if self._target.single else f"{list(ranks)}"
        role = "" if self._catalog.role is None else f"role {self._catalog.role!r} of "
        return f"<ranks {shown} of {role}group {self._core.name!r}, {self._core.state}>"


class RankView(View):
    """One rank of a group: calls give its value."""

    def call(  # type: ignore[override]  # a call on one rank gives its value, not a list of one
        self, method: OnRank[Q, T], /, *args: Q.args, **kwargs: Q.kwargs
    ) -> Call[T]:
        """Call a registered method given as a function; the result is what the rank gives."""
        call: Call[T] = getattr(self, self._name_of(method))(*args, **kwargs)
        return call


def inside(surface: Surface) -> tuple[Core, Target, Catalog]:
    """Return the inside of a group, which of its ranks a surface stands for, and for what.

    A function, because every attribute of a group is a name that no method can have.
    """
    return surface._core, surface._target, surface._catalog  # noqa: SLF001


def _view_of(parent: Surface, target: tuple[tuple[int, ...], bool]) -> View:
    return View(parent, Target(*target))
