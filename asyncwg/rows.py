"""``Rows``: what rollouts make and trainers take, with the policy's version on every row."""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

from asyncwg.errors import UsageError

__all__ = ["Rows", "RowsClosed", "RowsStatistics"]

T = TypeVar("T")
B = TypeVar("B")


class RowsClosed(Exception):  # an end, not an error, as StopIteration
    """The rows were closed: none may be put any more, or too few are left to take."""


class _Row(NamedTuple):
    value: Any
    version: int


@dataclass(frozen=True, slots=True)
class RowsStatistics:
    """What has happened so far; see `Rows.statistics`."""

    put: int
    """Rows that came in."""
    taken: int
    """Rows that went out in batches."""
    dropped: int
    """Rows that were too stale when they were to be taken."""
    waiting: int
    """Rows that are there now."""
    mean_staleness: float
    """Of the rows that were taken, in versions; nan before the first."""
    max_staleness: int
    """Likewise."""
    put_waited: float
    """Seconds that producers have waited for room, in all."""
    take_waited: float
    """Seconds that consumers have waited for rows, in all."""


class Rows(Generic[T]):
    """A bounded queue of rows between rollouts and a trainer, for one event loop.

    ::

        rows = Rows(maxsize=512, max_staleness=2)
        await rows.put(sample, version=rows.version)      # a rollout; waits while it is full
        batch = await rows.take(64, collate=DataProto.concat)   # the trainer
        rows.advance()                                    # the policy has changed

    A row's *staleness* is how often the policy has changed since the version that made it. Rows that are
    staler than ``max_staleness`` when they are to be taken are dropped, and counted.

    Args:
        maxsize: rows that wait at most; `put` waits then.
        max_staleness: None for no limit.
    """

    def __init__(self, maxsize: int, *, max_staleness: int | None = None) -> None:
        if maxsize < 1:
            raise UsageError(f"maxsize must be at least 1, not {maxsize!r}")
        if max_staleness is not None and max_staleness < 0:
            raise UsageError(f"max_staleness must be at least 0, not {max_staleness!r}")
        self.maxsize: Final = maxsize
        self.max_staleness: Final = max_staleness
        self.version = 0
        """Of the policy; `advance` raises it."""
        self._queue: asyncio.Queue[_Row | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(maxsize)
        self._kept: collections.deque[_Row] = collections.deque()
        """Rows that a take had when it was cancelled: they go first."""
        self._taking = asyncio.Lock()
        self._closed = False
        self._put = self._taken = self._dropped = self._stale_sum = self._stale_max = 0
        self._put_waited = self._take_waited = 0.0

    def __len__(self) -> int:
        """Return the number of rows that wait."""
        return self._queue.qsize() + len(self._kept) - self._closed

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def advance(self, version: int | None = None) -> int:
        """Take note that the policy has changed; return its version.

        Args:
            version: None for one more than before.

        Raises:
            UsageError: it would go back.
        """
        new = self.version + 1 if version is None else version
        if new < self.version:
            raise UsageError(f"the policy's version can't go back from {self.version} to {new}")
        self.version = new
        return new

    async def put(self, row: T, version: int | None = None) -> None:
        """Add a row; wait while there is no room.

        Args:
            row: anything.
            version: of the policy that made it; None for the version now.

        Raises:
            RowsClosed: nobody takes rows any more.
            UsageError: the version is later than the policy's.

        Cancelled, it has added nothing.
        """
        made = self.version if version is None else version
        if made > self.version:
            raise UsageError(f"a row of version {made} can't be: the policy's is {self.version}")
        start = _now()
        await self._room.acquire()
        self._put_waited += _now() - start
        if self._closed:
            self._room.release()  # whoever waits behind is to hear it too
            raise RowsClosed
        self._queue.put_nowait(_Row(row, made))
        self._put += 1

    async def take(self, n: int, *, collate: Callable[[list[T]], B] | None = None) -> list[T] | B:
        """Wait for ``n`` rows that are fresh enough, oldest first.

        Takers are served one after another.

        Args:
            n: how many.
            collate: makes the rows a batch, ``DataProto.concat`` for one; None for a list.

        Raises:
            RowsClosed: it was closed and fewer than ``n`` are left; those stay, see `drain`.

        Cancelled, it has taken nothing.
        """
        if n < 1:
            raise UsageError(f"n must be at least 1, not {n!r}")
        start = _now()
        async with self._taking:
            rows: list[_Row] = []
            try:
                while len(rows) < n:
                    row = self._kept.popleft() if self._kept else await self._queue.get()
                    if row is None:
                        self._queue.put_nowait(None)  # for whoever comes after
                        raise RowsClosed
                    if self._is_stale(row):
                        self._dropped += 1
                        self._room.release()
                    else:
                        rows.append(row)
            except BaseException:
                self._kept.extendleft(reversed(rows))
                raise
            finally:
                self._take_waited += _now() - start
        for row in rows:
            self._note(row)
        values = [row.value for row in rows]
        return values if collate is None else collate(values)

    def drain(self) -> list[T]:
        """Take all rows that are there and fresh enough, at once."""
        rows: list[_Row] = list(self._kept)
        self._kept.clear()
        while not self._queue.empty():
            row = self._queue.get_nowait()
            if row is None:
                self._queue.put_nowait(None)
                break
            rows.append(row)
        fresh = [row for row in rows if not self._is_stale(row)]
        for row in rows:
            if self._is_stale(row):
                self._dropped += 1
                self._room.release()
        for row in fresh:
            self._note(row)
        return [row.value for row in fresh]

    def close(self) -> None:
        """Take no more rows: those that wait can still be taken. Twice does nothing more."""
        if not self._closed:
            self._closed = True
            self._queue.put_nowait(None)
            self._room.release()

    def statistics(self) -> RowsStatistics:
        """Return what has happened so far."""
        return RowsStatistics(
            put=self._put,
            taken=self._taken,
            dropped=self._dropped,
            waiting=len(self),
            mean_staleness=self._stale_sum / self._taken if self._taken else math.nan,
            max_staleness=self._stale_max,
            put_waited=self._put_waited,
            take_waited=self._take_waited,
        )

    def _is_stale(self, row: _Row) -> bool:
        return self.max_staleness is not None and self.version - row.version > self.max_staleness

    def _note(self, row: _Row) -> None:
        staleness = self.version - row.version
        self._taken += 1
        self._stale_sum += staleness
        self._stale_max = max(self._stale_max, staleness)
        self._room.release()

    def __repr__(self) -> str:
        return f"<Rows: {len(self)} of {self.maxsize}, version {self.version}>"


def _now() -> float:
    return asyncio.get_running_loop().time()
