"""Calls that keep their place in the order until the calls among their arguments have values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncwg._job import Job
from asyncwg.call import Call

if TYPE_CHECKING:
    import asyncio

    from asyncwg._sender import Sender


class Place(NamedTuple):
    """Where a call that waits stands: in one lane of one group."""

    sender: Sender
    lane: int
    job: Job
    """What the group's ranks are to do."""


class Waiting:
    """A call that keeps its place in the order until the calls among its arguments have values.

    Args:
        call: the call.
        needs: the calls among its arguments.
        places: where it stands; in several groups for a call of a union.
        go: sends it. Called once, when it is its turn in all places and everything needed is there.
    """

    def __init__(
        self,
        call: Call[Any],
        needs: Sequence[asyncio.Future[Any]],
        places: Sequence[Place],
        go: Callable[[], None],
    ) -> None:
        self.call = call
        self.needs = needs
        self.places = places
        self.go = go
        self.again: Callable[[Sender], None] | None = None
        """Has it wait again in another generation; None where it is not to be repeated."""

    def enter(self) -> None:
        """Take its places, and go at once if it can."""
        for sender, lane, _ in self.places:
            sender.queue(lane).append(self)
        self.call.attach(None, None, self)
        for need in {id(need): need for need in self.needs}.values():
            need.add_done_callback(self._known)
        self._advance()

    @property
    def free(self) -> bool:
        """Whether nothing keeps it back any more."""
        return all(need.done() for need in self.needs) and all(
            place.sender.at_its_turn(self, place) for place in self.places
        )

    def leave(self) -> None:
        """Give up its places: it has been sent, or never will be."""
        for sender, lane, _ in self.places:
            queue = sender.queue(lane)
            if self in queue:
                queue.remove(self)

    def abandon(self, progress: Any) -> None:
        """Nobody waits for it any more."""
        del progress
        self.leave()
        self._advance()

    async def released(self, progress: Any) -> None:
        """Nothing was sent."""

    def values(self) -> list[Any]:
        """Return the values of the calls it was given."""
        return [need.result() for need in self.needs]

    def _known(self, need: asyncio.Future[Any]) -> None:
        if not self.call.done():
            if need.cancelled():
                self.call.cancel()
            elif (error := need.exception()) is not None:
                self.call.settle(None, error if isinstance(error, Exception) else None)
                self.leave()
        self._advance()

    def _advance(self) -> None:
        for sender, lane, _ in self.places:
            sender.advance(lane)
