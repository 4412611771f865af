"""What a group and its views have in common: proxies, and the way from a proxy to the ranks.

::

    proxy(*args) ─▶ check the signature ─▶ dispatch.plan ─▶ encode each payload once ─▶ Gang.call
                          │                                                             │
                          └── an un-awaited Call among the arguments: keep the place ───┘
                              in the order, go on when its value is known

Everything that can be wrong with a call is found before ``Gang.call``, so no rank has seen a byte
of it.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncwg import dispatch
from asyncwg._driver.gang import Gang
from asyncwg._driver.rank import ASYNC, COMPUTE
from asyncwg._wire import codec
from asyncwg._wire.frames import EXTRAS, HEADER, NO_METHOD, NONE, Buffer, Kind, pack
from asyncwg.call import Call, CallFuture
from asyncwg.decorator import (
    CustomMode,
    Dispatch,
    Execute,
    Method,
    Mode,
    Uneven,
)
from asyncwg.errors import CallTimeoutError, UsageError

if TYPE_CHECKING:
    from asyncwg.worker_group import WorkerGroup

_CALL: Final = int(Kind.CALL)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; see `Proxy.options`."""

    timeout: float | None = None
    uneven: Uneven = "error"
    on_error: str = "abort"

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout must be more than 0 seconds, not {self.timeout!r}")
        if self.uneven not in ("error", "allow", "pad"):
            raise UsageError(f"uneven must be 'error', 'allow' or 'pad', not {self.uneven!r}")
        if self.on_error not in ("abort", "wait"):
            raise UsageError(f"on_error must be 'abort' or 'wait', not {self.on_error!r}")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Target(NamedTuple):
    """Which ranks a surface stands for."""

    ranks: tuple[int, ...]
    single: bool
    """Whether a call gives the value of its one rank instead of a list."""


class Proxy:
    """A registered method on a group or a view. Calling it sends at once and returns a `Call`."""

    def __init__(
        self, surface: Surface, method: Method, mode: Mode, number: int, options: CallOptions
    ) -> None:
        self._surface = surface
        self._method = method
        self._mode = mode
        self._number = number
        self._options = options
        self._shapes: set[tuple[int, tuple[str, ...]]] = set()
        self.__name__ = method.name
        self.__qualname__ = method.label
        self.__doc__ = method.function.__doc__
        self.__wrapped__ = method.function

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self._method.function)
        _self, *parameters = signature.parameters.values()
        return signature.replace(parameters=parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Call[Any]:
        """Send the call to its ranks, now.

        Raises:
            TypeError: the arguments don't fit the method, or one can't be pickled.
            DispatchError: they can't be given out over the ranks.
            GroupClosedError: the group does not run.
            GroupBrokenError: it broke.
        """
        shape = (len(args), tuple(kwargs))
        if shape not in self._shapes:
            self._check(args, kwargs)
            self._shapes.add(shape)
        return self._surface.group.submit(
            Job(
                self._surface.target,
                self._method,
                self._mode,
                self._number,
                args,
                kwargs,
                self._options,
            )
        )

    def options(self, **options: Any) -> Proxy:
        """Return this proxy with other options: ``await wg.step.options(timeout=5)(batch)``.

        Args:
            **options: ``timeout`` (seconds until the call fails with `CallTimeoutError`),
                ``uneven`` (as in `register`), ``on_error`` (``"abort"`` or ``"wait"``, as in
                `WorkerGroup`).
        """
        known = [field.name for field in fields(CallOptions)]
        for name in options:
            if name not in known:
                raise TypeError(
                    f"{self._method.label}.options() has no option {name!r}{nearest(name, known)}"
                )
        return Proxy(
            self._surface, self._method, self._mode, self._number, replace(self._options, **options)
        )

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._method.kind in ("generator", "async generator"):
            raise UsageError(f"{self._method.label} is a generator: streams are not supported yet")
        if isinstance(self._mode, CustomMode):
            return  # its dispatch function may turn them into anything
        try:
            self.__signature__.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._method.label}: {error}") from None

    def __repr__(self) -> str:
        return f"<proxy of {self._method.label} on {self._surface!r}>"


