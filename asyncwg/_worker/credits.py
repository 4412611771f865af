"""Generators give items as fast as they are read, and no faster.

A generator starts with a window of credits, and each item costs one. Each item that its reader takes gives
one back, through the control lane.

When the reader has gone, ``def`` generators end in step: each rank says how many items it has begun,
begins no more, and is then told the highest of these numbers. It makes items up to there, for nobody,
because a rank that is further may wait for it in a collective, and is closed at that ``yield`` (E-5).
"""

from __future__ import annotations

import asyncio
import threading

from asyncwg._wire.frames import STREAM_WINDOW


class ThreadCredits:
    """For a ``def`` generator, whose thread may block."""

    def __init__(self) -> None:
        self._left = STREAM_WINDOW
        self._begun = 0
        self._frozen = False
        self._end: int | None = None
        self._changed = threading.Condition()

    def add(self) -> None:
        """One more item is wanted."""
        with self._changed:
            self._left += 1
            self._changed.notify()

    def freeze(self) -> int:
        """Begin no further item until `stop_at`; return how many have been begun."""
        with self._changed:
            self._frozen = True
            return self._begun

    def stop_at(self, items: int) -> None:
        """The reader has gone: end when so many items have been begun."""
        with self._changed:
            self._end = items
            self._changed.notify()

    def take(self) -> bool | None:
        """Wait until an item is to be made.

        Returns:
            Whether it is wanted, or made to keep in step; None when the generator is to end.
        """
        with self._changed:
            while self._end is None and (self._frozen or not self._left):
                self._changed.wait()
            wanted = self._end is None
            if self._end is not None and self._begun >= self._end:
                return None
            self._left -= 1
            self._begun += 1
            return wanted


class LoopCredits:
    """For an ``async def`` generator, which is cancelled wherever it is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._left = STREAM_WINDOW
        self._ends = False
        self._changed = asyncio.Event()

    def add(self) -> None:
        """One more item is wanted."""
        self._loop.call_soon_threadsafe(self._add)

    def freeze(self) -> int:
        """Return 0: it need not end in step."""
        return 0

    def stop_at(self, items: int) -> None:
        """The reader has gone."""
        del items
        self._loop.call_soon_threadsafe(self._stop)

    def _add(self) -> None:
        self._left += 1
        self._changed.set()

    def _stop(self) -> None:
        self._ends = True
        self._changed.set()

    async def take(self) -> bool:
        """Wait until an item is wanted; False when the generator is to end."""
        while not self._left and not self._ends:
            self._changed.clear()
            await self._changed.wait()
        self._left -= 1
        return not self._ends
