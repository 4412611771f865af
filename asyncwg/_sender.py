"""From a call as the user made it to frames on their way, in order.

::

    Job ─▶ dispatch.plan ─▶ encode each payload once ─▶ Calls.send
      │                                                    │
      └─ an un-awaited Call among the arguments: keep the ─┘
         place in the order, go on when its value is known

Everything that can be wrong with a call is found before ``Calls.send``: no rank has seen a byte of it.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Protocol

from asyncwg import dispatch
from asyncwg._driver.calls import Outcome, Pending
from asyncwg._driver.departure import Load
from asyncwg._driver.gang import Gang
from asyncwg._driver.rank import ASYNC, COMPUTE
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import EXTRAS, HEADER, NO_METHOD, NONE, Buffer, Kind, pack
from asyncwg._wire.shipment import shipment
from asyncwg._wire.sources import inline
from asyncwg._worker import context
from asyncwg.call import Call, Collect
from asyncwg.decorator import CustomMode, Dispatch, Execute, Method, Mode, Uneven
from asyncwg.errors import CallTimeoutError, GroupClosedError, ResourceError, UsageError

_CALL: Final = int(Kind.CALL)
# Looked up on every call, where an attribute of a class costs more than a name of the module.
_ALL: Final = Execute.ALL
_HEADER_PACK: Final = HEADER.pack
_RANK_ZERO: Final = Dispatch.RANK_ZERO
_NOTHING: Final = dispatch.Payload((), {}, None)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; see `Proxy.options`."""

    timeout: float | None = None
    uneven: Uneven = "error"
    on_error: str = "abort"
    copy: str = "later"
    hang_after: float | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout must be more than 0 seconds, not {self.timeout!r}")
        if self.uneven not in ("error", "allow", "pad"):
            raise UsageError(f"uneven must be 'error', 'allow' or 'pad', not {self.uneven!r}")
        if self.on_error not in ("abort", "wait"):
            raise UsageError(f"on_error must be 'abort' or 'wait', not {self.on_error!r}")
        if self.hang_after is not None and not self.hang_after > 0:
            raise UsageError(f"hang_after must be more than 0 seconds, not {self.hang_after!r}")
        if self.copy not in ("later", "now"):
            raise UsageError(f"copy must be 'later' or 'now', not {self.copy!r}")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Target(NamedTuple):
    """Which ranks a surface stands for."""

    ranks: tuple[int, ...]
    single: bool
    """Whether a call gives the value of its one rank instead of a list."""


class Job(NamedTuple):
    """One call as the user made it."""

    target: Target
    method: Method
    mode: Mode
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: CallOptions
    kind: int = _CALL

    @property
    def is_plain(self) -> bool:
        """Whether the rank needs to be told nothing but the method's number."""
        return self.options.timeout is None and self.number != NO_METHOD


class Quick(NamedTuple):
    """A call without arguments that every rank gets alike, taken apart beforehand."""

    job: Job
    label: str
    ranks: tuple[int, ...]
    single: bool
    lane: int
    number: int
    collect: Collect
    on_error: str


def quick_of(job: Job) -> Quick | None:
    """Return the call without arguments in its quick form, or None where it has none."""
    options, method = job.options, job.method
    if (
        job.mode not in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
        or method.options.execute is not Execute.ALL
        or method.options.idempotent
        or not job.is_plain
        or options.hang_after is not None
    ):
        return None
    ranks, single = job.target
    plan = dispatch.plan(
        method, job.mode, (), {}, dispatch.Layout(ranks, single, None, {}), options.uneven
    )
    lane = ASYNC if method.is_async else COMPUTE
    return Quick(job, method.label, ranks, single, lane, job.number, plan.collect, options.on_error)


class _Waiting(NamedTuple):
    """A call that keeps its place until the calls among its arguments have values."""

    job: Job
    call: Call[Any]
    snapshot: codec.Encoded
    needs: list[Call[Any]]


