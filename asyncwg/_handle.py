"""What calls to a blocking group give, and how they are made."""

from __future__ import annotations

import asyncio
import functools
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, final

from asyncwg._hold import Hold, without_waiting
from asyncwg._loop_thread import result_of
from asyncwg._map import which
from asyncwg._stream import Stream, outside
from asyncwg.call import Call
from asyncwg.errors import CallTimeoutError

T = TypeVar("T")


@final
class Handle(Generic[T]):
    """A call on its way: what methods registered with ``blocking=False`` return, and ``execute_all``.

    Among the arguments of another call, also nested in a container, it means the value it will have: the data
    goes from worker to worker, and the other call waits for it in its place in the order. A
    call that fails and that nobody looks at is reported, when its handle is gone, as an asyncio task is.

    Groups make handles; there is no other way to get one. It keeps its group running.
    """

    __slots__ = ("__weakref__", "_call", "_hold")

    def __init__(self, call: Call[T], hold: Hold) -> None:
        self._call = call
        self._hold = hold

    def get(self, timeout: float | None = None) -> T:
        """Wait for the result and return it; as often as you like, from any thread.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            CallTimeoutError: it is not done after ``timeout`` seconds. The call goes on, and can be waited
                for again; where the call's own deadline has passed, `done` is true instead.
            Exception: what awaiting the call would raise; see `asyncwg.Call`.
            concurrent.futures.CancelledError: the call was cancelled.

        An exception in this thread while it waits, such as Ctrl-C, cancels the call.
        """
        self._wait(timeout)
        return result_of(self._call)

    def done(self) -> bool:
        """Whether the result, or an error, is known."""
        return self._call.done()

    def cancelled(self) -> bool:
        """Whether the call was cancelled."""
        return self._call.cancelled()

    def cancel(self) -> bool:
        """Cancel the call for everyone who waits for it; False if it has ended.

        A call that no rank has started is dropped on all; otherwise every rank runs it and the result is
        thrown away. Does not wait for the ranks.
        """
        thread = self._hold.thread
        if thread is None or self._call.done():
            return False
        cancelled: bool = thread.ask(self._call.cancel, taken=True)
        return cancelled

    def results(self, timeout: float | None = None) -> list[Any]:
        """Wait for all ranks and return what each gave, by rank, not joined; exceptions stand in place.

        Raises:
            CallTimeoutError: not all have answered after ``timeout`` seconds. The call goes on.
        """
        self._wait(timeout)
        return without_waiting(self._call.results())

    def as_completed(self) -> Iterator[tuple[int, Any]]:
        """Yield ``(rank, value)`` as the ranks answer, not joined; exceptions stand in place."""
        thread = self._hold.running()
        answers = self._call.as_completed()

        async def step() -> tuple[int, Any] | None:
            return await anext(answers, None)

        while (answer := thread.run(step)) is not None:
            yield answer

    def released(self, timeout: float | None = None) -> None:
        """Wait until what was sent by reference may be written again; see `asyncwg.Call.released`.

        Raises:
            CallTimeoutError: some rank still reads it after ``timeout`` seconds.
        """
        thread = self._hold.thread
        if thread is not None:  # else no rank is left that could read
            thread.run(self._call.released, timeout)

    def _wait(self, timeout: float | None) -> None:
        call = self._call
        if call.done():
            return
        if not self._hold.running().wait(call, timeout):
            raise CallTimeoutError(
                f"{call!r} was not done after {timeout} s of waiting; it goes on"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Stand for its value among the arguments of another call, as the call itself does."""
        return self._call.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<Handle{repr(self._call).removeprefix('<Call')}"


def send(hold: Hold, function: Callable[..., Any], args: Any, kwargs: Any, waits: bool) -> Any:
    """Make a call, and return its value or its handle; of a generator method, its items."""
    thread = hold.running()
    if args or kwargs:
        _wait_for_streams()
        plain = [each._call if isinstance(each, Handle) else each for each in args]  # noqa: SLF001
        named = {
            name: each._call if isinstance(each, Handle) else each  # noqa: SLF001  # one of us
            for name, each in kwargs.items()
        }
        function = functools.partial(function, *plain, **named)
    call = thread.ask(functools.partial(_call_for, _caller(), function), taken=not waits)
    if isinstance(call, Stream):
        return Items(call, hold)
    return result_of(call) if waits else Handle(call, hold)


def _caller() -> object:
    """Return who calls: the task of a notebook's loop, or the thread."""
    if asyncio._get_running_loop() is None:  # noqa: SLF001  # does not raise where none runs
        return threading.current_thread()
    return asyncio.current_task() or threading.current_thread()


def _call_for(who: object, function: Callable[[], Any]) -> Any:
    """Make a call in the loop's thread, in a context of its own that tells for whom."""
    outside.set(who)
    return function()


@final
class Items(Iterator[tuple[int, Any]]):
    """What a generator method of a blocking group returns: ``for rank, item in wg.generate(prompts)``.

    See `asyncwg._stream.Stream`, which it reads: leaving the loop in any way closes the generators.
    """

    def __init__(self, stream: Stream, hold: Hold) -> None:
        self._stream = stream
        self._hold = hold

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Read it. When what this returns is dropped, as at the end of a loop, the generators are closed."""
        try:
            while (item := next(self, None)) is not None:
                yield item
        finally:
            self.close()

    def __next__(self) -> tuple[int, Any]:
        """Return the next rank and item."""
        stream, who = self._stream, _caller()

        async def step() -> tuple[int, Any] | None:
            outside.set(who)
            try:
                return await stream.__anext__()
            except StopAsyncIteration:
                return None

        item = self._hold.running().run(step)
        if item is None:
            raise StopIteration
        return item

    def close(self) -> None:
        """Have the generators closed. Returns at once."""
        self._stream.close()

    def __repr__(self) -> str:
        return f"<Items{repr(self._stream).removeprefix('<Stream')}"


def mapped(
    hold: Hold,
    found: tuple[Callable[[Any], Any], str, int],
    items: Iterable[Any],
    *,
    ordered: bool,
    with_items: bool,
) -> Iterator[Any]:
    """Call what was found once for each item, and yield the results; see `asyncwg.WorkerGroup.map`."""
    function, label, most = found
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    flying: dict[int, tuple[Any, Handle[Any]]] = {}
    coming = enumerate(items)
    read = 0
    more = True
    try:
        while more or flying:
            while more and len(flying) < most:
                number, item = next(coming, (-1, None))
                more = number >= 0
                if more:
                    flying[number] = item, _start(hold, function, label, number, item, arrived.put)
            if not flying:
                return
            number = read if ordered else arrived.get()
            item, handle = flying[number]
            try:
                value = handle.get()
            except Exception as error:
                error.add_note(which(label, number, item))
                raise
            del flying[number]
            read += 1
            yield (item, value) if with_items else value
    finally:
        for _, handle in flying.values():
            handle.cancel()


def _start(
    hold: Hold,
    function: Callable[[Any], Any],
    label: str,
    number: int,
    item: Any,
    tell: Callable[[int], None],
) -> Handle[Any]:
    try:
        handle: Handle[Any] = send(hold, function, (item,), {}, waits=False)
    except Exception as error:
        error.add_note(which(label, number, item))
        raise
    call = handle._call  # noqa: SLF001  # one of us
    hold.running().post(call.add_done_callback, lambda _call: tell(number))
    return handle


def _wait_for_streams() -> None:
    """Wait for what this thread has begun on a CUDA stream of its own.

    The loop's thread copies tensors from the device, and its stream does not wait for others.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    for device in range(torch.cuda.device_count()):
        stream = torch.cuda.current_stream(device)
        if stream != torch.cuda.default_stream(device):
            stream.synchronize()
