"""One rank: its lanes and what is known of its life. A narrow interface: start, send, receive, end."""

from __future__ import annotations

import asyncio
import enum
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from asyncwg import _linux as linux
from asyncwg._driver.stacks import StackPipe
from asyncwg._transport.aio import SocketChannel
from asyncwg._wire.frames import Buffer
from asyncwg._wire.launch import BootRecord

COMPUTE: Final = 0
ASYNC: Final = 1
"""Numbers of the two lanes that run calls; ``aux`` of what the control lane is told about a call."""

Receive = Callable[[int, int, int, int, int, int, memoryview], None]
"""Takes ``(rank, call_id, kind, flags, aux, n_buffers, body)``."""
Lost = Callable[[int, BaseException | None], None]


class RankState(enum.Enum):
    """Life of one rank. It only moves downwards."""

    STARTING = "starting"
    """The process is asked for or exists; the user's object does not."""
    READY = "ready"
    """Calls may be sent."""
    STOPPED = "stopped"
    """Its ``close()`` has run; it waits to be let go."""
    DEAD = "dead"
    """The process has ended."""


class Rank:
    """The controller's end of one worker. Belongs to the group's event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        index: int,
        receive: Receive,
        lost: Lost,
        *,
        has_async: bool,
    ) -> None:
        self.index = index
        self.state = RankState.STARTING
        self._theirs: list[socket.socket] = []

        def deliver(
            call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
        ) -> None:
            receive(index, call_id, kind, flags, aux, n_buffers, body)

        def make() -> SocketChannel:
            ours, theirs = socket.socketpair()
            self._theirs.append(theirs)
            return SocketChannel(loop, ours, deliver, lambda error: lost(index, error))

        self.stacks = StackPipe(loop)
        self.control = make()
        compute = make()
        self.lanes = (compute, make()) if has_async else (compute,)

    def give_descriptors(
        self, record: BootRecord, stdout: int, stderr: int, arena: int
    ) -> tuple[int, ...]:
        """Return what the process is born with, in the guardian's order; `release` closes our copies."""
        boot = linux.memory_file("asyncwg-boot")
        os.write(boot, json.dumps(record).encode())
        control, compute, *lane = (sock.fileno() for sock in self._theirs)
        self._given = (boot, stdout, stderr)
        stacks = self.stacks.write
        return (boot, control, compute, stdout, stderr, arena, stacks, *lane)

    def release(self) -> None:
        """Close our copies of the child's ends: only then does its death end the stream."""
        for sock in self._theirs:
            sock.close()
        self._theirs.clear()
        for fd in self._given:
            os.close(fd)
        self._given = ()
        self.stacks.release()

    def send(self, lane: int, pieces: Sequence[Buffer]) -> None:
        """Send one frame on a lane that runs calls."""
        self.lanes[lane].send(pieces)

    def drain(self) -> None:
        """Deliver what a process that has ended had still sent."""
        for channel in self.lanes:
            channel.drain()

    def close(self) -> None:
        """Close every lane."""
        self.state = RankState.DEAD
        for channel in (self.control, *self.lanes):
            channel.close()
        for sock in self._theirs:
            sock.close()
        self._theirs.clear()
        self.stacks.close()

    _given: tuple[int, ...] = ()
