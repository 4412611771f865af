"""The worker's end of a lane that one thread reads and writes: no event loop in the way."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Sequence

from asyncwg._transport.aio import IOV_MAX
from asyncwg._wire.frames import Assembler, Buffer, Deliver, size_of


class BlockingChannel:
    """Frames over a connected, blocking stream socket, which it owns.

    ``send`` waits until the kernel has taken everything. That can't block for ever: the controller
    always reads (C-3).
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._receive = sock.recv_into
        self._assembler = Assembler()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def more(self) -> bool:
        """Whether something has come behind the frame that is being delivered. For the thread that reads."""
        return self._assembler.rest > 0 or bool(self._poll.poll(0))

    def read(self, deliver: Deliver) -> bool:
        """Wait for bytes and deliver the frames they complete, in this thread.

        Returns:
            False at the end of the stream.
        """
        try:
            count = self._receive(self._assembler.room())
        except ConnectionResetError:
            return False
        except OSError:
            if self._sock.fileno() < 0:
                return False  # closed here, just before
            raise
        if not count:
            return False
        self._assembler.advance(count, deliver)
        return True

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send one frame; returns when the kernel has all of it.

        Raises:
            OSError: the other side is gone.
        """
        if len(pieces) == 1:
            self._sock.sendall(pieces[0])
            return
        rest = [memoryview(piece) for piece in pieces]
        left = size_of(pieces)
        while left:
            sent = self._sock.sendmsg(rest[:IOV_MAX])
            left -= sent
            done = 0
            while done < len(rest) and sent >= len(rest[done]):
                sent -= len(rest[done])
                done += 1
            del rest[:done]
            if sent:
                rest[0] = rest[0][sent:]

    def close(self) -> None:
        """Close the socket; a thread that reads gets the end of the stream."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
