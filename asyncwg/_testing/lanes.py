"""Faults between the controller and a rank: what `asyncwg.testing.FaultPlan` puts in a lane's way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from asyncwg._driver.gang import Gang
from asyncwg._transport.aio import Slot, SocketChannel
from asyncwg._wire.frames import Buffer

_NO_FRAME: Final = 0xFF
"""What broken bytes are: no frame has a kind of that number."""


class Fault(NamedTuple):
    """What happens at one call to one rank."""

    rank: int
    at: int
    """Which call to the rank, counted from 1."""
    action: str
    """``"kill"``, ``"delay"``, ``"drop"`` or ``"corrupt"``."""
    seconds: float = 0.0


class Sabotage:
    """Faults put in the lanes of a running generation. Made and undone by a plan."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, gang: Gang, faults: Sequence[Fault]
    ) -> None:
        self._loop = loop
        self._gang = gang
        self._ranks = gang._ranks  # noqa: SLF001  # a fault stands in a place that nobody else may reach
        self._faults = faults
        self._lanes = [rank.lanes for rank in self._ranks]
        self._counts = [0] * len(self._ranks)
        self._late: dict[asyncio.TimerHandle, Callable[[], None]] = {}
        self._over = False

    def begin(self) -> None:
        """Stand in the way."""
        for rank in self._ranks:
            lanes: Any = tuple(_Lane(self, rank.index, channel) for channel in rank.lanes)
            rank.lanes = lanes

    def end(self) -> None:
        """Step out of the way; what was held back goes now."""
        self._over = True
        for rank, lanes in zip(self._ranks, self._lanes, strict=True):
            rank.lanes = lanes
        for timer, go in list(self._late.items()):
            timer.cancel()
            go()
        self._late.clear()

    def next_call(self, rank: int) -> list[Fault]:
        """Count a call to ``rank``, and return what happens to it."""
        self._counts[rank] += 1
        number = self._counts[rank]
        return [fault for fault in self._faults if (fault.rank, fault.at) == (rank, number)]

    def kill(self, rank: int) -> None:
        """End a rank's process."""
        processes = self._gang._processes  # noqa: SLF001  # they can't hit another process
        processes.signal(rank, signal.SIGKILL)

    def later(self, seconds: float, go: Callable[[], None]) -> None:
        """Call ``go`` after so many seconds, or when the plan ends."""
        if self._over:
            go()
            return

        def due() -> None:
            del self._late[timer]
            go()

        timer = self._loop.call_later(seconds, due)
        self._late[timer] = go


class _Lane:
    """A lane with faults in its way; everything else is the lane's own."""

    def __init__(self, sabotage: Sabotage, rank: int, channel: SocketChannel) -> None:
        self._sabotage = sabotage
        self._rank = rank
        self._channel = channel

    def send(self, pieces: Sequence[Buffer]) -> None:
        faults = self._sabotage.next_call(self._rank)
        if any(fault.action in ("delay", "drop") for fault in faults):
            _Place(self._sabotage, self._channel, faults).fill([b"".join(pieces)])
        else:
            _strike(self._sabotage, self._channel, faults)
            self._channel.send(pieces)

    def reserve(self) -> Any:
        """Take a place; see `SocketChannel.reserve`."""
        return _Place(self._sabotage, self._channel, self._sabotage.next_call(self._rank))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)


class _Place:
    """A place in a lane's order whose frame comes late, or never."""

    def __init__(self, sabotage: Sabotage, channel: SocketChannel, faults: Sequence[Fault]) -> None:
        self._sabotage = sabotage
        self._channel = channel
        self._faults = faults
        self._slot: Slot = channel.reserve()

    def fill(self, pieces: Sequence[Buffer]) -> None:
        """Put the frame there; see `Slot.fill`."""
        actions = {fault.action for fault in self._faults}
        seconds = sum(fault.seconds for fault in self._faults)
        frame = () if "drop" in actions else pieces

        def go() -> None:
            if pieces:
                _strike(self._sabotage, self._channel, self._faults)
            self._slot.fill(frame)

        if seconds and pieces:
            self._sabotage.later(seconds, go)
        else:
            go()

    def cancel(self) -> None:
        """Give the place up."""
        self.fill(())


def _strike(sabotage: Sabotage, channel: SocketChannel, faults: Sequence[Fault]) -> None:
    # Before the frame is sent, so that it can't be answered first.
    for fault in faults:
        if fault.action == "kill":
            sabotage.kill(fault.rank)
        elif fault.action == "corrupt":
            _break_next_bytes(channel)


def _break_next_bytes(channel: SocketChannel) -> None:
    receive = channel._receive  # noqa: SLF001  # the last place before bytes become frames
    assembler = channel._assembler  # noqa: SLF001

    def broken(room: memoryview) -> int:
        between = assembler.idle
        count: int = receive(room)
        if between:  # what is inside of a frame may be anything
            room[:count] = bytes([_NO_FRAME]) * count
            channel._receive = receive  # noqa: SLF001
        return count

    channel._receive = broken  # type: ignore[assignment]  # noqa: SLF001
