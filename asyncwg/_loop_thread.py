"""The event loop that all blocking groups of a program share, in a thread of its own.

::

    caller's thread                            asyncwg-blocking
      Errand ──call_soon_threadsafe──▶  begin(): the call is sent, its arguments taken (O-7)
      lock.acquire()                           …
             ◀──────lock.release()────  its future is done

The thread runs from the start of the first group until the end of the last. Errands are begun in the order in
which they were posted, so the calls of several threads have one order (O-1).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from asyncwg.errors import CallTimeoutError, GroupClosedError, UsageError

T = TypeVar("T")

_LOOK: Final = 0.5
"""Seconds until Ctrl-C is seen at the latest."""
_JOIN: Final = 5.0
"""Seconds that the end of the last group waits for the thread, which has nothing left to do."""


class Errand:
    """One thing that the loop's thread does for another thread, which waits for it.

    Args:
        make: called in the loop's thread. Where it returns a future, that is waited for.
        taken: whether the waiting ends when ``make`` has returned, whatever it returns.
    """

    __slots__ = ("_ended", "_lock", "_make", "_taken", "dropped", "error", "made")

    def __init__(self, make: Callable[[], Any], *, taken: bool = False) -> None:
        self._make: Callable[[], Any] | None = make
        self._taken = taken
        self._lock = allocate_lock()
        self._lock.acquire()
        self._ended = False
        self.dropped = False
        """Set by the waiting thread when it has been interrupted: what has not begun never does."""
        self.made: Any = None
        self.error: BaseException | None = None

    def begin(self) -> None:
        """Do it. In the loop's thread, as all that follows but ``wait`` and ``result``."""
        make, self._make = self._make, None
        if make is None or self.dropped:
            return
        try:
            self.made = make()
        except BaseException as error:  # noqa: BLE001  # it is raised where it is waited for
            self.error = error
        if self._taken or not hasattr(self.made, "add_done_callback"):
            self.end()
        else:
            self.made.add_done_callback(self.end)

    def end(self, _future: object = None) -> None:
        """Let the waiting thread go on."""
        if not self._ended:
            self._ended = True
            self._lock.release()

    def give_up(self) -> None:
        """The loop runs no more: end what has not ended."""
        if not self._ended:
            self.error = GroupClosedError("the group was shut down")
            self.end()

    def drop(self) -> Any:
        """Cancel what was begun, and return it."""
        if hasattr(self.made, "cancel"):
            self.made.cancel()
        return self.made

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, once; False when ``timeout`` seconds have passed before.

        A signal that comes just before a lock is waited for does not end the waiting: Python's handler runs
        when somebody looks. So this looks from time to time.
        """
        acquire = self._lock.acquire
        if timeout is None:
            while not acquire(timeout=_LOOK):
                pass
            return True
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            if acquire(timeout=max(0.0, min(left, _LOOK))):
                return True
            if left <= _LOOK:
                return False

    def result(self) -> Any:
        """Return what ``make`` has returned, or raise what it has raised."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback leads to this frame
        return self.made


