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
import collections
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Protocol

from asyncwg import dispatch
from asyncwg._driver.departure import Load
from asyncwg._driver.gang import Gang
from asyncwg._driver.pending import Outcome, Pending
from asyncwg._driver.rank import ASYNC, COMPUTE
from asyncwg._job import Job, Quick, Target, expire_later, inherited
from asyncwg._modes import CustomMode, Mode
from asyncwg._stream import caller
from asyncwg._waiting import Place, Waiting
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import EXTRAS, HEADER, NONE, STREAM, UNNUMBERED, Buffer, Kind, pack
from asyncwg._wire.handle import Handle
from asyncwg._wire.shipment import shipment
from asyncwg._wire.sources import inline
from asyncwg._worker import context
from asyncwg.call import Call
from asyncwg.decorator import Dispatch, Execute, Method
from asyncwg.errors import GroupClosedError, ResourceError, UsageError

_CALL: Final = int(Kind.CALL)
KEYS: Final = 1 << 16
"""Keys of sticky calls that are remembered; the one that was used longest ago goes first."""
# Looked up on every call, where an attribute of a class costs more than a name of the module.
_ALL: Final = Execute.ALL
_HEADER_PACK: Final = HEADER.pack
_RANK_ZERO: Final = Dispatch.RANK_ZERO
_NOTHING: Final = dispatch.Payload((), {}, None)


class Repeater(Protocol):
    """Who may send a call again that failed because its group broke."""

    def repeat(self, call: Call[Any], error: Exception, again: Callable[[Sender], None]) -> bool:
        """Keep the call, for ``again`` to send it later; False where it is not to be repeated."""
        ...


class _Repeatable:
    """Outcome of a call that may be sent again when the group breaks; its arguments are kept."""

    def __init__(self, repeater: Repeater, job: Job, call: Call[Any]) -> None:
        self._repeater = repeater
        self._job = job
        self._call = call

    def settle(self, results: list[Any] | None, error: Exception | None) -> None:
        if error is None or not self._repeater.repeat(self._call, error, self._send):
            self._call.settle(results, error)

    def _send(self, sender: Sender) -> None:
        sender.send_again(self._job, self._call)


def _surface_of(group: Any, ranks: tuple[int, ...]) -> Any:
    """Return the group, or the view of it that stands for ``ranks``."""
    first, last, count = ranks[0], ranks[-1], len(ranks)
    if count == group.world_size and first <= last:
        return group
    # Views come from slices, so their ranks are evenly spaced.
    step = (last - first) // (count - 1) if count > 1 else 1
    stop = last + step
    return group[first : stop if stop >= 0 else None : step]


def _plan_with_handles(job: Job, layout: dispatch.Layout) -> dispatch.Plan:
    """Plan a call whose method gets handles: they are split as their values are."""

    def opened(value: Any) -> Any:
        return value.get() if isinstance(value, Handle) else value

    method, mode, args, kwargs = job.method, job.mode, job.args, job.kwargs
    if isinstance(mode, CustomMode):  # the user's function gets them as they are
        return dispatch.plan(method, mode, args, kwargs, layout, job.options.uneven)
    closed = {
        key for key, value in [*enumerate(args), *kwargs.items()] if isinstance(value, Handle)
    }
    args = tuple(opened(value) for value in args)
    kwargs = {key: opened(value) for key, value in kwargs.items()}
    plan = dispatch.plan(method, mode, args, kwargs, layout, job.options.uneven)
    payloads = tuple(
        payload._replace(
            args=tuple(Handle.of(v) if i in closed else v for i, v in enumerate(payload.args)),
            kwargs={k: Handle.of(v) if k in closed else v for k, v in payload.kwargs.items()},
        )
        for payload in plan.payloads
    )
    return plan._replace(payloads=payloads)


