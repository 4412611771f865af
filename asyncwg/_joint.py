"""A call of several groups at once: all of them enter it together, or none (O-1, E-3, E-5).

::

    union.sync(x) ─▶ plan over all ranks ─▶ encode ─▶ a share for each group, in one turn of the loop
        Call ◀── Joint ◀── settle ◀── each group's pending table

- U-1 No group gets a byte before everything is encoded; all get their share in one step, behind what is
  already on its way to any of them.
- U-2 The first failure of a rank of one group is a failure for the others too: those that have not answered
  `error_grace` later are treated as `on_error` says, in each group.
- U-3 A call that nobody waits for is dropped by all ranks of all groups, or by none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncwg import dispatch
from asyncwg._driver.calls import Calls
from asyncwg._driver.pending import Pending, fold_equal
from asyncwg._job import Job, expire_later, inherited
from asyncwg._sender import Sender
from asyncwg._waiting import Place, Waiting
from asyncwg._wire import codec, failures
from asyncwg.call import Call
from asyncwg.errors import GroupBrokenError, WorkerGroupError

if TYPE_CHECKING:
    from asyncwg._driver.departure import Load

__all__ = ["submit"]


class _Share:
    """What one group does of a call, and who is told by its pending table."""

    error: Exception | None = None
    results: Sequence[Any] | None = None
    pending: Pending | None = None
    held: bool | None = None
    """Whether none of its ranks had started it when it was abandoned."""
    failed_at: float | None = None

    def __init__(self, joint: Joint, place: Place, calls: Calls, name: str) -> None:
        self._joint: Joint | None = joint
        self.place = place
        self.calls = calls
        self.name = name

    @property
    def settled(self) -> bool:
        return self.error is not None or self.results is not None

    def settle(self, results: list[Any] | None, error: Exception | None) -> None:
        """Take how it ended. For the pending table."""
        self.results, self.error = results, error
        if self._joint is not None:
            self._joint.settled()

    def over(self) -> None:
        """The whole call has ended."""
        self._joint = None
        if self.pending is not None:
            self.pending.watch = None

    def landed(self) -> dict[int, Any]:
        """Return value or exception of the ranks that have answered."""
        return {} if self.pending is None else dict(self.pending.landed())


class Joint:
    """One call of several groups under way: its progress and its owner, for `Call`."""

    watch: Callable[[], None] | None = None
    """Called whenever a rank has answered."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Call[Any], label: str) -> None:
        self._loop = loop
        self._call: Call[Any] | None = call
        """None when it has ended."""
        self._label = label
        self._shares: list[_Share] = []
        self._departed = False
        self._echoes: list[Exception] = []
        """What stands for the ranks of a group that wait for what failed in another."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks, counted through all groups."""
        return range(sum(len(share.place.job.target.ranks) for share in self._shares))

    def landed(self) -> list[tuple[int, Any]]:
        """Return rank and value, or exception, of those that have answered."""
        landed: list[tuple[int, Any]] = []
        first = 0
        for share in self._shares:
            ranks = share.place.job.target.ranks
            landed += [(first + ranks.index(rank), value) for rank, value in share.landed().items()]
            first += len(ranks)
        return landed

    def depart(
        self,
        members: Sequence[tuple[Place, Calls, str]],
        loads: Sequence[Load],
        index: Sequence[int] | None,
    ) -> None:
        """Give each group its share, all in this turn of the loop."""
        self._shares = [_Share(self, *member) for member in members]
        first = 0
        for share in self._shares:
            sender, lane, job = share.place
            size = len(job.target.ranks)
            mine = None if index is None else index[first : first + size]
            first += size
            used = sorted(set(mine or [0]))
            own = [loads[each]._replace(aux=job.number) for each in used]
            places = None if mine is None else [used.index(each) for each in mine]
            try:
                share.pending = sender.hand_out(job, lane, share, own, places)
            except Exception as error:  # noqa: BLE001  # no room there: the others must not wait for it
                share.settle(None, error)
                continue
            share.pending.watch = self._heard
            if job.options.hang_after is not None and self._call is not None:
                sender.report_later(share.pending, job.options.hang_after, self._call)
        self._departed = True
        self.settled()

    def expires(self, expire: Callable[[], None]) -> None:
        """Take what ends the call when its deadline has passed."""
        for share in self._shares:
            if share.pending is not None:
                share.pending.expire = expire

    def abandon(self, progress: Any) -> None:
        """Nobody waits for it any more: drop it on all ranks, or on none (U-3). For `Call`."""
        del progress
        sent = [share for share in self._shares if share.pending is not None]
        if all(share.pending is not None and share.pending.unsent for share in self._shares):
            for share in sent:
                share.calls.abandon(share.pending)  # type: ignore[arg-type]  # it has one
            return
        for share in sent:
            self._ask(share)

    def _ask(self, share: _Share) -> None:
        pending = share.pending
        assert pending is not None

        def verdict(held: bool) -> None:
            share.held = held
            sent = [each for each in self._shares if each.pending is not None]
            if any(each.held is None for each in sent):
                return
            drop = all(each.held for each in sent)
            for each in sent:
                each.calls.decide(each.pending, drop=drop)  # type: ignore[arg-type]  # it has one

        share.calls.abandon_share(pending, verdict)

    async def released(self, progress: Any) -> None:
        """Wait until no rank reads what was sent by reference. For `Call`."""
        del progress
        for share in self._shares:
            if share.pending is not None:
                await share.calls.released(share.pending)

    def settled(self) -> None:
        """A share has ended, or all are on their way."""
        failed = [share for share in self._shares if share.error is not None]
        if not self._departed:
            return
        if not all(share.settled for share in self._shares):
            if failed:
                self._grace()
            return
        if self._timer is not None:
            self._timer.cancel()
        call, self._call = self._call, None
        if call is None:
            return
        for share in self._shares:
            share.over()  # or call and shares would hold each other, and the results
        if failed:
            call.settle(None, self._combined(failed))
        else:
            results = [value for share in self._shares for value in share.results or ()]
            for share in self._shares:
                share.results = ()
            call.settle(results, None)

    def _heard(self) -> None:
        for share in self._shares:
            if share.failed_at is None and share.pending is not None and share.pending.errors:
                share.failed_at = self._loop.time()
                self._grace()
        if self.watch is not None:
            self.watch()

    def _grace(self) -> None:
        if self._timer is None:
            grace = min(share.calls.error_grace for share in self._shares)
            self._timer = self._loop.call_later(grace, self._grace_over)

    def _grace_over(self) -> None:
        """What failed in one group keeps the ranks of another waiting: end those too (U-2)."""
        names = [s.name for s in self._shares if s.error is not None or s.failed_at is not None]
        for share in self._shares:
            if share.settled or share.failed_at is not None or share.pending is None:
                continue  # its own pending table sees to what failed there
            echo = GroupBrokenError(f"{self._label} failed in group {', '.join(map(repr, names))}")
            self._echoes.append(echo)
            share.calls.give_up(share.pending, echo)

    def _combined(self, failed: list[_Share]) -> Exception:
        """Make one exception of what the groups tell, the first to fail first."""
        failed.sort(key=lambda share: share.failed_at or self._loop.time())
        errors = [share.error for share in failed if share.error is not None]
        raised: list[Exception] = []
        other: list[Exception] = []
        notes: list[str] = []
        for error in errors:
            if isinstance(error, WorkerGroupError):
                raised += error.exceptions
                notes += getattr(error, "__notes__", [])
            elif error in self._echoes:
                notes += getattr(error, "__notes__", [])
            else:
                other.append(error)
        if other:
            # A death or a broken group ends the whole call; what ranks raised is often its echo.
            told = min(other, key=lambda error: isinstance(error, GroupBrokenError))
            notes += [
                f"{type(error).__name__}: {failures.text_of(error)}"
                for error in (*other, *raised)
                if error is not told
            ]
        else:
            fold_equal(raised)
            where = ", ".join(repr(share.name) for share in failed if share.failed_at is not None)
            told = WorkerGroupError(
                f"{self._label} failed on {len(raised)} of {len(self.ranks)} ranks (of group {where})",
                raised,
            )
        for note in notes:
            told.add_note(note)
        return told


