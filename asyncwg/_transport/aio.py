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
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._backlog = 0
        self._open = True
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
        if self._unsent:
            self._loop.remove_writer(self._fd)
            self._unsent.clear()
            self._backlog = 0
        self._sock.close()

    def _keep(self, pieces: Sequence[Buffer], sent: int) -> None:
        if not self._open:
            return
        if not self._unsent:
            self._loop.add_writer(self._fd, self._writable)
        for piece in pieces:
            if sent >= len(piece):
                sent -= len(piece)
                continue
            rest = memoryview(piece)[sent:]
            sent = 0
            self._unsent.append(rest if isinstance(piece, bytes) else memoryview(bytes(rest)))
            self._backlog += len(rest)

    def _writable(self) -> None:
        try:
            while self._unsent:
                batch = [self._unsent[i] for i in range(min(len(self._unsent), IOV_MAX))]
                sent = self._sock.sendmsg(batch)
                self._backlog -= sent
                while sent:
                    head = self._unsent[0]
                    if sent < len(head):
                        self._unsent[0] = head[sent:]
                        break
                    sent -= len(head)
                    self._unsent.popleft()
                while self._unsent and not len(self._unsent[0]):
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._unsent.clear()  # the reader hears of it, and tells
            self._backlog = 0
        self._loop.remove_writer(self._fd)

    def _readable(self) -> bool:
        try:
            count = self._receive(self._assembler.room())
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self._end(error)
            return False
        if not count:
            self._end(None)
            return False
        try:
            self._assembler.advance(count, self._deliver)
        except Exception as error:  # noqa: BLE001  # a broken peer ends this channel, not the loop
            self._end(error)
        return True

    def _end(self, error: BaseException | None) -> None:
        if self._open:
            self.close()
            self._closed(error)