class LoopThread:
    """A thread that runs an event loop until it is stopped.

    Attributes:
        users: how many groups need it. Changed under the module's lock alone.
        forked: whether this is the copy of one in a process that was forked, where no thread runs.
    """

    def __init__(self) -> None:
        self.users = 0
        self.forked = False
        self._loop = _new_loop()
        self._stop = asyncio.Event()
        self._errands: set[Errand] = set()
        """What somebody waits for."""
        self._thread = threading.Thread(target=self._run, name="asyncwg-blocking", daemon=True)
        _threads.add(self)
        self._thread.start()

    def _run(self) -> None:
        # A Runner: at the end it cancels what is left and waits for the threads that copy.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())
        # What was posted after the loop's last turn: the loop is closed, and takes no more.
        for errand in list(self._errands):
            errand.give_up()

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Have the thread call ``function(*args)``; returns at once.

        Raises:
            GroupClosedError: the thread has ended.
            UsageError: this process was forked from the one that the thread runs in.
        """
        if self.forked:
            raise UsageError(
                "this process was forked from the one that started the group, and only that one can "
                "use it: start another group here"
            )
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            raise GroupClosedError("the group was shut down") from None

    def post_last(self, function: Callable[..., object], *args: Any) -> bool:
        """The same for what need not be done where no thread runs; False there. For finalisers too."""
        try:
            self.post(function, *args)
        except (GroupClosedError, UsageError):
            return False
        return True

    def _wait_for(self, errand: Errand, timeout: float | None = None) -> bool:
        if threading.get_ident() == self._thread.ident:
            raise UsageError(
                "a blocking call here would wait for itself: this is the thread that drives all blocking "
                "groups, where dispatch and collect functions, callbacks and inline ranks run"
            )
        errands = self._errands
        errands.add(errand)
        try:
            self.post(errand.begin)
            return errand.wait(timeout)
        finally:
            errands.discard(errand)

    def ask(self, make: Callable[[], Any], *, taken: bool = False) -> Any:
        """Have the thread call ``make``, wait for the future it returns, and return that.

        An exception in this thread meanwhile, such as Ctrl-C, cancels the future and is raised at once.

        Args:
            make: makes the future.
            taken: return what ``make`` returns as soon as it has.

        Raises:
            Exception: what ``make`` has raised.
        """
        errand = Errand(make, taken=taken)
        try:
            self._wait_for(errand)
        except BaseException:
            errand.dropped = True
            self.post_last(errand.drop)
            raise
        return errand.result()

    def wait(self, future: asyncio.Future[Any], timeout: float | None) -> bool:
        """Wait until a future of the loop is done; False when ``timeout`` seconds have passed before.

        An exception in this thread meanwhile, such as Ctrl-C, cancels the future and is raised at once.
        """
        errand = Errand(lambda: future)
        try:
            if not self._wait_for(errand, timeout):
                return False
            errand.result()
        except BaseException:
            self.post_last(future.cancel)
            raise
        return True

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], timeout: float | None = None) -> T:
        """Run a coroutine in the thread and return its result.

        An exception in this thread meanwhile, such as Ctrl-C, cancels the coroutine and is raised
        when that has ended.

        Args:
            make: makes the coroutine.
            timeout: seconds until it is cancelled.

        Raises:
            CallTimeoutError: they have passed.
        """
        errand = Errand(lambda: self._loop.create_task(make()))
        try:
            if not self._wait_for(errand, timeout):
                raise CallTimeoutError(f"not done after {timeout} s of waiting")
        except BaseException:
            errand.dropped = True
            try:
                self._wait_for(Errand(errand.drop))
            except (GroupClosedError, UsageError):
                pass  # where no thread runs, nothing does
            raise
        result: T = result_of(errand.result())
        return result

    def stop(self) -> None:
        """Let the thread end."""
        self.post_last(self._stop.set)

    def join(self) -> None:
        """Wait until the thread has ended, unless it is this one."""
        if threading.get_ident() != self._thread.ident:
            self._thread.join(_JOIN)


def result_of(future: asyncio.Future[T]) -> T:
    """Return the result of a future that is done, in any thread.

    Raises:
        concurrent.futures.CancelledError: it was cancelled. asyncio's own error of that name would
            pass through ``except Exception``, and cancel a task that the caller may run in.
    """
    try:
        return future.result()
    except asyncio.CancelledError:
        raise concurrent.futures.CancelledError("the call was cancelled") from None


def enter() -> LoopThread:
    """Return the thread, started now if there is none; `leave` it when it is no longer needed."""
    global _current  # one per process
    with _lock:
        if _current is None:
            _current = LoopThread()
        _current.users += 1
        return _current


def leave(thread: LoopThread) -> bool:
    """Let the thread end if nobody else needs it, and return whether it ends."""
    global _current  # one per process
    with _lock:
        thread.users -= 1
        if thread.users:
            return False
        if _current is thread:
            _current = None
    thread.stop()
    return True


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop()
    return uvloop.new_event_loop()


_current: LoopThread | None = None
_lock = threading.Lock()
_threads: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_left_behind: list[LoopThread] = []
"""In a fork: loops of the parent. Closing one here would take the parent's descriptors out of an epoll
instance that both processes share."""


def _after_fork() -> None:
    global _current, _lock
    _lock = threading.Lock()
    _current = None
    for thread in list(_threads):
        thread.forked = True
        _left_behind.append(thread)
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)
