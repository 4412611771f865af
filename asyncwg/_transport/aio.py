"""A channel over a stream socket, on an asyncio event loop (asyncio's own or uvloop)."""

from __future__ import annotations

import asyncio
import collections
import socket
from collections.abc import Sequence
from typing import Final

from asyncwg._transport.base import Closed
from asyncwg._wire.frames import Assembler, Buffer, Deliver, size_of

IOV_MAX: Final = 1024
"""Pieces that one ``sendmsg`` takes (Linux)."""


class Slot:
    """A place in a channel's order for a frame that is not there yet; what is sent later waits behind it."""

    __slots__ = ("_channel", "pieces")

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel
        self.pieces: Sequence[Buffer] | None = None
        """The frame when it is there; () where it never comes."""

    def fill(self, pieces: Sequence[Buffer]) -> None:
        """Put the frame there. Its pieces must not change until they are sent."""
        self.pieces = pieces
        self._channel.filled()

    def cancel(self) -> None:
        """Give the place up."""
        self.fill(())


class SocketChannel:
    """`Channel` over a connected, non-blocking stream socket, which it owns."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        deliver: Deliver,
        closed: Closed,
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._receive = sock.recv_into
        self._transmit = sock.send
        self._deliver = deliver
        self._closed = closed
        self._assembler = Assembler()
        self._unsent: collections.deque[memoryview | Slot] = collections.deque()
        self._writing = False
        self._backlog = 0
        self._open = True
        self._unanswered = False
        self._flushing = False
        loop.add_reader(self._fd, self._readable)

    @property
    def backlog(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return self._backlog

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send one frame; what the kernel does not take at once is copied and kept."""
        if self._unsent:
            self._keep(pieces, 0)
            return
        if self._unanswered:
            # Not the first one since the other side was last heard: what follows in this turn of the loop
            # goes along, so a burst costs one call of the kernel and not one a frame.
            self._keep(pieces, 0)
            return
        self._unanswered = True
        try:
            if len(pieces) == 1:
                sent = self._transmit(pieces[0])
                if sent == len(pieces[0]):
                    return
            else:
                sent = self._sock.sendmsg(pieces[:IOV_MAX])
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return  # the other side is gone: the reader hears of it, and tells
        if sent < size_of(pieces):
            self._keep(pieces, sent)

    def reserve(self) -> Slot:
        """Take the next place in the order, for a frame that comes later."""
        slot = Slot(self)
        self._unsent.append(slot)
        return slot

    def filled(self) -> None:
        """Send on: a slot has its frame. For `Slot`."""
        if self._open:
            self._writable()

    def drain(self) -> None:
        """Deliver everything that has arrived, now: the other side has ended."""
        while self._open and self._readable():
            pass

    def close(self) -> None:
        """Take the socket off the loop and close it."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._fd)
        self._want_to_write(False)
        self._unsent.clear()
        self._backlog = 0
        self._sock.close()

    def _keep(self, pieces: Sequence[Buffer], sent: int) -> None:
        if not self._open:
            return
        for piece in pieces:
            if sent >= len(piece):
                sent -= len(piece)
                continue
            rest = memoryview(piece)[sent:]
            sent = 0
            self._unsent.append(rest if isinstance(piece, bytes) else memoryview(bytes(rest)))
            self._backlog += len(rest)
        if not (self._writing or self._flushing or isinstance(self._unsent[0], Slot)):
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._open and not self._writing:
            self._writable()

    def _writable(self) -> None:
        """Send what can go; stop at a full socket, or at a slot without its frame."""
        try:
            while batch := self._sendable():
                sent = self._sock.sendmsg(batch)
                self._backlog -= sent
                while sent:
                    head = self._unsent[0]
                    assert not isinstance(head, Slot)
                    if sent < len(head):
                        self._unsent[0] = head[sent:]
                        break
                    sent -= len(head)
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            self._want_to_write(True)
            return
        except OSError:
            self._unsent.clear()  # the reader hears of it, and tells
            self._backlog = 0
        self._want_to_write(False)

    def _sendable(self) -> list[memoryview]:
        batch: list[memoryview] = []
        while self._unsent:
            head = self._unsent[0]
            if isinstance(head, Slot):
                if head.pieces is None:
                    return batch
                self._unsent.popleft()
                for piece in reversed(head.pieces):
                    self._unsent.appendleft(memoryview(piece))
                    self._backlog += len(piece)
            elif not len(head):
                self._unsent.popleft()
            else:
                break
        for each in self._unsent:
            if isinstance(each, Slot) or len(batch) == IOV_MAX:
                break
            batch.append(each)
        return batch

    def _want_to_write(self, wanted: bool) -> None:
        if wanted is not self._writing:
            self._writing = wanted
            if wanted:
                self._loop.add_writer(self._fd, self._writable)
            else:
                self._loop.remove_writer(self._fd)

    def _readable(self) -> bool:
        try:
            count = self._receive(self._assembler.room())
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            count = 0  # a process that dies with unread bytes resets the stream: its end too
        if not count:
            self._end(None)
            return False
        self._unanswered = False
        try:
            self._assembler.advance(count, self._deliver)
        except Exception as error:  # noqa: BLE001  # a broken peer ends this channel, not the loop
            self._end(error)
        return True

    def _end(self, error: BaseException | None) -> None:
        if self._open:
            self.close()
            self._closed(error)
