"""``WorkerGroup`` for code without an event loop: the same proxies, as plain functions.

::

    from asyncwg.blocking import WorkerGroup

    with WorkerGroup(pool, ClassWithInitArgs(Trainer, lr=3e-4)) as wg:
        for batch in batches:
            out = wg.train_step(batch)              # the value
        saved = wg.save_to("step-7")                # registered with blocking=False: a handle
        scores = wg.score(batch)
        saved.get()

For scripts, notebooks (also while a loop of their own runs) and trainers written for verl. All groups of a
program are driven by one loop in a thread of its own, so any thread may use them; calls reach all ranks in
one order, that in which they were made. A plain call returns what awaiting the same call of
`asyncwg.WorkerGroup` would give, and raises the same.

Functions that the loop calls run in its thread and can't make blocking calls: those of custom dispatch modes
(which get the `asyncwg.WorkerGroup` behind the group), ``on_hang``, ``on_death``, and inline ranks.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar, final, overload

from asyncwg import _surface, worker_group
from asyncwg._driver.stacks import Stacks
from asyncwg._hold import Hold, without_waiting
from asyncwg._loop_thread import result_of
from asyncwg._registered import BlockingOnGroup, BlockingOnRank
from asyncwg.call import Call
from asyncwg.errors import (
    CallTimeoutError,
    UsageError,
    WorkerGroupError,
)
from asyncwg.resource_pool import ResourcePool

__all__ = ["Handle", "WorkerGroup"]

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
G = TypeVar("G", bound="WorkerGroup")

_OWN_NAMES: Final = (
    "execute_all_async",
    "execute_all_sync",
    "execute_rank_zero_async",
    "execute_rank_zero_sync",
)
"""Names of these groups that `asyncwg.WorkerGroup` leaves to its methods."""


@final
class Handle(Generic[T]):
    """A call on its way: what methods registered with ``blocking=False`` return, and ``execute_all``.

    Among the arguments of another call, also nested in a container, it means the value it will have: the data
    goes from worker to worker, and the other call waits for it in its place in the order. A
    call that fails and that nobody looks at is reported, when its handle is gone, as an asyncio task is.

    Groups make handles; there is no other way to get one. It keeps its group running.
    """

    __slots__ = ("__weakref__", "_call", "_hold")

    def __init__(self, call: Call[T], hold: Hold) -> None:
        self._call = call
        self._hold = hold

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result and return it; as often as you like, from any thread.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            CallTimeoutError: it is not done after ``timeout`` seconds. The call goes on, and can be waited
                for again; where the call's own deadline has passed, `done` is true instead.
            Exception: what awaiting the call would raise; see `asyncwg.Call`.
            concurrent.futures.CancelledError: the call was cancelled.

        An exception in this thread while it waits, such as Ctrl-C, cancels the call.
        """
        self._wait(timeout)
        return result_of(self._call)

    def done(self) -> bool:
        """Whether the result, or an error, is known."""
        return self._call.done()

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._call.cancelled()

    def cancel(self) -> bool:
        """Cancel the call for everyone who waits for it; False if it has ended.

        A call that no rank has started is dropped on all; otherwise every rank runs it and the result is
        thrown away. Does not wait for the ranks.
        """
        thread = self._hold.thread
        if thread is None or self._call.done():
            return False
        cancelled: bool = thread.ask(self._call.cancel, taken=True)
        return cancelled

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for all ranks and return what each gave, by rank, not joined; exceptions stand in place.

        Raises:
            CallTimeoutError: not all have answered after ``timeout`` seconds. The call goes on.
        """
        self._wait(timeout)
        return without_waiting(self._call.results())

    def as_completed(self) -> Iterator[tuple[int, Any]]:
        """Yield ``(rank, value)`` as the ranks answer, not joined; exceptions stand in place."""
        thread = self._hold.running()
        answers = self._call.as_completed()

        async def step() -> tuple[int, Any] | None:
            return await anext(answers, None)

        while (answer := thread.run(step)) is not None:
            yield answer

    def released(self, timeout: float | None = None) -> None:
        """Wait until what was sent by reference may be written again; see `asyncwg.Call.released`.

        Raises:
            CallTimeoutError: some rank still reads it after ``timeout`` seconds.
        """
        thread = self._hold.thread
        if thread is not None:  # else no rank is left that could read
            thread.run(self._call.released, timeout)

    def _wait(self, timeout: float | None) -> None:
        call = self._call
        if call.done():
            return
        if not self._hold.running().wait(call, timeout):
            raise CallTimeoutError(
                f"{call!r} was not done after {timeout} s of waiting; it goes on"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Stand for its value among the arguments of another call, as the call itself does."""
        return self._call.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<Handle{repr(self._call).removeprefix('<Call')}"


