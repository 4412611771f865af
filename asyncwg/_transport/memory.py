"""A channel within one process: the contract of `base` without a kernel in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncwg._transport.base import Closed
from asyncwg._wire.frames import Assembler, Buffer, Deliver


class MemoryChannel:
    """One of two ends; `pair` makes both. Frames pass through bytes, as they do between processes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Deliver, closed: Closed) -> None:
        self._loop = loop
        self._deliver = deliver
        self._closed = closed
        self._assembler = Assembler()
        self._open = True
        self._backlog = 0
        self._peer: MemoryChannel | None = None

    @staticmethod
    def pair(
        loop: asyncio.AbstractEventLoop,
        near: tuple[Deliver, Closed],
        far: tuple[Deliver, Closed],
    ) -> tuple[MemoryChannel, MemoryChannel]:
        """Make two connected ends on one loop."""
        a, b = MemoryChannel(loop, *near), MemoryChannel(loop, *far)
        a._peer, b._peer = b, a
        return a, b

    @property
    def backlog(self) -> int:
        """Bytes that wait for the loop's next turn."""
        return self._backlog

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Copy one frame and deliver it in the loop's next turn."""
        if not self._open or self._peer is None:
            return
        data = b"".join(pieces)
        self._backlog += len(data)
        self._loop.call_soon(self._arrive, self._peer, data)

    def close(self) -> None:
        """End it; the other end hears of it in the loop's next turn."""
        if self._open:
            self._open = False
            if self._peer is not None:
                self._loop.call_soon(self._peer._end, None)  # noqa: SLF001  # its twin

    def _arrive(self, peer: MemoryChannel, data: bytes) -> None:
        self._backlog -= len(data)
        view = memoryview(data)
        while view and peer._open:
            room = peer._assembler.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            view = view[count:]
            try:
                peer._assembler.advance(count, peer._deliver)
            except Exception as error:  # noqa: BLE001  # a broken peer ends this channel, not the loop
                peer._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._open:
            self.close()
            self._closed(error)
