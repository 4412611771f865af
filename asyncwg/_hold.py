"""A blocking group's hold on the loop's thread: from its start to its end, however that comes."""

from __future__ import annotations

import asyncio
import atexit
import logging
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from asyncwg._loop_thread import LoopThread, enter, leave
from asyncwg.errors import GroupClosedError, InternalError, WorkerGroupError
from asyncwg.worker_group import WorkerGroup

T = TypeVar("T")

_log: Final = logging.getLogger("asyncwg")
_GRACE: Final = 5.0
"""Seconds that a group which still runs when the program ends has to end itself."""


class Hold:
    """A group and the thread that drives it. All that can reach the group keeps it, and so the group runs."""

    def __init__(self, root: WorkerGroup) -> None:
        self.root: Final = root
        self.thread: LoopThread | None = None
        self._finalizer: Any = None

    @classmethod
    def attached(cls, make: Callable[[], Coroutine[Any, Any, WorkerGroup]]) -> Hold:
        """Return the hold on a group that another program hosts; ``make`` attaches to it."""
        thread = enter()
        try:
            hold = cls(thread.run(make))
        except BaseException:
            leave(thread)
            raise
        hold._keep(thread)
        return hold

    def running(self) -> LoopThread:
        """Return the thread.

        Raises:
            GroupClosedError: the group was not started, or was shut down.
        """
        thread = self.thread
        if thread is None:
            name = self.root.name
            if self.root.state == "new":
                raise GroupClosedError(
                    f"group {name!r} has not been started: use 'with', or call its start()"
                )
            raise GroupClosedError(f"group {name!r} was shut down")
        return thread

    def start(self) -> None:
        """Start the group; see `WorkerGroup.start`."""
        thread = enter()
        first = self.thread is None
        if first:
            self.thread = thread
        try:
            thread.run(self.root.__aenter__)
        except BaseException:
            if first:
                self.thread = None
            leave(thread)
            raise
        self._keep(thread)

    def _keep(self, thread: LoopThread) -> None:
        self.thread = thread
        self._finalizer = weakref.finalize(self, _let_go, thread, self.root._core)  # noqa: SLF001
        self._finalizer.atexit = False
        _running.add(self)

    def shutdown(self, grace: float) -> None:
        """Shut the group down; see `WorkerGroup.shutdown`."""
        self._end(lambda: self.root.shutdown(grace))

    def leave(self, grace: float) -> None:
        """Shut the group down, or let go of one that goes on without this program."""
        self._end(lambda: self.root._core.leave(grace))  # noqa: SLF001

    def detach(self) -> None:
        """Let go of the group; see `WorkerGroup.detach`."""
        self._end(self.root.detach)

    def _end(self, how: Callable[[], Coroutine[Any, Any, None]]) -> None:
        thread = self.thread
        if thread is None:
            without_waiting(how())
            return
        try:
            thread.run(how)
        except GroupClosedError:
            pass  # another thread was faster, and the loop has ended
        finally:
            if self.root.state == "closed":
                self._closed(thread)

    def _closed(self, thread: LoopThread) -> None:
        finalizer = self._finalizer
        if finalizer is not None and finalizer.detach() is not None:  # once
            self.thread = None
            _running.discard(self)
            if leave(thread):
                thread.join()


def without_waiting(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that has nothing to wait for, without a loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    coroutine.close()
    raise InternalError(f"{coroutine!r} has something to wait for")


_running: weakref.WeakSet[Hold] = weakref.WeakSet()
"""Groups that have been started and not shut down."""
_ending: set[asyncio.Task[None]] = set()


def _let_go(thread: LoopThread, core: Any) -> None:
    """End a group that nobody can reach any more. A finaliser: in any thread, at any place."""
    core.disown()
    thread.post_last(_end, thread, core)


def _end(thread: LoopThread, core: Any) -> None:
    def ended(task: asyncio.Task[None]) -> None:
        _ending.discard(task)
        leave(thread)

    task: asyncio.Task[None] = asyncio.get_running_loop().create_task(core.leave(0))
    _ending.add(task)
    task.add_done_callback(ended)


def _at_exit() -> None:
    for link in list(_running):
        try:
            link.leave(_GRACE)
        except WorkerGroupError as error:  # nobody is left to catch it
            _log.warning("when the program ended: %s", error, exc_info=error)


# After the guardian's own, which was registered when its module was loaded: so it runs before that.
atexit.register(_at_exit)