Member = tuple[Sender, Calls, Job, str]
"""One group of a call: its sender, its pending table, what it is to do, its name."""


def submit(members: Sequence[Member], group: Any) -> Call[Any]:
    """Send a call to all members, now, or keep its place in every group's order.

    Args:
        members: one for each group; their jobs have the same mode, arguments and options.
        group: handed to the user's dispatch functions.

    Raises:
        DispatchError: the arguments can't be given out.
        TypeError: one can't be pickled.
    """
    members = [(sender, calls, inherited(job), name) for sender, calls, job, name in members]
    lead, _, job, _ = members[0]
    loop = asyncio.get_running_loop()
    call: Call[Any] = Call(loop, job.method.label)
    places = [Place(sender, sender.lane_of(each.method), each) for sender, _, each, _ in members]

    def go(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _send(members, places, group, call, args, kwargs)

    def go_later() -> None:
        for sender, _, _, _ in members:
            sender.check()
        go(*codec.decode_with_values(snapshot, waiting.values()))

    if not any(place.sender.must_wait(place.lane, place.job.target) for place in places):
        try:
            go(job.args, job.kwargs)
        except codec.UnresolvedError:
            pass  # un-awaited calls are among the arguments
        else:
            return call
    snapshot, needs = lead.snapshot(job)
    waiting = Waiting(call, needs, places, go_later)
    if job.options.timeout is not None:
        expire_later(loop, job, call)
    waiting.enter()
    return call


def _send(
    members: Sequence[Member],
    places: Sequence[Place],
    group: Any,
    call: Call[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Call):
            raise codec.UnresolvedError(value)
    lead, _, job, _ = members[0]
    job = job._replace(args=args, kwargs=kwargs)
    size = sum(len(place.job.target.ranks) for place in places)
    layout = dispatch.Layout(tuple(range(size)), False, group, {})
    plan = dispatch.plan(job.method, job.mode, args, kwargs, layout, job.options.uneven)
    loads = [lead.encode(job, payload) for payload in plan.payloads]
    loop = asyncio.get_running_loop()
    joint = Joint(loop, call, job.method.label)
    call.attach(joint, plan.collect, joint)
    # Without the arguments, which a call must not keep alive.
    named = [
        (place._replace(job=place.job._replace(args=(), kwargs={})), calls, name)
        for place, (_, calls, _, name) in zip(places, members, strict=True)
    ]
    joint.depart(named, loads, plan.index)
    if job.options.timeout is not None:
        joint.expires(expire_later(loop, job, call))