class Job(NamedTuple):
    """One call as the user made it."""

    target: Target
    method: Method
    mode: Mode
    number: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: CallOptions
    kind: int = _CALL


class Surface:
    """A group, or a view on some of its ranks: what proxies hang on."""

    group: WorkerGroup
    target: Target

    @property
    def world_size(self) -> int:
        """Number of ranks here."""
        return len(self.target.ranks)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> Call[Any]:
        """Call a method, registered or not, on every rank here, with the arguments as they are.

        `PerRank` gives each rank its own. The result is a list by rank (a value on a one-rank
        view).
        """
        return self._execute(self.target, method_name, args, kwargs)

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Call[Any]:
        """Call a method, registered or not, on the first rank here; the result is its value."""
        return self._execute(Target(self.target.ranks[:1], True), method_name, args, kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call[Any]:
        """Run ``function(worker, *args, **kwargs)`` on every rank here; a list by rank."""
        if not callable(function):
            raise UsageError(f"run() takes a function, not {function!r}")
        name = getattr(function, "__name__", "function")
        method = self.group.adhoc(name, f"run({name})", function)
        job = Job(
            self.target, method, Dispatch.ALL_TO_ALL, NO_METHOD, (function, *args), kwargs,
            self.group.options, Kind.RUN,
        )  # fmt: skip
        return self.group.submit(job)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Call[Any]:
        """Call a registered method given as a function: ``wg.call(Trainer.step, batch)``."""
        return self._find(method)(*args, **kwargs)

    def _find(self, function: Callable[..., Any]) -> Proxy:
        for proxy, method in self.group.methods.items():
            if method.function is getattr(function, "__func__", function):
                return self.proxy(proxy)
        raise AttributeError(
            f"{getattr(function, '__qualname__', function)!r} is no registered method of "
            f"{self.group.cls.__name__}"
        )

    def _execute(
        self, target: Target, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call[Any]:
        function = getattr(self.group.cls, name, None)
        if not callable(function):
            raise AttributeError(  # noqa: TRY004  # what a misspelt name raises everywhere
                f"{self.group.cls.__name__} has no method {name!r}{nearest(name, dir(self.group.cls))}"
            )
        method = self.group.adhoc(name, f"{self.group.cls.__name__}.{name}", function)
        job = Job(target, method, Dispatch.ALL_TO_ALL, NO_METHOD, args, kwargs, self.group.options)
        return self.group.submit(job)

    def proxy(self, name: str) -> Proxy:
        """Return the proxy of a registered method on these ranks."""
        method = self.group.methods[name]
        options = replace(
            self.group.options, timeout=method.options.timeout, uneven=method.options.uneven
        )
        mode = self.group.modes[name]
        return Proxy(self, method, mode, self.group.numbers[method.name], options)

    def __getitem__(self, index: int | slice) -> View:
        """Return a view: ``wg[1:3]`` on some ranks, ``wg[0]`` on one, whose calls give its value.

        Raises:
            IndexError: there is no such rank, or no rank at all in the slice.
        """
        if isinstance(index, slice):
            ranks = self.target.ranks[index]
            if not ranks:
                raise IndexError(f"no rank in [{index.start}:{index.stop}] of {self!r}")
            return View(self.group, Target(ranks, False))
        if isinstance(index, bool) or not isinstance(index, int):
            raise TypeError(f"a rank is an int or a slice, not {index!r}")
        try:
            rank = self.target.ranks[index]
        except IndexError:
            raise IndexError(f"no rank {index} in {self!r}") from None
        return View(self.group, Target((rank,), True))

    def rank(self, index: int) -> View:
        """Return the view on one rank; the same as ``wg[index]``."""
        return self[index]


class View(Surface):
    """Some ranks of a group. Dispatch is over these ranks alone, and the first is rank zero.

    Made by ``wg[...]``; it lives and dies with its group.
    """

    def __init__(self, group: WorkerGroup, target: Target) -> None:
        self.group = group
        self.target = target

    def __getattr__(self, name: str) -> Proxy:
        if name in self.group.methods:
            proxy = self.proxy(name)
            self.__dict__[name] = proxy
            return proxy
        raise AttributeError(self.group.no_method(name))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.group.methods})

    def __repr__(self) -> str:
        ranks = self.target.ranks
        shown = str(ranks[0]) if self.target.single else f"{list(ranks)}"
        return f"<ranks {shown} of {self.group!r}>"


