"""A large answer is finished beside the next call of its lane.

The lane has offered it and goes on; a thread of its own waits for the place, writes it there and sends it.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

from asyncwg._wire.frames import Buffer
from asyncwg._worker.blocks import Grant

Finish = Callable[[Grant], list[Buffer]]
"""Takes where the answer is to stand, and returns its frame. Never raises."""


SWITCH: Final = 0.0005
"""Seconds after which a method in Python lets the other threads in while an answer is under way. They have
a few steps to do, one after the other: with Python's own 5 ms, an answer would be some 10 ms late."""


class Answers:
    """The answer of one lane that is under way. All but the grant belongs to the lane's thread.

    - W-1 At most one answer is under way.
    - W-2 When `wait` has returned, its frame has been sent, or can't be: nobody else writes to the lane's
      socket then.

    Args:
        send: sends a frame on the lane's socket.
    """

    def __init__(self, send: Callable[[Sequence[Buffer]], None]) -> None:
        self._send = send
        self._granted: queue.SimpleQueue[Grant] = queue.SimpleQueue()
        self._finish: Finish | None = None
        self._done = threading.Lock()
        """Held while an answer is under way."""
        self._thread: threading.Thread | None = None
        self.under_way = False
        """Whether an answer has not been sent. Cheaper to ask than `wait`."""

    def begin(self, finish: Finish) -> Callable[[Grant], None]:
        """Finish an answer beside the lane; return who is to be told its place, from any thread, once."""
        self._done.acquire()
        self.under_way = True
        self._finish = finish
        self._hurry()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="asyncwg-answers", daemon=True)
            self._thread.start()
        return self._granted.put

    def wait(self) -> None:
        """Wait until no answer is under way."""
        with self._done:
            pass

    def _hurry(self) -> None:
        self._interval = sys.getswitchinterval()
        if self._interval > SWITCH:
            sys.setswitchinterval(SWITCH)
        self._ours = sys.getswitchinterval()

    def _relax(self) -> None:
        if sys.getswitchinterval() == self._ours:  # or a method has set it meanwhile, which stands
            sys.setswitchinterval(self._interval)

    def _main(self) -> None:
        while True:
            grant = self._granted.get()
            finish, self._finish = self._finish, None
            assert finish is not None
            try:
                # The controller is gone, where nobody takes it: the lane finds that out too.
                with contextlib.suppress(OSError):
                    self._send(finish(grant))
            finally:
                del finish, grant  # what was answered, before the next answer is awaited
                self._relax()
                self.under_way = False
                self._done.release()