def _nothing(_results: list[Any]) -> None:
    """Make nothing of the answers of generators: their items were the results."""


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
        self.calls: Final = gang.calls
        """The pending table."""
        self._calls = gang.calls
        self._group = weakref.ref(group)
        self._repeater = repeater
        self._has_async = has_async
        self._waiting: tuple[list[Waiting], list[Waiting]] = ([], [])
        self._sticky: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
        """By the key of a sticky call, the rank that has it; those used last stand last."""
        self._streams: dict[Any, Target] = {}
        """By their feeds, the ranks whose compute lane a generator holds, or will."""
        self._layouts: dict[tuple[Target, str | None], dispatch.Layout] = {}

    def submit(self, job: Job) -> Call[Any]:
        """Send a job now, or put it in its place in the queue.

        Raises:
            DispatchError: its arguments can't be given out.
            TypeError: one can't be pickled.
        """
        target, method, mode, _, args, kwargs, _, kind, _ = job
        if context.running.get() is not None:
            job = inherited(job)
        if kind == _CALL and (method.options.execute is not _ALL or mode is _RANK_ZERO):
            job = self._narrow(job)
            target = job.target
        lane = self.lane_of(method)
        if self._streams and lane == COMPUTE:
            self._refuse_inside_a_stream(job)
        call: Call[Any] = Call(self._loop, method.label)
        if job.feed is not None and lane == COMPUTE:
            self._streams[job.feed] = target
            call.add_done_callback(lambda _call: self._streams.pop(job.feed, None))
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
        if self._waiting[lane] or self._streams or context.running.get() is not None:
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
        try:
            self._send(job, self.lane_of(job.method), call)
        except Exception as error:  # noqa: BLE001  # what would have been raised at the call
            call.settle(None, error)

    def hold_back(self, job: Job, until: asyncio.Future[None]) -> None:
        """Keep every call back until ``until`` is done.

        Args:
            job: of all ranks; it stands in the queues meanwhile, and is never sent.
            until: e.g. that there is a way to the ranks.
        """
        call: Call[Any] = Call(self._loop, job.method.label)
        call.add_done_callback(lambda _call: call.cancelled() or call.exception())  # nobody's call
        places = [Place(self, lane, job) for lane in (COMPUTE, ASYNC)]
        Waiting(call, [until], places, lambda: None).enter()

    def fail_waiting(self, error_of: Callable[[Job], Exception]) -> None:
        """Fail what has not been sent: the group has ended. What may be repeated waits for the next one."""
        for waiting in [*self._waiting[COMPUTE], *self._waiting[ASYNC]]:
            error = error_of(next(place.job for place in waiting.places if place.sender is self))
            again = waiting.again
            if again is None or not self._repeater.repeat(waiting.call, error, again):
                waiting.call.settle(None, error)
            waiting.abandon(None)

    def check(self) -> None:
        """Raise if the ranks take no calls."""
        self._gang.check()

    def lane_of(self, method: Method) -> int:
        """Return which lane of the ranks runs a method."""
        return ASYNC if self._has_async and method.is_async else COMPUTE

    def queue(self, lane: int) -> list[Waiting]:
        """Return the calls that wait for a lane, in order."""
        return self._waiting[lane]

    def at_its_turn(self, waiting: Waiting, place: Place) -> bool:
        """Whether no earlier call keeps one back that waits here."""
        queue = self._waiting[place.lane]
        return not self._blocked(queue[: queue.index(waiting)], place.job.target)

    def must_wait(self, lane: int, target: Target) -> bool:
        """Whether a call to these ranks has to wait for an earlier one."""
        return self._blocked(self._waiting[lane], target)

    def _narrow(self, job: Job) -> Job:
        ranks = job.target.ranks
        if job.method.options.execute is Execute.ANY:
            return job._replace(target=Target((self._pick(ranks, job.options.sticky),), True))
        return job._replace(target=Target(ranks[:1], True))

    def _pick(self, ranks: Sequence[int], key: Hashable) -> int:
        """Return the rank with the least to do, or the one that has had the key before."""
        known = self._sticky.get(key) if key is not None else None
        if known is not None and known in ranks:
            self._sticky.move_to_end(key)
            return known
        load = list(self._calls.load)
        for waiting in (*self._waiting[COMPUTE], *self._waiting[ASYNC]):
            for place in waiting.places:
                for rank in place.job.target.ranks if place.sender is self else ():
                    load[rank] += 1
        rank = min(ranks, key=lambda rank: load[rank])
        if key is not None:
            self._sticky[key] = rank
            self._sticky.move_to_end(key)
            if len(self._sticky) > KEYS:
                self._sticky.popitem(last=False)
        return rank

    def _blocked(self, queue: list[Waiting], target: Target) -> bool:
        ranks = set(target.ranks)
        return any(
            not ranks.isdisjoint(place.job.target.ranks)
            for waiting in queue
            for place in waiting.places
            if place.sender is self
        )

    def _layout(self, target: Target, mode: Mode, role: str | None) -> dispatch.Layout:
        layout = self._layouts.get((target, role))
        if layout is None:
            meshes = self._gang.meshes.setdefault(role, {})  # each role has its own
            layout = dispatch.Layout(target.ranks, target.single, None, meshes)
            self._layouts[target, role] = layout
        if not isinstance(mode, CustomMode):
            return layout
        # Only for this call: a group that its user drops must not live on in our tables.
        group = self._group()
        if group is None:
            raise GroupClosedError("the group was dropped by its user")
        if role is not None:
            group = group.spawn([role])[role]
        return layout._replace(group=_surface_of(group, target.ranks))

    def _send(self, job: Job, lane: int, call: Call[Any]) -> None:
        target, method, mode, number, args, kwargs, options, kind, _ = job
        layout = self._layout(target, mode, method.role)
        if method.options.materialize_futures:
            plan = dispatch.plan(method, mode, args, kwargs, layout, options.uneven)
        else:
            plan = _plan_with_handles(job, layout)
        outcome: Outcome = call
        if method.options.idempotent and job.feed is None:
            outcome = _Repeatable(self._repeater, job, call)
        if plan.index is None and plan.payloads[0] == _NOTHING and job.is_plain:
            # The shortest way: nothing to encode.
            call_id = self._calls.next_id()
            flags = NONE | STREAM if job.feed is not None else NONE
            frames: list[list[Buffer]] = [[HEADER.pack(0, call_id, kind, flags, number, 0)]]
            pending = self._calls.send(
                call_id,
                method.label,
                target.ranks,
                lane,
                frames,
                outcome,
                target.single,
                options.on_error,
                plan.joined or (),
            )
        else:
            loads = [self.encode(job, payload) for payload in plan.payloads]
            pending = self.hand_out(job, lane, outcome, loads, plan.index, plan.joined or ())
        if job.feed is not None:
            self._feed(job, pending)
            call.attach(pending, _nothing, self._calls)
        else:
            call.attach(pending, plan.collect, self._calls)
        if options.timeout is not None:
            pending.expire = expire_later(self._loop, job, call)
        if options.hang_after is not None:
            self.report_later(pending, options.hang_after, call)

    def _feed(self, job: Job, pending: Pending) -> None:
        pending.feed = job.feed
        pending.hung = True  # it lasts as long as its reader takes
        job.feed.pull = functools.partial(self._calls.pull, pending)

    def _refuse_inside_a_stream(self, job: Job) -> None:
        who = caller()
        for feed, target in self._streams.items():
            if (
                who is not None
                and feed.reader is who
                and not set(target.ranks).isdisjoint(job.target.ranks)
            ):
                raise UsageError(
                    f"{job.method.label} would wait for the 'async for' loop that it is called in: its ranks "
                    "run a def generator until the loop is left. Leave the loop first, or make the generator "
                    "'async def'"
                )

    def hand_out(
        self,
        job: Job,
        lane: int,
        outcome: Outcome,
        loads: Sequence[Load],
        index: Sequence[int] | None,
        joins: Sequence[int] = (),
    ) -> Pending:
        """Send what is encoded to the job's ranks: to position i ``loads[index[i]]``.

        Args:
            job: what is sent; its arguments are in ``loads``.
            lane: of the ranks.
            outcome: told the end, once.
            loads: the different payloads.
            index: by position, the number of its load; None when all get the first.
            joins: the ranks whose results will be joined, in that order.

        Raises:
            ResourceError: it can't fit into the arena. Nothing was sent.
        """
        calls, method, ranks = self._calls, job.method, job.target.ranks
        call_id = calls.next_id()
        if not self._gang.has_arena or all(load.large is None for load in loads):
            frames = [
                pack(
                    load.kind,
                    call_id,
                    load.encoded.stream,
                    inline(load.encoded.buffers),
                    flags=load.flags,
                    aux=load.aux,
                )
                for load in loads
            ]
            if index is not None:
                frames = [frames[each] for each in index]
            single, on_error = job.target.single, job.options.on_error
            return calls.send(
                call_id, method.label, ranks, lane, frames, outcome, single, on_error, joins
            )
        pending = calls.register(
            call_id,
            method.label,
            ranks,
            lane,
            outcome,
            single=job.target.single,
            on_error=job.options.on_error,
            joins=joins,
        )
        now = job.options.copy == "now"
        try:
            self._gang.transfers.ship(calls, pending, loads, index, now=now)
        except ResourceError:
            calls.forget(pending)
            raise
        return pending

    def report_later(self, pending: Pending, hang_after: float, call: Call[Any]) -> None:
        """Have the call reported if it runs longer than ``hang_after`` seconds."""
        timer = self._loop.call_later(hang_after, self._gang.watch.report, pending, hang_after)
        call.add_done_callback(lambda _call: timer.cancel())

    def encode(self, job: Job, payload: dispatch.Payload) -> Load:
        """Turn what a rank gets into bytes.

        Raises:
            TypeError: something can't be pickled; the message says what.
            UnresolvedError: an un-awaited call is hidden in it.
        """
        args, kwargs, rows, total = payload
        number, kind = job.number, job.kind
        extras: dict[str, Any] = {}
        if rows is not None:
            extras["rows"] = rows, total
        if job.options.timeout is not None:
            extras["timeout"] = job.options.timeout
        if number >= UNNUMBERED and kind == _CALL:
            extras["name"] = job.method.name
        try:
            encoded = codec.encode((args, kwargs, extras) if extras else (args, kwargs))
        except codec.UnresolvedError:
            raise
        except Exception as error:
            raise self._unsendable(job, args, kwargs, error) from error
        large = shipment(encoded) if self._gang.has_arena else None
        flags = (EXTRAS if extras else 0) | (STREAM if job.feed is not None else 0)
        return Load(kind, flags, number, encoded, large)

    def _unsendable(
        self, job: Job, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
    ) -> TypeError | UsageError:
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
        kind = UsageError if isinstance(error, UsageError) else TypeError
        return kind(f"{job.method.label}: {culprit} can't be pickled: {told}")

    def _defer(self, job: Job, lane: int, call: Call[Any]) -> None:
        """Keep a call's place until the calls among its arguments have values.

        The other arguments are taken as they are now (O-7).
        """
        snapshot, needs = self.snapshot(job)
        if job.options.timeout is not None:
            expire_later(self._loop, job, call)
        self._wait(job, lane, call, snapshot, needs)

    def _wait(
        self, job: Job, lane: int, call: Call[Any], snapshot: codec.Encoded, needs: list[Call[Any]]
    ) -> None:
        def go() -> None:
            self._gang.check()
            values = waiting.values()
            if not job.method.options.materialize_futures:
                values = [Handle.of(value) for value in values]
            args, kwargs = codec.decode_with_values(snapshot, values)
            self._send(job._replace(args=args, kwargs=kwargs), lane, call)

        def again(sender: Sender) -> None:
            sender._wait(job, lane, call, snapshot, needs)

        waiting = Waiting(call, needs, [Place(self, lane, job)], go)
        if job.method.options.idempotent and job.feed is None:
            waiting.again = again
        waiting.enter()

    def snapshot(self, job: Job) -> tuple[codec.Encoded, list[Call[Any]]]:
        """Return a job's arguments as they are now, and the un-awaited calls among them.

        Raises:
            TypeError: something can't be pickled; the message says what.
            UsageError: a call belongs to another loop.
        """
        try:
            snapshot, needs = codec.encode_with_calls((job.args, dict(job.kwargs)))
        except Exception as error:
            raise self._unsendable(job, job.args, job.kwargs, error) from error
        for need in needs:
            if need.get_loop() is not self._loop:
                raise UsageError(
                    f"{job.method.label}: {need!r} belongs to another event loop, so it can't be waited for "
                    "here: give its value"
                )
        return snapshot, needs

    def advance(self, lane: int) -> None:
        """Send what can go now: its values are there, and no earlier call keeps it back."""
        if self._gang.broken is not None:
            return  # who is told of that ends what waits
        queue = self._waiting[lane]
        for waiting in list(queue):
            if waiting not in queue or waiting.call.done() or not waiting.free:
                continue
            waiting.leave()
            try:
                waiting.go()
            except asyncio.CancelledError:  # of a call whose value is needed
                waiting.call.cancel()
            except Exception as error:  # noqa: BLE001  # what would have been raised at the call
                waiting.call.settle(None, error)
            for other, its_lane, _ in waiting.places:
                if other is not self or its_lane != lane:
                    other.advance(its_lane)
