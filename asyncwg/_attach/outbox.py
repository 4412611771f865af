"""The calls of a program that is attached, on their way to the host, in order.

A call whose large arguments are still being copied keeps back later ones that go to one of its ranks on the
same lane, as it does in a group of one's own; others pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncwg._attach import wire
from asyncwg._attach.wire import Route
from asyncwg._driver.arena import Block
from asyncwg._driver.calls import Calls
from asyncwg._driver.pending import Pending
from asyncwg._transport.aio import SocketChannel
from asyncwg._wire import codec
from asyncwg._wire.frames import HEADER, Buffer, Kind, pack, size_of

_RELAY: Final = int(Kind.RELAY)
_HEADER_PACK: Final = HEADER.pack
_ROUTES: Final = 1 << 16
"""Numbers that a frame's header has room for."""
_JOIN_BELOW: Final = 64 * 1024


class _Place:
    """A call's place in the order."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.frames: list[Sequence[Buffer]] = []
        self.index: list[int] | None = None
        self.ready = False
        self.blocks: list[Block] = []
        """What it refers to, as often as it holds it."""


class Share:
    """What `asyncwg._transport.aio.Slot` is on a lane: one rank's frame of a call that comes later."""

    def __init__(self, outbox: Outbox, place: _Place) -> None:
        self._outbox = outbox
        self._place = place

    def fill(self, pieces: Sequence[Buffer]) -> None:
        """Take the frame of the next rank."""
        self._outbox.fill(self._place, pieces)

    def cancel(self) -> None:
        """Give the call's place up."""
        self._outbox.take_back(self._place)


class Outbox:
    """Sends calls to the host. Belongs to the event loop.

    Args:
        calls: the pending table.
        release: takes back the hold of a call that has been sent on a block.
    """

    def __init__(self, calls: Calls, release: Callable[[Block], None]) -> None:
        self.channel: SocketChannel | None = None
        """To the host; calls are kept until there is one."""
        self.held: list[Block] = []
        """What the next frame that is filled in refers to."""
        self._calls = calls
        self._release = release
        self._places: list[_Place] = []
        self.routes: dict[Any, int] = {}
        """Numbers by `Route`, or by a tuple that is equal to one."""

    def post(self, pending: Pending, frames: Sequence[Sequence[Buffer]]) -> None:
        """Send a call that is complete, or put it in its place.

        Args:
            pending: the call.
            frames: one for all ranks, or one for each.
        """
        index: list[int] | None = None
        if len(frames) > 1:
            numbers: dict[int, int] = {}
            index = [numbers.setdefault(id(frame), len(numbers)) for frame in frames]
            distinct = {id(frame): frame for frame in frames}
            frames = [distinct[key] for key in numbers]
        if not self._blocked(pending):
            self._send(pending, frames, index)
            return
        place = _Place(pending)
        # As they are now: what they are views of may change before they are sent.
        place.frames = [[b"".join(frame)] for frame in frames]
        place.index = index
        self._ready(place)
        self._places.append(place)

    def reserve(self, pending: Pending) -> list[Share]:
        """Take a call's place; its frames come later, one for each rank."""
        place = _Place(pending)
        self._places.append(place)
        return [Share(self, place) for _ in pending.ranks]

    def fill(self, place: _Place, pieces: Sequence[Buffer]) -> None:
        """Take the frame of the next rank of a call."""
        place.blocks += self.held
        self.held = []
        if place.index is None:
            place.index = []
        known = [number for number, frame in enumerate(place.frames) if frame is pieces]
        place.index.append(known[0] if known else len(place.frames))
        if not known:
            place.frames.append(pieces)
        if len(place.index) == len(place.pending.ranks):
            if len(place.frames) == 1:
                place.index = None
            self._ready(place)
            self._advance()

    def take_back(self, place: _Place) -> None:
        """A call is not to be sent."""
        if place in self._places:
            self._places.remove(place)
            for block in place.blocks:
                self._release(block)
            self._advance()

    def _ready(self, place: _Place) -> None:
        place.ready = True

        def take_back() -> None:
            place.pending.unsent = None
            self.take_back(place)
            self._calls.moved()

        place.pending.unsent = take_back

    def _blocked(self, pending: Pending) -> bool:
        return bool(self._places) and any(_clash(place.pending, pending) for place in self._places)

    def _advance(self) -> None:
        """Send what can go now."""
        for place in list(self._places):
            before = self._places[: self._places.index(place)]
            if place.ready and not any(_clash(each.pending, place.pending) for each in before):
                self._places.remove(place)
                place.pending.unsent = None
                self._send(place.pending, place.frames, place.index)
                for block in place.blocks:
                    self._release(block)
                self._calls.moved()

    def _send(
        self, pending: Pending, frames: Sequence[Sequence[Buffer]], index: Sequence[int] | None
    ) -> None:
        channel = self.channel
        if channel is None:
            return  # the way to the host has ended, and every call with it
        route = Route(
            pending.label,
            tuple(pending.ranks),
            pending.lane,
            pending.single,
            pending.on_error,
            tuple(pending.joins),
        )
        number = self.routes.get(route)
        if number is None:
            number = self._new_route(channel, route)
        call_id = pending.call_id
        if index is None:
            frame = frames[0]
            size = size_of(frame)
            header = HEADER.pack(size, call_id, _RELAY, 0, number, 0)
            first = frame[0]
            if len(frame) == 1 and size < _JOIN_BELOW:
                channel.send([header + first])
            else:
                channel.send([header, *frame])
            return
        body = wire.relay_body(frames, index)
        header = HEADER.pack(size_of(body), call_id, _RELAY, wire.SEVERAL, number, 0)
        channel.send([header, *body])

    def send_at_once(self, call_id: int, route: Any, frame: Sequence[Buffer]) -> bool:
        """Send a small call if it is like one before and nothing waits; False where it is not so simple."""
        number = self.routes.get(route)
        if number is None or self._places or len(frame) != 1 or self.channel is None:
            return False
        piece = frame[0]
        if len(piece) >= _JOIN_BELOW:
            return False
        self.channel.send([_HEADER_PACK(len(piece), call_id, _RELAY, 0, number, 0) + piece])
        return True

    def _new_route(self, channel: SocketChannel, route: Route) -> int:
        if len(self.routes) == _ROUTES:
            self.routes.clear()  # their numbers are used again
        number = self.routes[route] = len(self.routes)
        channel.send(pack(Kind.ROUTE, 0, codec.encode(tuple(route)).stream, aux=number))
        return number


def _clash(one: Pending, other: Pending) -> bool:
    return one.lane == other.lane and not set(one.ranks).isdisjoint(other.ranks)
