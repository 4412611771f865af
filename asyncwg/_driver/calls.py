"""The calls of one generation that some rank has not answered yet: the pending table.

- T-1 A call is handed to all its ranks in one step, in the order of ``send`` (O-1).
- T-2 ``settle`` of every call's outcome is called at most once: when all its ranks have answered (O-5), when
  a rank has failed and the others have not answered within ``error_grace`` (E-3), or when everything
  fails at once (E-4). Not at all when it was abandoned.
- T-3 Replies are matched by the number of the call; a late one is dropped (O-6).

The table is changed in this file only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from asyncwg._driver.arena import Block
from asyncwg._driver.pending import Outcome, Pending, Relay
from asyncwg._driver.rank import Rank
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import ARENA, ITEMS, NONE, Buffer, Kind, pack, unpack
from asyncwg.errors import WorkerError

_HOLD: Final = int(Kind.HOLD)
_RESULT: Final = int(Kind.RESULT)


class Calls:
    """The pending table. Belongs to the group's event loop.

    Args:
        loop: the group's.
        ranks: all ranks, by number.
        error_grace: seconds from the first failure of a call until it is told without the rest.
        overdue: told of such a call, who waits for it, and the error so far; tells them.
        receive: takes ``(rank, flags, body, n_buffers, wanted)`` of a result and returns its stream and
            buffers, wherever they stand.
        readers_gone: waits until no rank reads some blocks.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ranks: Sequence[Rank],
        error_grace: float,
        overdue: Callable[[Pending, Outcome | None, Exception], None],
        receive: Callable[[int, int, memoryview, int, bool], tuple[memoryview, list[memoryview]]],
        readers_gone: Callable[[Sequence[Block]], Awaitable[None]],
    ) -> None:
        self._loop = loop
        self._ranks = ranks
        self.error_grace = error_grace
        self.decides = True
        """Whether the others are waited for here when a rank has failed; a program that is attached leaves it
        to the host."""
        self._overdue = overdue
        self._unpack = receive
        self._readers_gone = readers_gone
        self._pending: dict[int, Pending] = {}
        self.last_id = 0
        """Number of the newest call."""
        self.load = [0] * len(ranks)
        """Unanswered calls by rank."""
        self._watchers: list[asyncio.Future[None]] = []

    def next_id(self) -> int:
        """Return the number of the next call; calls are sent in the order of their numbers."""
        self.last_id += 1
        return self.last_id

    def register(
        self,
        call_id: int,
        label: str,
        ranks: Sequence[int],
        lane: int,
        outcome: Outcome,
        *,
        single: bool,
        on_error: str,
        joins: Sequence[int] = (),
    ) -> Pending:
        """Take note of a call; see `send`."""
        pending = Pending(call_id, label, ranks, lane, outcome, single, on_error)
        if joins:
            pending.joins = joins
        self._pending[call_id] = pending
        for rank in ranks:
            self.load[rank] += 1
        return pending

    def send(
        self,
        call_id: int,
        label: str,
        ranks: Sequence[int],
        lane: int,
        frames: Sequence[Sequence[Buffer]],
        outcome: Outcome,
        single: bool,
        on_error: str,
        joins: Sequence[int] = (),
        relay: Relay | None = None,
    ) -> Pending:
        """Hand a call to all its ranks, now.

        Args:
            call_id: from ``next_id``, in the frames.
            label: ``Class.method``.
            ranks: the ranks, in order.
            lane: of `asyncwg._driver.rank`.
            frames: one frame per position, or one for all.
            outcome: told the end, once.
            single: whether an error comes alone instead of in a `WorkerGroupError`.
            on_error: ``"abort"`` or ``"wait"``.
            joins: the ranks whose results will be joined, in that order.
            relay: gets the answers as they come.
        """
        pending = Pending(call_id, label, ranks, lane, outcome, single, on_error)
        self._pending[call_id] = pending
        if joins:
            pending.joins = joins
        if relay is not None:
            pending.relay = relay
        everyone, load = self._ranks, self.load
        if len(frames) == 1:
            frame = frames[0]
            for rank in ranks:
                load[rank] += 1
                everyone[rank].lanes[lane].send(frame)
        else:
            for rank, each in zip(ranks, frames, strict=True):
                load[rank] += 1
                everyone[rank].lanes[lane].send(each)
        return pending

    def result(self, rank: int, call_id: int, flags: int, n_buffers: int, body: memoryview) -> None:
        """Take a rank's RESULT."""
        pending = self._pending.get(call_id)
        if pending is None or pending.outcome is None or rank in pending.results:
            if flags & ARENA:
                self._unpack(rank, flags, body, n_buffers, False)
            if pending is None or not pending.owes(rank):
                return
            pending.results[rank] = None
        elif pending.relay is not None:
            pending.relay.forward(rank, _RESULT, flags, n_buffers, body)
            pending.results[rank] = None
        elif flags & NONE:
            if pending.feed is not None and not pending.owes(rank):
                return  # an item of its could not be read, and was its answer
            pending.results[rank] = None
        else:
            try:
                stream, buffers = (
                    self._unpack(rank, flags, body, n_buffers, True)
                    if flags & ARENA
                    else unpack(body, n_buffers)
                )
                pending.results[rank] = codec.decode(stream, buffers)
            except BaseException as error:  # noqa: BLE001  # a user's unpickling
                self._failed(pending, rank, _unreadable(pending, rank, error))
                return
        pending.left -= 1
        self.load[rank] -= 1
        if pending.watch is not None:
            pending.watch()
        if not pending.left:
            self._complete(pending)
        if self._watchers:
            self._wake()

    def item(self, rank: int, call_id: int, flags: int, n_buffers: int, body: memoryview) -> None:
        """Take a rank's ITEM."""
        pending = self._pending.get(call_id)
        if pending is None or pending.outcome is None or pending.feed is None:
            if flags & ARENA:
                self._unpack(rank, flags, body, n_buffers, False)
            return
        if pending.relay is not None:
            pending.relay.forward(rank, Kind.ITEM, flags, n_buffers, body)
            return
        try:
            item: Any = None
            if not flags & NONE:
                item = codec.decode(
                    *(
                        self._unpack(rank, flags, body, n_buffers, True)
                        if flags & ARENA
                        else unpack(body, n_buffers)
                    )
                )
        except BaseException as error:  # noqa: BLE001  # a user's unpickling
            self._ranks[rank].control.send(pack(Kind.CANCEL, call_id, aux=pending.lane))
            if pending.owes(rank):
                self._failed(pending, rank, _unreadable(pending, rank, error))
            return
        pending.feed.put(rank, item)

    def cancel_silent(self, pending: Pending) -> None:
        """Tell the ranks that have not answered that nobody waits for them."""
        for each in pending.silent:
            self._ranks[each].control.send(pack(Kind.CANCEL, pending.call_id, aux=pending.lane))

    def pull(self, pending: Pending, rank: int) -> None:
        """An item of a rank was read: it may make one more."""
        if pending.owes(rank):
            self._ranks[rank].control.send(pack(Kind.PULL, pending.call_id, aux=pending.lane))

    def answered(self, rank: int, call_id: int) -> None:
        """Take an answer that is no result: the rank is ready."""
        self.result(rank, call_id, NONE, 0, memoryview(b""))

    def expired(self, rank: int, call_id: int) -> None:
        """Take it from a rank that the deadline has passed: its clock may be a little ahead of ours."""
        pending = self._pending.get(call_id)
        if pending is not None and pending.relay is not None and pending.outcome is not None:
            # Its deadline is the other program's.
            pending.relay.forward(rank, Kind.EXPIRED, 0, 0, b"")
        if pending is not None and pending.expire is not None:
            pending.expire()
        self.answered(rank, call_id)

    def error(self, rank: int, call_id: int, failure: failures.Failure) -> None:
        """Take a rank's ERROR."""
        pending = self._pending.get(call_id)
        if pending is None or not pending.owes(rank):
            return
        if pending.relay is not None:
            if pending.outcome is not None:
                pending.relay.forward(rank, Kind.ERROR, 0, 0, codec.encode(failure).stream)
            # What the exception is made of is the other program's: this stands for it.
            error: Exception = WorkerError(failure.type_name, failure.text, failure.traceback, rank)
        else:
            where = f"{pending.label}, rank {rank}, call {call_id}"
            error = failures.restore(failure, rank=rank, where=where)
        self._failed(pending, rank, error)

    def get(self, call_id: int) -> Pending | None:
        """Return an unanswered call."""
        return self._pending.get(call_id)

    def forget(self, pending: Pending) -> None:
        """Take a call that no rank will run off the table."""
        if self._pending.pop(pending.call_id, None) is not None:
            for rank in pending.silent:
                self.load[rank] -= 1
            self._wake()

    def refuse(self, pending: Pending, error: Exception) -> None:
        """Fail a call that no rank has a byte of."""
        if pending.call_id not in self._pending:
            return
        self.forget(pending)
        outcome = pending.take()
        if pending.unsent is not None:
            pending.unsent()
        if outcome is not None:
            outcome.settle(None, error)

    def unanswered(self) -> list[Pending]:
        """Return the calls that some rank has not answered, oldest first."""
        return list(self._pending.values())

    def unreported(self, *, up_to: int) -> list[Pending]:
        """Return the unanswered calls up to a number that have not been reported, and mark them."""
        found: list[Pending] = []
        for pending in self._pending.values():
            if pending.call_id > up_to:
                break
            if not pending.hung:
                pending.hung = True
                found.append(pending)
        return found

    def returned(self, rank: int, call_id: int) -> None:
        """Take it from a rank that its method has returned, and that it goes on before it answers."""
        pending = self._pending.get(call_id)
        if pending is not None:
            pending.returned |= {rank}

    def running_on(self, rank: int) -> Pending | None:
        """Return the call that ``rank`` is at, as far as is known: the oldest that has not returned there.

        If all it owes has returned, that is the oldest of these; None where it owes nothing.
        """
        owed = [pending for pending in self._pending.values() if pending.owes(rank)]
        return next((each for each in owed if rank not in each.returned), owed[0] if owed else None)

    def fail_all(self, error_of: Callable[[Pending], Exception]) -> None:
        """Fail every call, each with an exception of its own."""
        pending, self._pending = self._pending, {}
        self.load[:] = [0] * len(self.load)
        for each in pending.values():
            outcome = each.take()
            if each.unsent is not None:
                each.unsent()
            if outcome is not None:
                outcome.settle(None, error_of(each))
            self._started(each)

    async def ready(self, ranks: Sequence[int], calls: int, backlog: int) -> None:
        """Wait until each rank has less to do than a window.

        Args:
            ranks: which ranks.
            calls: unanswered calls that a rank may have.
            backlog: bytes that may wait for a rank to read.
        """
        while any(
            self.load[rank] >= calls
            or sum(lane.backlog for lane in self._ranks[rank].lanes) >= backlog
            for rank in ranks
        ):
            future: asyncio.Future[None] = self._loop.create_future()
            self._watchers.append(future)
            await future

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, []
        for future in watchers:
            if not future.done():
                future.set_result(None)

    async def released(self, pending: Pending) -> None:
        """Wait until no rank reads what a call has sent by reference."""
        while pending.unsent is not None:
            future: asyncio.Future[None] = self._loop.create_future()
            self._watchers.append(future)
            await future
        await self._readers_gone(pending.references)

    def moved(self) -> None:
        """A call has been sent or given up: have those look who wait for that."""
        self._wake()

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for a call any more: drop it on all its ranks, or on none (E-5).

        Returns at once. Each rank is asked to hold the call; if no rank has started it, all drop
        it, otherwise all run it and its result is thrown away.
        """
        pending.take()
        if pending.call_id not in self._pending or pending.votes is not None:
            return
        if pending.unsent is not None:
            self.forget(pending)
            pending.unsent()
            return
        silent = pending.silent
        # A rank that has answered has started it.
        pending.votes = {rank: False for rank in pending.ranks if rank not in silent}
        if pending.feed is not None:
            # One that has ended had begun one more: what told it that there is none.
            begun = (pending.feed.count(rank) + 1 for rank in pending.votes)
            pending.begun = max(begun, default=0)
        for rank in silent:
            self._ranks[rank].control.send(pack(_HOLD, pending.call_id, aux=pending.lane))

    def vote(self, rank: int, call_id: int, lane: int, *, held: bool, begun: int = 0) -> None:
        """Take a rank's HELD or STARTED; with how many items it has begun, as a generator."""
        pending = self._pending.get(call_id)
        if pending is None or pending.votes is None:
            # It has ended otherwise meanwhile; a rank that holds it must not wait for ever.
            self._ranks[rank].control.send(pack(Kind.RESUME, call_id, aux=lane))
            return
        pending.votes[rank] = held
        pending.begun = max(pending.begun, begun)
        if len(pending.votes) < len(pending.ranks):
            return
        held_by_all = all(pending.votes.values())
        if pending.verdict is None:
            self.decide(pending, drop=held_by_all)
        else:
            tell, pending.verdict = pending.verdict, None
            tell(held_by_all)

    def decide(self, pending: Pending, *, drop: bool) -> None:
        """Have all ranks drop a call that all of them hold, or all run it and throw the result away."""
        if pending.call_id not in self._pending or pending.votes is None:
            return
        call_id, lane = pending.call_id, pending.lane
        if drop:
            for each in pending.ranks:
                self._ranks[each].control.send(pack(Kind.DROP, call_id, aux=lane))
            self.forget(pending)
            return
        for each in pending.silent:
            control = self._ranks[each].control
            # First this: a generator that starts must know by then where it ends.
            control.send(pack(Kind.CANCEL, call_id, ITEMS.pack(pending.begun), aux=lane))
            if pending.votes.get(each):
                control.send(pack(Kind.RESUME, call_id, aux=lane))

    def abandon_share(self, pending: Pending, verdict: Callable[[bool], None]) -> None:
        """Nobody waits for a call of several groups any more, of which this is one group's share.

        ``verdict`` is told, once, whether none of its ranks has started it; `decide` goes on from there.
        """
        if pending.call_id not in self._pending or pending.unsent is not None:
            pending.take()  # it has ended, or will be sent yet: its ranks will have started it
            verdict(False)
            return
        pending.verdict = verdict
        self.abandon(pending)

    def give_up(self, pending: Pending, error: Exception) -> None:
        """Its ranks may wait for what has failed elsewhere: end it as after a failure of its own (E-3)."""
        if pending.call_id not in self._pending or pending.outcome is None:
            return
        if pending.unsent is not None:
            self.refuse(pending, error)
        else:
            self._overdue(pending, pending.take(), error)

    def _failed(self, pending: Pending, rank: int, error: Exception) -> None:
        if pending.errors is None:
            pending.errors = {}
        pending.errors[rank] = error
        pending.left -= 1
        self.load[rank] -= 1
        if pending.watch is not None:
            pending.watch()
        if pending.feed is not None and len(pending.errors) == 1:
            # The others' generators wait for a reader that gets this error, and no more of theirs.
            self.cancel_silent(pending)
        if not pending.left:
            self._complete(pending)
        elif len(pending.errors) == 1 and pending.outcome is not None and self.decides:
            # Where nobody waits any more, ranks fail because they were cancelled, each in its own time.
            pending.timer = self._loop.call_later(self.error_grace, self._grace_over, pending)
        self._wake()

    def _complete(self, pending: Pending) -> None:
        del self._pending[pending.call_id]
        outcome = pending.outcome
        if outcome is None:
            self._started(pending)
            return
        if pending.errors is None:
            pending.take()  # or call and record would hold each other
            results = pending.results
            outcome.settle([results[rank] for rank in pending.ranks], None)
        else:
            pending.take()
            outcome.settle(None, pending.combined())

    def _started(self, pending: Pending) -> None:
        """A call that was asked to be held has ended."""
        if pending.verdict is not None:
            tell, pending.verdict = pending.verdict, None
            tell(False)

    def _grace_over(self, pending: Pending) -> None:
        """The others have not answered: they may sit in a collective that nobody joins (E-3)."""
        outcome = pending.take()
        error = pending.combined()
        silent = ", ".join(str(rank) for rank in pending.silent)
        error.add_note(
            f"rank {silent} had not answered {self.error_grace} s after the first failure"
        )
        self._overdue(pending, outcome, error)


def _unreadable(pending: Pending, rank: int, error: BaseException) -> Exception:
    told = WorkerError(
        type(error).__qualname__,
        f"the result of {pending.label} on rank {rank} can't be unpickled in the controller: "
        f"{failures.text_of(error)}",
        rank=rank,
    )
    told.__cause__ = error
    return told