class _Waiting(NamedTuple):
    """A call that keeps its place until the calls among its arguments have values."""

    job: Job
    call: Call[Any]
    future: CallFuture[Any]
    snapshot: codec.Encoded
    needs: list[Call[Any]]


class Sender:
    """From jobs to frames, in order. One per generation; owns the queue of calls that wait for others."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        gang: Gang,
        group: WorkerGroup,
    ) -> None:
        self._loop = loop
        self._gang = gang
        self._group = group
        self._waiting: tuple[list[_Waiting], list[_Waiting]] = ([], [])
        self._layouts: dict[Target, dispatch.Layout] = {}

    def submit(self, job: Job) -> Call[Any]:
        """Send a job now, or put it in its place in the queue."""
        job = self._narrow(job)
        future: CallFuture[Any] = CallFuture(self._loop)
        call: Call[Any] = Call(future, job.method.label)
        lane = ASYNC if job.method.is_async and self._group.has_async else COMPUTE
        queue = self._waiting[lane]
        needs = [v for v in (*job.args, *job.kwargs.values()) if isinstance(v, Call)]
        if not needs and not (queue and self._blocked(queue, job)):
            try:
                self._send(job, lane, future, call)
            except codec.UnresolvedError:
                pass  # one is hidden in a container
            else:
                return call
        self._defer(job, lane, future, call)
        return call

    def _narrow(self, job: Job) -> Job:
        execute = job.method.options.execute
        if job.kind == _CALL and (execute is Execute.RANK_ZERO or job.mode is Dispatch.RANK_ZERO):
            return job._replace(target=Target(job.target.ranks[:1], True))
        if job.kind == _CALL and execute is Execute.ANY:
            load = self._gang.in_flight
            rank = min(job.target.ranks, key=lambda index: load[index])
            return job._replace(target=Target((rank,), True))
        return job

    def _blocked(self, queue: list[_Waiting], job: Job) -> bool:
        ranks = set(job.target.ranks)
        return any(not ranks.isdisjoint(waiting.job.target.ranks) for waiting in queue)

    def _layout(self, target: Target) -> dispatch.Layout:
        layout = self._layouts.get(target)
        if layout is None:
            layout = dispatch.Layout(target.ranks, target.single, self._group, self._gang.meshes)
            self._layouts[target] = layout
        return layout

    def _send(self, job: Job, lane: int, future: CallFuture[Any], call: Call[Any]) -> None:
        method, options = job.method, job.options
        plan = dispatch.plan(
            method, job.mode, job.args, job.kwargs, self._layout(job.target), options.uneven
        )
        encoded = [self._encode(job, payload) for payload in plan.payloads]
        call_id = self._gang.next_id()
        frames = [frame(call_id) for frame in encoded]
        if plan.index is not None:
            frames = [frames[number] for number in plan.index]
        collect = plan.collect

        def finish(results: list[Any] | None, error: Exception | None) -> None:
            if future.done():
                return
            if results is None:
                assert error is not None
                future.set_exception(error)
                return
            try:
                value = collect(results)
            except Exception as failed:  # noqa: BLE001  # the user's collect_fn, or results that don't join
                future.set_exception(failed)
            else:
                future.set_result(value)

        pending = self._gang.call(
            call_id,
            method.label,
            job.target.ranks,
            lane,
            frames,
            finish,
            single=job.target.single,
            on_error=options.on_error,
        )
        call.attach(pending)
        future.on_abandon = lambda: self._gang.abandon(pending)
        if options.timeout is not None:
            self._deadline(job, future)

    def _deadline(self, job: Job, future: CallFuture[Any]) -> None:
        timeout = job.options.timeout
        assert timeout is not None

        def expire() -> None:
            if not future.done():
                future.set_exception(
                    CallTimeoutError(f"{job.method.label} did not end within {timeout} s")
                )
                future.abandon()

        timer = self._loop.call_later(timeout, expire)
        future.add_done_callback(lambda _future: timer.cancel())

    def _encode(self, job: Job, payload: dispatch.Payload) -> Callable[[int], list[Buffer]]:
        args, kwargs, rows = payload
        number = job.number
        extras: dict[str, Any] = {}
        if rows is not None:
            extras["rows"] = rows
        if job.options.timeout is not None:
            extras["timeout"] = job.options.timeout
        if number == NO_METHOD and job.kind == _CALL:
            extras["name"] = job.method.name
        if not args and not kwargs and not extras:
            return lambda call_id: [HEADER.pack(0, call_id, job.kind, NONE, number, 0)]
        value = (args, kwargs, extras) if extras else (args, kwargs)
        try:
            stream, buffers = codec.encode(value)
        except codec.UnresolvedError:
            raise
        except Exception as error:
            raise TypeError(
                f"{job.method.label}: {self._culprit(job, args, kwargs)} can't be pickled: {error}"
            ) from error
        flags = EXTRAS if extras else 0
        return lambda call_id: pack(job.kind, call_id, stream, buffers, flags=flags, aux=number)

    def _culprit(self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        try:
            names = [n for n in inspect.signature(job.method.function).parameters if n != "self"]
        except (TypeError, ValueError):
            names = []
        named = [(names[i] if i < len(names) else f"#{i}", arg) for i, arg in enumerate(args)]
        for name, value in [*named, *kwargs.items()]:
            try:
                codec.encode(value)
            except Exception:  # noqa: BLE001  # this is the one we look for
                return f"argument {codec.explain_failure(value, name)}"
        return "an argument"

    def _defer(self, job: Job, lane: int, future: CallFuture[Any], call: Call[Any]) -> None:
        """Keep a call's place until the calls among its arguments have values.

        The other arguments are taken as they are now (O-7).
        """
        snapshot, needs = codec.encode_with_calls((job.args, dict(job.kwargs)))
        waiting = _Waiting(job, call, future, snapshot, needs)
        queue = self._waiting[lane]
        queue.append(waiting)

        def leave() -> None:
            if waiting in queue:
                queue.remove(waiting)
                self._advance(lane)

        def known(need: asyncio.Future[Any]) -> None:
            if not future.done():
                if need.cancelled():
                    future.cancel()
                elif (error := need.exception()) is not None:
                    future.set_exception(error)
                    leave()
            self._advance(lane)

        future.on_abandon = leave
        if job.options.timeout is not None:
            self._deadline(job, future)
        for need in {id(need): need for need in needs}.values():
            need.future.add_done_callback(known)
        self._advance(lane)

    def _advance(self, lane: int) -> None:
        """Send what can go now: a call whose values are there, and that no earlier one keeps back."""
        queue = self._waiting[lane]
        for waiting in list(queue):
            if waiting not in queue or waiting.future.done():
                continue
            before = queue[: queue.index(waiting)]
            if not all(need.done() for need in waiting.needs) or self._blocked(before, waiting.job):
                continue
            queue.remove(waiting)
            try:
                self._gang.check()
                values = [need.future.result() for need in waiting.needs]
                args, kwargs = codec.decode_with_values(waiting.snapshot, values)
                job = waiting.job._replace(args=args, kwargs=kwargs)
                self._send(job, lane, waiting.future, waiting.call)
            except Exception as error:  # noqa: BLE001  # what would have been raised at the call
                if not waiting.future.done():
                    waiting.future.set_exception(error)

    def fail_waiting(self, error_of: Callable[[Job], Exception]) -> None:
        """Fail what has not been sent: the group has ended."""
        for queue in self._waiting:
            waiting_calls, queue[:] = list(queue), []
            for waiting in waiting_calls:
                if not waiting.future.done():
                    waiting.future.set_exception(error_of(waiting.job))