class Repeater(Protocol):
    """Who may send a call again that failed because its group broke."""

    def repeat(self, job: Job, call: Call[Any], error: Exception) -> bool:
        """Keep the call, to be sent later; False where it is not to be repeated."""
        ...


class _Repeatable:
    """Outcome of a call that may be sent again when the group breaks; its arguments are kept."""

    def __init__(self, repeater: Repeater, job: Job, call: Call[Any]) -> None:
        self._repeater = repeater
        self._job = job
        self._call = call

    def settle(self, results: list[Any] | None, error: Exception | None) -> None:
        if error is None or not self._repeater.repeat(self._job, self._call, error):
            self._call.settle(results, error)


class _Leaving:
    """Owner of a call that has not been sent."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave

    def abandon(self, progress: Any) -> None:
        self._leave()

    async def released(self, progress: Any) -> None:
        """Nothing was sent."""


def _surface_of(group: Any, ranks: tuple[int, ...]) -> Any:
    """Return the group, or the view of it that stands for ``ranks``."""
    first, last, count = ranks[0], ranks[-1], len(ranks)
    if count == group.world_size and first <= last:
        return group
    # Views come from slices, so their ranks are evenly spaced.
    step = (last - first) // (count - 1) if count > 1 else 1
    stop = last + step
    return group[first : stop if stop >= 0 else None : step]


class Sender:
    """From jobs to frames, in order. One per generation; owns the queues of calls that wait.

    Args:
        loop: the group's.
        gang: the generation.
        group: handed to the user's dispatch functions; not kept alive.
        repeater: takes calls that may be sent again.
        has_async: whether the ranks have an async lane.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        gang: Gang,
        group: Any,
        repeater: Repeater,
        *,
        has_async: bool,
    ) -> None:
        self._loop = loop
        self._gang = gang
        self._calls = gang.calls
        self._group = weakref.ref(group)
        self._repeater = repeater
        self._has_async = has_async
        self._waiting: tuple[list[_Waiting], list[_Waiting]] = ([], [])
        self._layouts: dict[Target, dispatch.Layout] = {}

    def submit(self, job: Job) -> Call[Any]:
        """Send a job now, or put it in its place in the queue.

        Raises:
            DispatchError: its arguments can't be given out.
            TypeError: one can't be pickled.
        """
        target, method, mode, _, args, kwargs, options, kind = job
        outer = context.running.get()
        if outer is not None and options.timeout is None and outer.remaining is not None:
            # A call made by a method inherits what is left of the method's own time.
            job = job._replace(options=replace(options, timeout=max(outer.remaining, 1e-6)))
        if kind == _CALL and (method.options.execute is not _ALL or mode is _RANK_ZERO):
            job = self._narrow(job)
            target = job.target
        lane = ASYNC if self._has_async and method.is_async else COMPUTE
        call: Call[Any] = Call(self._loop, method.label)
        queue = self._waiting[lane]
        if queue and self._blocked(queue, target):
            self._defer(job, lane, call)
        else:
            for value in (*args, *kwargs.values()):
                if isinstance(value, Call):
                    self._defer(job, lane, call)
                    return call
            try:
                self._send(job, lane, call)
            except codec.UnresolvedError:  # one is hidden in a container
                self._defer(job, lane, call)
        return call

    def submit_quick(self, quick: Quick) -> Call[Any]:
        """Send a call without arguments: what `submit` does for it, without a look at anything."""
        job, label, ranks, single, lane, number, collect, on_error = quick
        if self._waiting[lane] or context.running.get() is not None:
            return self.submit(job)
        call: Call[Any] = Call(self._loop, label)
        calls = self._calls
        calls.last_id = call_id = calls.last_id + 1
        frame: list[Buffer] = [_HEADER_PACK(0, call_id, _CALL, NONE, number, 0)]
        pending = calls.send(call_id, label, ranks, lane, (frame,), call, single, on_error)
        call.attach(pending, collect, calls)
        return call

    def send_again(self, job: Job, call: Call[Any]) -> None:
        """Send a call that an earlier generation has not answered."""
        lane = ASYNC if self._has_async and job.method.is_async else COMPUTE
        try:
            self._send(job, lane, call)
        except Exception as error:  # noqa: BLE001  # what would have been raised at the call
            call.settle(None, error)

    def fail_waiting(self, error_of: Callable[[Job], Exception]) -> None:
        """Fail what has not been sent: the group has ended."""
        for queue in self._waiting:
            waiting_calls, queue[:] = list(queue), []
            for waiting in waiting_calls:
                waiting.call.settle(None, error_of(waiting.job))

    def _narrow(self, job: Job) -> Job:
        ranks = job.target.ranks
        if job.method.options.execute is Execute.ANY:
            load = self._calls.load
            return job._replace(target=Target((min(ranks, key=lambda rank: load[rank]),), True))
        return job._replace(target=Target(ranks[:1], True))

    def _blocked(self, queue: list[_Waiting], target: Target) -> bool:
        ranks = set(target.ranks)
        return any(not ranks.isdisjoint(waiting.job.target.ranks) for waiting in queue)

    def _layout(self, target: Target, mode: Mode) -> dispatch.Layout:
        layout = self._layouts.get(target)
        if layout is None:
            layout = dispatch.Layout(target.ranks, target.single, None, self._gang.meshes)
            self._layouts[target] = layout
        if not isinstance(mode, CustomMode):
            return layout
        # Only for this call: a group that its user drops must not live on in our tables.
        group = self._group()
        if group is None:
            raise GroupClosedError("the group was dropped by its user")
        return layout._replace(group=_surface_of(group, target.ranks))

    def _send(self, job: Job, lane: int, call: Call[Any]) -> None:
        target, method, mode, number, args, kwargs, options, kind = job
        plan = dispatch.plan(method, mode, args, kwargs, self._layout(target, mode), options.uneven)
        if plan.index is None and plan.payloads[0] == _NOTHING and job.is_plain:
            # The shortest way: nothing to encode.
            call_id = self._calls.next_id()
            frames: list[list[Buffer]] = [[HEADER.pack(0, call_id, kind, NONE, number, 0)]]
        else:
            loads = [self._encode(job, payload) for payload in plan.payloads]
            call_id = self._calls.next_id()
            if any(load.large is not None for load in loads):
                self._ship(job, lane, call, call_id, loads, plan)
                return
            frames = [
                pack(
                    kind,
                    call_id,
                    load.encoded.stream,
                    inline(load.encoded.buffers),
                    flags=load.flags,
                    aux=number,
                )
                for load in loads
            ]
            if plan.index is not None:
                frames = [frames[each] for each in plan.index]
        outcome: Outcome = call
        if method.options.idempotent:
            outcome = _Repeatable(self._repeater, job, call)
        pending = self._calls.send(
            call_id,
            method.label,
            target.ranks,
            lane,
            frames,
            outcome,
            target.single,
            options.on_error,
        )
        self._attach(job, call, pending, plan)

    def _attach(self, job: Job, call: Call[Any], pending: Pending, plan: dispatch.Plan) -> None:
        joined = plan.joined
        if joined is not None:
            pending.joins = joined
        call.attach(pending, plan.collect, self._calls)
        if job.options.timeout is not None:
            pending.expire = self._deadline(job, call)
        hang_after = job.options.hang_after
        if hang_after is not None:
            timer = self._loop.call_later(hang_after, self._gang.watch.report, pending, hang_after)
            call.add_done_callback(lambda _call: timer.cancel())

    def _ship(
        self,
        job: Job,
        lane: int,
        call: Call[Any],
        call_id: int,
        loads: list[Load],
        plan: dispatch.Plan,
    ) -> None:
        pending = self._calls.register(
            call_id,
            job.method.label,
            job.target.ranks,
            lane,
            _Repeatable(self._repeater, job, call) if job.method.options.idempotent else call,
            single=job.target.single,
            on_error=job.options.on_error,
        )
        self._attach(job, call, pending, plan)
        now = job.options.copy == "now"
        try:
            self._gang.transfers.ship(self._calls, pending, loads, plan.index, now=now)
        except ResourceError:
            self._calls.forget(pending)
            call.cancel()
            raise

    def _deadline(self, job: Job, call: Call[Any]) -> Callable[[], None]:
        timeout = job.options.timeout
        assert timeout is not None

        def expire() -> None:
            if not call.done():
                call.set_exception(
                    CallTimeoutError(f"{job.method.label} did not end within {timeout} s")
                )
                call.abandon()

        timer = self._loop.call_later(timeout, expire)
        call.add_done_callback(lambda _call: timer.cancel())
        return expire

    def _encode(self, job: Job, payload: dispatch.Payload) -> Load:
        args, kwargs, rows = payload
        number, kind = job.number, job.kind
        extras: dict[str, Any] = {}
        if rows is not None:
            extras["rows"] = rows
        if job.options.timeout is not None:
            extras["timeout"] = job.options.timeout
        if number == NO_METHOD and kind == _CALL:
            extras["name"] = job.method.name
        try:
            encoded = codec.encode((args, kwargs, extras) if extras else (args, kwargs))
        except codec.UnresolvedError:
            raise
        except Exception as error:
            raise self._unsendable(job, args, kwargs, error) from error
        large = shipment(encoded) if self._gang.has_arena else None
        return Load(kind, EXTRAS if extras else 0, number, encoded, large)

    def _unsendable(
        self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
    ) -> TypeError:
        try:
            names = [n for n in inspect.signature(job.method.function).parameters if n != "self"]
        except (TypeError, ValueError):
            names = []
        named = [(names[i] if i < len(names) else f"#{i}", arg) for i, arg in enumerate(args)]
        culprit = "an argument"
        for name, value in [*named, *kwargs.items()]:
            try:
                codec.encode(value)
            except Exception:  # noqa: BLE001  # this is the one we look for
                culprit = f"argument {codec.explain_failure(value, name)}"
                break
        told = failures.text_of(error)
        return TypeError(f"{job.method.label}: {culprit} can't be pickled: {told}")

    def _defer(self, job: Job, lane: int, call: Call[Any]) -> None:
        """Keep a call's place until the calls among its arguments have values.

        The other arguments are taken as they are now (O-7).
        """
        try:
            snapshot, needs = codec.encode_with_calls((job.args, dict(job.kwargs)))
        except Exception as error:
            raise self._unsendable(job, job.args, job.kwargs, error) from error
        waiting = _Waiting(job, call, snapshot, needs)
        queue = self._waiting[lane]
        queue.append(waiting)

        def leave() -> None:
            if waiting in queue:
                queue.remove(waiting)
                self._advance(lane)

        def known(need: asyncio.Future[Any]) -> None:
            if not call.done():
                if need.cancelled():
                    call.cancel()
                elif (error := need.exception()) is not None:
                    call.settle(None, error if isinstance(error, Exception) else None)
                    leave()
            self._advance(lane)

        call.attach(None, None, _Leaving(leave))
        if job.options.timeout is not None:
            self._deadline(job, call)
        for need in {id(need): need for need in needs}.values():
            need.add_done_callback(known)
        self._advance(lane)

    def _advance(self, lane: int) -> None:
        """Send what can go now: its values are there, and no earlier call keeps it back."""
        queue = self._waiting[lane]
        for waiting in list(queue):
            if waiting not in queue or waiting.call.done():
                continue
            before = queue[: queue.index(waiting)]
            if not all(need.done() for need in waiting.needs):
                continue
            if self._blocked(before, waiting.job.target):
                continue
            queue.remove(waiting)
            try:
                self._gang.check()
                values = [need.result() for need in waiting.needs]
                args, kwargs = codec.decode_with_values(waiting.snapshot, values)
                self._send(waiting.job._replace(args=args, kwargs=kwargs), lane, waiting.call)
            except asyncio.CancelledError:  # of a call whose value is needed
                waiting.call.cancel()
            except Exception as error:  # noqa: BLE001  # what would have been raised at the call
                waiting.call.settle(None, error)
