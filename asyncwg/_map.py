"""``wg.map``: a stream of work for whoever is free."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import reprlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from typing import Any, final

from asyncwg._stream import Reading
from asyncwg.call import Call
from asyncwg.errors import UsageError


class Mapping:
    """One run of ``wg.map``: what is in flight, and what has come and was not read yet.

    Args:
        send: makes the call for one item.
        label: ``Class.method``.
        items: what is to be done; it is read no further than `most` items ahead.
        ordered: whether results come in the order of their items.
        most: items that may be in flight, or done and not read.
    """

    def __init__(
        self,
        send: Callable[[Any], Call[Any]],
        label: str,
        items: Iterable[Any] | AsyncIterable[Any],
        *,
        ordered: bool,
        most: int,
    ) -> None:
        self._send = send
        self._label = label
        self._most = most
        self._next, self._next_later = _reader_of(items)
        self._coming: asyncio.Task[Any] | None = None
        """Waits for the next item, where items come one by one."""
        self._exhausted = False
        self._count = 0
        self._flying: dict[int, tuple[Any, Call[Any]]] = {}
        """By number: the item and its call, until its result is read."""
        self._done: collections.deque[int] = collections.deque()
        self._ordered = ordered
        self._read = 0
        self._woken = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Where it is read; None before that, when nothing has been sent."""
        self._closed = False

    async def next(self) -> tuple[Any, Any]:
        """Wait for the next result; return the item and it. After a failure all is cancelled.

        Raises:
            StopAsyncIteration: there is none, or this was closed.
        """
        self._loop = asyncio.get_running_loop()
        try:
            while not self._closed:
                self._woken.clear()
                self._fill()
                number = self._landed()
                if number is not None:
                    return self._take(number)
                if self._exhausted and not self._flying:
                    break
                await self._woken.wait()
        except BaseException:
            self.close()
            raise
        raise StopAsyncIteration

    def close(self) -> None:
        """Send no more and cancel what is in flight, from any thread. Returns at once."""
        self._closed = True
        if self._loop is None or not (self._flying or self._coming):
            return
        if asyncio._get_running_loop() is self._loop:  # noqa: SLF001  # does not raise where none runs
            self._cancel()
        else:
            with contextlib.suppress(RuntimeError):  # it is closed, and the group with it
                self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._coming is not None:
            self._coming.cancel()
        for _, call in self._flying.values():
            if not call.cancel() and not call.cancelled():
                call.exception()  # who leaves a loop does not wait for what comes behind it
        self._flying.clear()
        self._woken.set()

    def _fill(self) -> None:
        """Send what there is room for."""
        while not self._exhausted and len(self._flying) < self._most:
            try:
                if self._next is not None:
                    item = self._next()
                elif self._coming is None:
                    assert self._next_later is not None
                    coming = asyncio.ensure_future(self._next_later())
                    coming.add_done_callback(lambda _task: self._woken.set())
                    self._coming = coming
                    return
                elif self._coming.done():
                    coming, self._coming = self._coming, None
                    item = coming.result()
                else:
                    return
            except (StopIteration, StopAsyncIteration):
                self._exhausted = True
                return
            self._start(item)

    def _start(self, item: Any) -> None:
        number = self._count
        self._count += 1
        try:
            call = self._send(item)
        except Exception as error:
            error.add_note(self._which(number, item))
            raise
        self._flying[number] = (item, call)

        def ended(_call: object) -> None:
            self._done.append(number)
            self._woken.set()

        call.add_done_callback(ended)

    def _landed(self) -> int | None:
        """Return the number of the result that is to be read next, if it is there."""
        if not self._ordered:
            return self._done.popleft() if self._done else None
        if self._read in self._flying and self._flying[self._read][1].done():
            self._read += 1
            return self._read - 1
        return None

    def _take(self, number: int) -> tuple[Any, Any]:
        item, call = self._flying.pop(number)
        try:
            return item, call.result()
        except Exception as error:
            error.add_note(self._which(number, item))
            raise

    def _which(self, number: int, item: Any) -> str:
        return which(self._label, number, item)


def which(label: str, number: int, item: Any) -> str:
    """Say which item of a map it was."""
    return f"this was item {number} of map({label}): {reprlib.repr(item)}"


@final
class Results(AsyncIterator[Any]):
    """What ``wg.map`` returns. It is read once; leaving the loop closes it, and so does dropping it.

    Nothing else keeps it: calls in flight keep the `Mapping`.
    """

    def __init__(self, mapping: Mapping, *, with_items: bool) -> None:
        self._mapping = mapping
        self._with_items = with_items

    def __aiter__(self) -> AsyncIterator[Any]:
        """Read it. When what this returns is dropped, as at the end of a loop, it is closed."""
        return Reading(self)

    async def __anext__(self) -> Any:
        """Return the next result, or item and result."""
        item, value = await self._mapping.next()
        return (item, value) if self._with_items else value

    def close(self) -> None:
        """Cancel what is in flight. Returns at once."""
        self._mapping.close()

    async def aclose(self) -> None:
        """The same, for ``contextlib.aclosing``."""
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self.close()


def _reader_of(
    items: Iterable[Any] | AsyncIterable[Any],
) -> tuple[Callable[[], Any] | None, Callable[[], Any] | None]:
    """Return what gives the next item, at once or awaited."""
    if isinstance(items, AsyncIterable):
        later = aiter(items)

        async def next_later() -> Any:
            return await anext(later)

        return None, next_later
    if isinstance(items, Iterable):
        return iter(items).__next__, None
    raise UsageError(f"map() takes items that can be iterated over, not {items!r}")