def _send(
    hold: Hold, function: Callable[..., Call[Any]], args: Any, kwargs: Any, waits: bool
) -> Any:
    """Make a call, and return its value or its handle."""
    thread = hold.running()
    if args or kwargs:
        _wait_for_streams()
        plain = [each._call if isinstance(each, Handle) else each for each in args]  # noqa: SLF001
        named = {
            name: each._call if isinstance(each, Handle) else each  # noqa: SLF001  # one of us
            for name, each in kwargs.items()
        }
        function = functools.partial(function, *plain, **named)
    call: Call[Any] = thread.ask(function, taken=not waits)
    return result_of(call) if waits else Handle(call, hold)


def _wait_for_streams() -> None:
    """Wait for what this thread has begun on a CUDA stream of its own.

    The loop's thread copies tensors from the device, and its stream does not wait for others.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        stream = torch.cuda.current_stream(device)
        if stream != torch.cuda.default_stream(device):
            stream.synchronize()


class _Proxy:
    """A registered method as a plain function."""

    def __init__(self, hold: Hold, proxy: _surface.Proxy, waits: bool | None = None) -> None:
        self._hold = hold
        self._proxy = proxy
        self._waits = proxy.blocking if waits is None else waits
        self.__name__ = proxy.__name__
        self.__qualname__ = proxy.__qualname__
        self.__doc__ = proxy.__doc__
        self.__wrapped__ = proxy.__wrapped__

    @property
    def __signature__(self) -> inspect.Signature:
        return self._proxy.__signature__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method on its ranks; see `asyncwg.WorkerGroup`.

        The arguments are taken as they are when it returns, or earlier (O-7).
        """
        return _send(self._hold, self._proxy, args, kwargs, self._waits)

    def options(self, *, blocking: bool | None = None, **options: Any) -> _Proxy:
        """Return this proxy with other options: ``wg.step.options(blocking=False)(batch)``.

        Args:
            blocking: True to return the value, False to return a handle.
            **options: as in `asyncwg.WorkerGroup`.
        """
        waits = self._waits if blocking is None else blocking
        return _Proxy(self._hold, self._proxy.options(**options), waits)

    def __repr__(self) -> str:
        return f"<blocking {repr(self._proxy).removeprefix('<')}"


class _Surface:
    """A group, or a view on some of its ranks: what proxies hang on."""

    def __init__(self, hold: Hold, inner: _surface.Surface) -> None:
        self._hold = hold
        self._inner = inner

    @property
    def world_size(self) -> int:
        """Number of ranks here."""
        return self._inner.world_size

    def ready(self) -> None:
        """Wait until every rank here has room for another call; for whoever makes many handles."""
        self._hold.running().run(self._inner.ready)

    def execute_all(self, method_name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call a method, registered or not, on every rank here; the same as ``execute_all_async``.

        As in verl it returns at once. The arguments go to every rank as they are, `PerRank` gives each its
        own; nothing is guessed from the lengths of lists.
        """
        handle: Handle[Any] = _send(
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
        send = functools.partial(self._inner.execute_all, method_name)
        return _send(self._hold, send, args, kwargs, waits=True)

    def execute_rank_zero(self, method_name: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call a method on the first rank here; the same as ``execute_rank_zero_async``, as in verl."""
        handle: Handle[Any] = _send(
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
        send = functools.partial(self._inner.execute_rank_zero, method_name)
        return _send(self._hold, send, args, kwargs, waits=True)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``function(worker, *args, **kwargs)`` on every rank here; a list by rank."""
        send = functools.partial(self._inner.run, function)
        return _send(self._hold, send, args, kwargs, waits=True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Arrive in another process as an `asyncwg.WorkerGroup`, or a view of one, that calls this group.

        Raises:
            UsageError: the group is neither detached nor attachable.
        """
        return self._inner.__reduce_ex__(protocol)

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

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__.get("_inner")
        found = None if inner is None else getattr(inner, name)
        if isinstance(found, _surface.Proxy):
            proxy = self.__dict__[name] = _Proxy(self._hold, found)
            return proxy
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_names_of_methods(self._inner)})

    def __repr__(self) -> str:
        return f"<blocking {repr(self._inner).removeprefix('<')}"


