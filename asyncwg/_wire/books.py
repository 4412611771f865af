"""A lock for what finalisers change too.

A finaliser may run anywhere, also in the thread that holds the lock and in the middle of a change. So
it never waits for the lock: it leaves a note, which is carried out at once if nobody holds the lock, or
else by whoever does, when they leave.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable

Note = Callable[[], Callable[[], None] | None]
"""Changes what the lock protects; returns what is to be done afterwards, without the lock."""


class Books:
    """The lock. A context manager for those who may wait for it; not re-entrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: collections.deque[Note] = collections.deque()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock."""
        self._lock.acquire()

    def release(self) -> None:
        """Give the lock back, and carry out what was noted meanwhile."""
        self._lock.release()
        self._carry_out()

    def later(self, note: Note) -> None:
        """Carry out ``note`` as soon as nobody is in the middle of a change. For finalisers."""
        self._notes.append(note)
        self._carry_out()

    def _carry_out(self) -> None:
        # Whoever fails to get the lock here has left a note for who has it, and who looks after releasing it.
        while self._notes and self._lock.acquire(blocking=False):
            afterwards: list[Callable[[], None]] = []
            try:
                while self._notes:
                    then = self._notes.popleft()()
                    if then is not None:
                        afterwards.append(then)
            finally:
                self._lock.release()
            for then in afterwards:
                then()
