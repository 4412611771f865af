"""The arena in a worker: what was received from it, what is let go, and where large results stand.

A worker writes only where the controller has granted a place. It offers a large result by the sizes of its
buffers; the controller answers on the control lane, where nothing stands in front of the answer.
"""

from __future__ import annotations

import collections
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from asyncwg._wire import sources
from asyncwg._wire.arena import Mapping
from asyncwg._wire.frames import (
    ARENA,
    NONE,
    Buffer,
    Kind,
    Placed,
    pack,
    pack_placed,
    unpack,
    unpack_placed,
)
from asyncwg._wire.shipment import Shipment
from asyncwg._wire.sources import version_of
from asyncwg.errors import ResourceError

_PAIR: Final = struct.Struct("<QQ")


class Grant(NamedTuple):
    """The controller's answer to an offer."""

    placed: Placed | None
    """Where to write; None for nowhere."""
    why: str
    """Why nowhere; "" where nobody wants the result any more."""


class Blocks:
    """One worker's dealings with the arena. Any of its threads may use it.

    Args:
        fd: the arena's file.
        size: its size in bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.mapping = Mapping(fd, size, self._let_go)
        os.close(fd)
        self.woken: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when something was let go that no answer will carry."""
        self._gone: collections.deque[tuple[int, int]] = collections.deque()
        self._waiting: dict[int, Callable[[Grant], None]] = {}
        self.answering: int | None = None
        """The thread that will soon send an answer, which carries what is let go until then."""

    def unpack(
        self, body: memoryview, n_buffers: int, flags: int
    ) -> tuple[memoryview, list[memoryview]]:
        """Return a frame's stream and buffers, wherever they stand."""
        if not flags & ARENA:
            return unpack(body, n_buffers)
        stream, placed = unpack_placed(body, n_buffers)
        blocks: list[memoryview] = []
        try:
            for offset, size in placed.blocks:
                blocks.append(self.mapping.receive(offset, size))  # some may be there
        except BaseException:
            for offset, _ in placed.blocks[len(blocks) :]:
                self._let_go(offset, 1)
            raise
        buffers = [blocks[n][place : place + size] for size, n, place in placed.buffers]
        return (stream, buffers) if stream else (buffers.pop(), buffers)

    def let_go(self) -> list[Buffer] | None:
        """Return the frame that tells what was let go, or None."""
        pairs: list[bytes] = []
        try:
            while True:
                pairs.append(_PAIR.pack(*self._gone.popleft()))
        except IndexError:  # and not a look before each: another thread may be at it too
            return pack(Kind.RELEASE, 0, b"".join(pairs)) if pairs else None

    def offer(
        self,
        call_id: int,
        shipment: Shipment,
        answer: Callable[[Grant], None],
        lane: int,
        flags: int = 0,
    ) -> list[Buffer]:
        """Return the frame that asks for a place; ``answer`` is called by the control lane's thread."""
        self._waiting[call_id] = answer
        sizes = struct.pack(f"<{len(shipment.sizes)}Q", *shipment.sizes)
        return pack(Kind.OFFER, call_id, sizes, flags=flags, aux=lane)

    def granted(self, call_id: int, flags: int, n_buffers: int, body: memoryview) -> None:
        """Take a GRANT frame."""
        answer = self._waiting.pop(call_id, self.give_back)
        if flags & ARENA:
            answer(Grant(unpack_placed(body, n_buffers)[1], ""))
        else:
            answer(Grant(None, bytes(body).decode()))

    def give_back(self, grant: Grant) -> None:
        """Let go of a place that no result will stand in."""
        if grant.placed is not None:
            for offset, _ in grant.placed.blocks:
                self._let_go(offset, 1)

    def place(
        self,
        call_id: int,
        shipment: Shipment,
        versions: Sequence[int | None],
        grant: Grant,
        kind: int = Kind.RESULT,
    ) -> list[Buffer]:
        """Write a result where it was granted, and return its frame.

        Args:
            call_id: of the call.
            shipment: the result.
            versions: of its buffers when it was returned (O-7).
            grant: from the controller.
            kind: of the frame: a RESULT or an ITEM.

        Raises:
            ResourceError: there was no room.
            RuntimeError: it was written to meanwhile.
        """
        if grant.placed is None:
            if grant.why:
                raise ResourceError(grant.why)
            return pack(kind, call_id, flags=NONE)
        blocks, buffers = grant.placed
        try:
            for (size, number, place), source in zip(buffers, shipment.sources, strict=True):
                sources.copy(source, self.mapping.writable(blocks[number][0] + place, size))
            if [version_of(source) for source in shipment.sources] != versions:
                raise RuntimeError("a result was written to before it had been sent")
        except BaseException:
            self.give_back(grant)
            raise
        return pack_placed(kind, call_id, shipment.stream, grant.placed)

    def own(self, offsets: Sequence[int]) -> None:
        """Make blocks this process's own, because the controller is short of room."""
        for offset in offsets:
            self.mapping.own(offset)

    def wake(self) -> None:
        """Have the control lane tell what was let go."""
        if self._gone:
            os.eventfd_write(self.woken, 1)

    def _let_go(self, offset: int, count: int) -> None:
        self._gone.append((offset, count))
        if self.answering != threading.get_ident():
            os.eventfd_write(self.woken, 1)