class View(_Surface):
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


def _like(
    model: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an ``__init__`` the parameters of the class ``model``."""

    def dress(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        dressed: Any = function
        dressed.__signature__ = inspect.signature(model.__init__)
        return dressed  # type: ignore[no-any-return]  # it is the function

    return dress


class _Start:
    """``WorkerGroup.start(pool, cls)`` makes a group and starts it; ``wg.start()`` starts that group."""

    @overload
    def __get__(self, group: None, owner: type[G]) -> Callable[..., G]: ...
    @overload
    def __get__(self, group: G, owner: type[G]) -> Callable[[], G]: ...
    def __get__(self, group: Any, owner: Any) -> Any:
        if group is not None:
            return group.__enter__

        @functools.wraps(owner.__init__)
        def start(*args: Any, **kwargs: Any) -> Any:
            return owner(*args, **kwargs).__enter__()

        return start


class WorkerGroup(_Surface):
    """The ranks of one class, one process each, and their registered methods as plain functions.

    ``with WorkerGroup(pool, cls_with_init) as wg`` starts and stops it; ``wg.start()``, or
    ``WorkerGroup.start(pool, cls_with_init)``, and ``wg.shutdown()`` are the long form. A group that its
    program drops is ended without a word; one that still runs when the program ends is shut down then.

    A method that is registered with ``blocking=True``, as is the default, gives its value; one with
    ``blocking=False`` a `Handle`. Any thread may use the group. Ctrl-C while a call is waited for cancels the
    call on all ranks or on none, and leaves the group usable.

    Args, errors: as for `asyncwg.WorkerGroup`. ``on_hang`` is called in the loop's thread.
    """

    @_like(worker_group.WorkerGroup)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inner = worker_group.WorkerGroup(*args, **kwargs)
        for name in set(_OWN_NAMES) & set(dir(inner)):
            raise UsageError(
                f"{name!r} is a function of every blocking group: give the proxy another name with "
                f"@register(..., name={'worker_' + name!r})"
            )
        super().__init__(Hold(inner), inner)
        self._group = inner

    start = _Start()

    def __enter__(self) -> Self:
        """Start it, unless it runs.

        Raises:
            WorkerStartError: what each failed rank raised. No process is left, also when this is
                interrupted.
            ResourceError: the pool's devices are taken.
            UsageError: it was started before, and shut down.
        """
        if self.state != "running":
            self._hold.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        """Shut it down, or let go of it where it goes on without this program.

        What ``close()`` raised does not hide an exception that is under way.
        """
        try:
            self._hold.leave(5.0)
        except WorkerGroupError as closing:
            if error is None:
                raise
            error.add_note(f"and then: {closing}")

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, Self]:
        """Return a group for each role of a colocated class; see `asyncwg.WorkerGroup.spawn`.

        They share the processes: one that is shut down is shut down for all.

        Args:
            prefix_set: the roles; None for all.

        Raises:
            UsageError: there is no such role.
        """
        return {role: self._of(group) for role, group in self._group.spawn(prefix_set).items()}

    def fuse(self, prefix_set: Iterable[str] | None = None) -> None:
        """Put the groups that `spawn` returns on this one: ``wg.actor``; see `asyncwg.WorkerGroup.fuse`.

        Args:
            prefix_set: the roles; None for all.

        Raises:
            UsageError: there is no such role, or its name can't be an attribute here. Nothing is changed.
        """
        names = self._group.spawn(prefix_set)
        for role in names:
            if hasattr(type(self), role):
                raise UsageError(
                    f"role {role!r} can't be an attribute of {self!r}: it has one of that name. Use "
                    f"spawn([{role!r}])[{role!r}], or call the role something else"
                )
        self._group.fuse(names)

    def _of(self, role: worker_group.WorkerGroup) -> Self:
        """Return the blocking group of a role, which keeps the group of all."""
        made = type(self).__new__(type(self))
        _Surface.__init__(made, self._hold, role)
        made._group = role  # noqa: SLF001  # one of us
        return made

    def __getattr__(self, name: str) -> Any:
        group = self.__dict__.get("_group")
        if group is not None and not name.startswith("_"):
            found = getattr(group, name)
            if isinstance(found, worker_group.WorkerGroup):
                return self._of(found)
        return super().__getattr__(name)

    def shutdown(self, grace: float = 5.0) -> None:
        """End every process, politely if they let it; see `asyncwg.WorkerGroup.shutdown`.

        Args:
            grace: seconds until what is left is killed.

        Raises:
            WorkerGroupError: what ``close()`` raised, when everything has ended.

        Ctrl-C meanwhile kills at once.
        """
        self._hold.shutdown(grace)

    @classmethod
    def attach(
        cls,
        name: str,
        cls_with_init: worker_group.ClassWithInitArgs[Any] | None = None,
        *,
        timeout: float | None = 30.0,
    ) -> Self:
        """Return a handle on a group that another program hosts; see `asyncwg.WorkerGroup.attach`."""
        make = worker_group.WorkerGroup.attach
        return cls._attached(lambda: make(name, cls_with_init, timeout=timeout))

    @classmethod
    def from_detached(cls, name: str | None = None, **options: Any) -> Self:
        """Attach to a group by verl's arguments; see `asyncwg.WorkerGroup.from_detached`."""
        make = worker_group.WorkerGroup.from_detached
        return cls._attached(lambda: make(name, **options))

    @classmethod
    def _attached(cls, make: Callable[[], Coroutine[Any, Any, worker_group.WorkerGroup]]) -> Self:
        hold = Hold.attached(make)
        group = cls.__new__(cls)
        _Surface.__init__(group, hold, hold.root)
        group._group = hold.root  # noqa: SLF001  # one of us
        return group

    def detach(self) -> None:
        """Let go of a group that goes on without this program; see `asyncwg.WorkerGroup.detach`."""
        self._hold.detach()

    def restart(self, grace: float = 5.0) -> None:
        """End the processes and start new ones in their place; see `asyncwg.WorkerGroup.restart`."""
        self._hold.running().run(lambda: self._group.restart(grace))

    def save(self) -> None:
        """Keep what each rank's ``save_state()`` returns, for ``load_state`` after a restart."""
        self._hold.running().run(self._group.save)

    def stacks(self, timeout: float = 2.0) -> Stacks:
        """Return the Python stacks of all ranks; see `asyncwg.WorkerGroup.stacks`."""
        return self._hold.running().run(lambda: self._group.stacks(timeout))

    def check_health(self, timeout: float = 5.0) -> list[float | None]:
        """Return, by rank, the seconds in which its control lane answers; None where it does not."""
        return self._hold.running().run(lambda: self._group.check_health(timeout))

    def dp_size(self, mesh: str) -> int:
        """Return the number of data-parallel ranks of a mesh; see `asyncwg.WorkerGroup.dp_size`."""
        size: int = self._hold.running().ask(lambda: self._group.dp_size(mesh), taken=True)
        return size

    def start_worker_aliveness_check(
        self,
        every_n_seconds: float = 1.0,
        on_death: Callable[[Exception], None] | None = None,
    ) -> None:
        """Have ``on_death`` called, in the loop's thread, with what broke the group, when it breaks."""
        check = self._group.start_worker_aliveness_check
        self._hold.running().ask(lambda: check(every_n_seconds, on_death), taken=True)

    @property
    def resource_pool(self) -> ResourcePool:
        """Where it runs."""
        return self._group.resource_pool

    @property
    def name(self) -> str:
        """The group's name."""
        return self._group.name

    @property
    def state(self) -> str:
        """``"new"``, ``"starting"``, ``"running"``, ``"broken"`` or ``"closed"``."""
        return self._group.state

    @property
    def alive(self) -> bool:
        """Whether it runs and every process of it lives."""
        return self._group.alive

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while it does not run."""
        return self._group.pids

    @property
    def worker_names(self) -> list[str]:
        """``name:rank``, by rank."""
        return self._group.worker_names

    @property
    def workers(self) -> list[RankView]:
        """One view per rank."""
        return [self[rank] for rank in range(self.world_size)]

    @property
    def master_address(self) -> str:
        """Where the group's store for ``torch.distributed`` listens: loopback."""
        return self._group.master_address

    @property
    def master_port(self) -> int:
        """The store's port; 0 while the group does not run."""
        return self._group.master_port


def _names_of_methods(inner: _surface.Surface) -> list[str]:
    return [name for name in set(dir(inner)) - set(dir(type(inner))) if not name.startswith("_")]
