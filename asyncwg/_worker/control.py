"""The control lane of a worker: a daemon thread that answers the controller while methods run.

The end of its stream means that the controller is gone, and ends the process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading

from asyncwg._transport.blocking import BlockingChannel
from asyncwg._wire.frames import ITEMS, Kind, pack
from asyncwg._worker.blocks import Blocks
from asyncwg._worker.context import CurrentCall
from asyncwg._worker.gate import Gate
from asyncwg._worker.lanes import AsyncLane, ComputeLane


class ControlLane:
    """Answers the controller while methods run."""

    def __init__(self, sock: socket.socket, compute: ComputeLane, blocks: Blocks) -> None:
        self._sock = sock
        self._channel = BlockingChannel(sock)
        self._compute = compute
        self._blocks = blocks
        self._async: AsyncLane | None = None
        self.exit_asked = threading.Event()
        self._thread = threading.Thread(target=self._main, name="asyncwg-control", daemon=True)
        self._thread.start()

    def attach(self, lane: AsyncLane) -> None:
        """Let it reach the async lane too."""
        self._async = lane

    def _main(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.register(self._blocks.woken, select.POLLIN)
        try:
            while True:
                for fd, _ in poll.poll():
                    if fd == self._blocks.woken:
                        os.eventfd_read(fd)
                        self._tell_released()
                    elif not self._channel.read(self._deliver):
                        return
        finally:
            # The controller is gone, or what it sends makes no sense: nobody is left to work for.
            os.kill(os.getpid(), signal.SIGKILL)

    def _tell_released(self) -> None:
        gone = self._blocks.let_go()
        if gone is not None:
            self._channel.send(gone)

    def _deliver(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        gate = self._gate(aux)
        if kind == Kind.HOLD:
            begun = gate.hold(call_id)
            if begun is None:
                self._channel.send(pack(Kind.HELD, call_id, aux=aux))
            else:
                self._channel.send(pack(Kind.STARTED, call_id, ITEMS.pack(begun), aux=aux))
        elif kind == Kind.DROP:
            gate.drop(call_id)
        elif kind == Kind.RESUME:
            gate.resume(call_id)
        elif kind == Kind.CANCEL:
            items = ITEMS.unpack(body)[0] if body else 0
            call: CurrentCall | None = gate.cancel(call_id, items)
            if call is not None and aux and self._async is not None:
                self._async.cancel(call_id)
        elif kind == Kind.PULL:
            gate.pull(call_id)
        elif kind == Kind.GRANT:
            self._blocks.granted(call_id, flags, n_buffers, body)
        elif kind == Kind.OWN:
            self._blocks.own(memoryview(bytes(body)).cast("Q").tolist())
            self._tell_released()
        elif kind == Kind.PING:
            self._channel.send(pack(Kind.PONG, call_id, _main_stack() if aux else b""))
        elif kind == Kind.STOP:
            self._compute.stopping = True
            self._compute.gate.cancel_all()  # or a generator would wait for a reader that has gone
        elif kind == Kind.EXIT:
            self.exit_asked.set()

    def _gate(self, aux: int) -> Gate:
        return self._async.gate if aux and self._async is not None else self._compute.gate


def _main_stack() -> bytes:
    """Return the main thread's stack, as faulthandler writes it."""
    # This thread has the GIL, so no frame changes while it is read.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001  # public by its docs
    lines = ["Main thread (most recent call first):"]
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines).encode("utf-8", "replace")
