"""The pending table of a program that is attached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from asyncwg._attach import wire
from asyncwg._attach.outbox import Outbox
from asyncwg._driver.calls import Calls
from asyncwg._driver.pending import Outcome, Pending
from asyncwg._wire.frames import Buffer, Kind, pack


class RemoteCalls(Calls):
    """The pending table of a program that is attached: calls go to the host, answers come from it."""

    outbox: Outbox

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
        relay: Any = None,
    ) -> Pending:
        """Hand a call to the host, now or in its turn."""
        del relay  # only a host has that
        # Written out: a small call would feel another call of a function.
        pending = self._pending[call_id] = Pending(
            call_id, label, ranks, lane, outcome, single, on_error
        )
        if joins:
            pending.joins = joins
        load = self.load
        for rank in ranks:
            load[rank] += 1
        route = (label, ranks, lane, single, on_error, joins)
        if len(frames) > 1 or not self.outbox.send_at_once(call_id, route, frames[0]):
            self.outbox.post(pending, frames)
        return pending

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for a call any more: have the host drop it on all its ranks, or on none (E-5)."""
        pending.take()
        if self.get(pending.call_id) is not pending:
            return
        self.forget(pending)
        if pending.unsent is not None:
            pending.unsent()
        elif self.outbox.channel is not None:
            self.outbox.channel.send(pack(Kind.ABANDON, pending.call_id))

    def pull(self, pending: Pending, rank: int) -> None:
        """An item of a rank was read: it may make one more."""
        if pending.owes(rank) and self.outbox.channel is not None:
            self.outbox.channel.send(pack(Kind.PULL, pending.call_id, aux=rank))

    def cancel_silent(self, pending: Pending) -> None:
        """Have the host tell the ranks that have not answered that nobody waits for them."""
        if self.outbox.channel is not None:
            self.outbox.channel.send(pack(Kind.CANCEL, pending.call_id))

    def fail_unsent(self, error_of: Callable[[Pending], Exception]) -> None:
        """Fail what the host has not been sent."""
        for pending in self.unanswered():
            if pending.unsent is not None:
                self.refuse(pending, error_of(pending))

    def failed(self, call_id: int, flags: int, told: Any) -> None:
        """Take it from the host that a call has ended otherwise than by its ranks' answers."""
        pending = self.get(call_id)
        if pending is None:
            return
        self.forget(pending)
        outcome = pending.take()
        if outcome is None:
            return
        if flags & wire.ITS_OWN and pending.errors:
            error = pending.combined()
            for note in told:
                error.add_note(note)
        else:
            error = wire.unpack_error(told)
        outcome.settle(None, error)
