"""What a worker process knows of itself, and what a running method may ask about its call."""

from __future__ import annotations

import asyncio
import contextvars
import time
from dataclasses import dataclass
from typing import Protocol

from asyncwg.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands. Set once, before user code runs."""

    group: str
    rank: int
    world_size: int
    local_rank: int
    """Place on its node, whatever ``LOCAL_RANK`` says to libraries."""
    local_world_size: int


class Credits(Protocol):
    """How many more items of a generator its reader wants. Any thread may call it."""

    def add(self) -> None:
        """One more is wanted."""
        ...

    def freeze(self) -> int:
        """Begin no further item until `stop_at`; return how many have been begun."""
        ...

    def stop_at(self, items: int) -> None:
        """The reader has gone: end when so many items have been begun."""
        ...


class CurrentCall:
    """The call that the running method serves; get it with `asyncwg.current_call`.

    Attributes:
        id: number of the call in its group; the same on every rank.
        method: ``Class.method``.
        rows: real rows in this rank's shard, without padding; None when nothing was split.
        total_rows: real rows of the whole batch, which is what all shards have together: the weight
            of this shard in a mean is ``rows / total_rows``. None when nothing was split.
    """

    __slots__ = ("_cancelled", "_deadline", "credits", "id", "method", "rows", "total_rows")

    def __init__(
        self,
        call_id: int,
        method: str,
        rows: int | None = None,
        total_rows: int | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        self.id = call_id
        self.method = method
        self.rows = rows
        self.total_rows = total_rows
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._cancelled = False
        self.credits: Credits | None = None
        """Of a generator: how many more items are wanted."""

    @property
    def cancelled(self) -> bool:
        """Whether the caller no longer waits: what the method returns will be thrown away."""
        return self._cancelled

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline of the call, at least 0; None when it has none."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - time.monotonic())

    def cancel(self, items: int = 0) -> None:
        """Take note that the caller has gone; a ``def`` generator ends at its item of that number."""
        self._cancelled = True
        if self.credits is not None:
            self.credits.stop_at(items)

    def __repr__(self) -> str:
        rows = "" if self.rows is None else f" rows={self.rows}/{self.total_rows}"
        return f"<CurrentCall {self.id} {self.method}{rows} cancelled={self._cancelled}>"


place: Place | None = None
"""This process's place, or None where it is no worker."""

loop: asyncio.AbstractEventLoop | None = None
"""Where ``async def`` methods run, or None where there are none."""

running: contextvars.ContextVar[CurrentCall | None] = contextvars.ContextVar(
    "asyncwg_current_call", default=None
)


def current_call() -> CurrentCall:
    """Return the call that the running method serves.

    Raises:
        UsageError: no call is running in this thread or task.
    """
    call = running.get()
    if call is None:
        raise UsageError("current_call() is for the methods of a worker while they serve a call")
    return call
