"""What a generator method returns: its items, as the ranks give them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol, final

from asyncwg.call import Call
from asyncwg.errors import UsageError

outside: ContextVar[object | None] = ContextVar("asyncwg_outside", default=None)
"""A caller that is no task of the loop, such as a thread that blocks; set where its calls are made."""


def caller() -> object | None:
    """Return who reads or calls."""
    return outside.get() or asyncio.current_task()


class Feed:
    """The items that have come and were not read yet. The pending table fills it."""

    def __init__(self) -> None:
        self.items: collections.deque[tuple[int, Any]] = collections.deque()
        self.pull: Callable[[int], None] | None = None
        """Tells a rank that an item of its was taken; None until the call is on its way."""
        self.reader: object | None = None
        """The task, or thread, that has an item and works on it: it is in the body of its loop."""
        self.waiter: asyncio.Future[None] | None = None
        self._counts: dict[int, int] = {}

    def put(self, rank: int, item: Any) -> None:
        """Take an item."""
        self.items.append((rank, item))
        self._counts[rank] = self._counts.get(rank, 0) + 1
        self.wake()

    def count(self, rank: int) -> int:
        """Return how many items of a rank have come."""
        return self._counts.get(rank, 0)

    def wake(self, _call: Any = None) -> None:
        """Have the reader look."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


@final
class Stream(AsyncIterator[tuple[int, Any]]):
    """What a generator method of a group returns: ``async for rank, item in wg.generate(prompts)``.

    The generators run on their ranks at once, and each makes at most two items more than are read, so a
    slow reader slows them. Items of one rank come in order; those of several as they are made, each with
    its rank in the whole group. When all generators have ended, so does the loop.

    Leaving the loop in any way (``break``, ``return``, an exception, a cancelled task) closes the
    generators on all ranks: a ``def`` generator at its ``yield``, the same one on every rank, because
    ranks that are further may wait for the others in a collective; an ``async def`` one also where
    it waits. So does `aclose`, and dropping the stream. Items that were not read are lost. It is read once.

    The loop raises what the call raises, see `Call`, after the items that had come before; the other ranks'
    generators are closed then.

    A ``def`` generator holds the compute lane of its ranks until it ends, so calling a ``def`` method of
    those ranks inside the loop raises `UsageError`: it would wait for the loop, and the loop for it.
    """

    __slots__ = ("__weakref__", "_call", "_feed", "_is_read", "_label", "_told")
    # Also so that a message about what can't be sent names the stream, and not what is in it.

    def __init__(self, call: Call[None], feed: Feed, label: str) -> None:
        self._call = call
        self._feed = feed
        self._label = label
        self._told = False
        self._is_read = False
        call.add_done_callback(feed.wake)

    def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        """Read it. When what this returns is dropped, as at the end of a loop, the stream is closed."""
        return Reading(self)

    async def __anext__(self) -> tuple[int, Any]:
        """Return the next rank and item.

        Raises:
            StopAsyncIteration: all generators have ended, or the stream was closed.
        """
        feed = self._feed
        feed.reader = None
        self._is_read = True
        while not feed.items:
            if self._call.done():
                self._end()
            feed.waiter = self._call.get_loop().create_future()
            try:
                await feed.waiter
            finally:
                feed.waiter = None
        rank, item = feed.items.popleft()
        if feed.pull is not None and not self._call.done():
            feed.pull(rank)
        feed.reader = caller()
        return rank, item

    def close(self) -> None:
        """Have the generators closed, from any thread. Returns at once; see `Call.cancel`."""
        self._told = True
        self._feed.items.clear()
        self._feed.reader = None
        if self._call.done():
            if self._is_read and not self._call.cancelled():
                self._call.exception()  # who leaves a loop does not wait for what comes behind it
            return
        loop = self._call.get_loop()
        if asyncio._get_running_loop() is loop:  # noqa: SLF001  # does not raise where none runs
            self._call.cancel()
        else:
            with contextlib.suppress(RuntimeError):  # it is closed, and its groups with it
                loop.call_soon_threadsafe(self._call.cancel)

    async def aclose(self) -> None:
        """Have the generators closed, for ``contextlib.aclosing``. It does not wait for them."""
        self.close()

    def _end(self) -> NoReturn:
        if self._told or self._call.cancelled():
            raise StopAsyncIteration
        self._told = True
        error = self._call.exception()
        if error is not None:
            raise error
        raise StopAsyncIteration

    def __await__(self) -> NoReturn:
        """Say how it is read instead."""
        raise UsageError(
            f"{self._label} is a generator: read it with 'async for rank, item in ...'"
        )

    def __reduce__(self) -> NoReturn:
        """Say that it can't be an argument."""
        raise UsageError(
            f"{self._label} is a generator: read it here, and send its items with calls of their own"
        )

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self.close()

    def __repr__(self) -> str:
        return f"<Stream of {self._label}, {'ended' if self._call.done() else 'running'}>"


class Readable(Protocol):
    """What a loop reads, and closes when it is left."""

    def __anext__(self) -> Any:
        """Return the next item."""
        ...

    def close(self) -> None:
        """Stop whoever makes more."""
        ...


class Reading(AsyncIterator[Any]):
    """One loop over something: only the loop knows it, so it goes when the loop is left."""

    def __init__(self, source: Readable) -> None:
        self._source = source

    def __anext__(self) -> Any:
        return self._source.__anext__()

    def __del__(self) -> None:
        self._source.close()
