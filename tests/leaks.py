"""What a test may leave behind: nothing. What it waits for: not for ever.

What is left is found by `asyncwg.testing`'s own means, which know nothing of the rest of asyncwg.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from asyncwg._testing.leaks import (
    GUARDIAN,
    Snapshot,
    descendants,
    leaks_since,
    pending_tasks,
)
from tests.times import PATIENCE, SETTLE

__all__ = [
    "GUARDIAN",
    "PATIENCE",
    "SETTLE",
    "Heartbeat",
    "Snapshot",
    "bounded",
    "dump_stacks",
    "exit_code_of",
    "in_one_try",
    "in_thread",
    "leaks_since",
    "no_leaks",
    "pending_tasks",
]

T = TypeVar("T")


async def bounded(awaitable: Awaitable[T], seconds: float = PATIENCE) -> T:
    """Await ``awaitable`` for ``seconds``; after that write down who is stuck, and fail the test.

    The written stacks (all threads and tasks of this process, and what each descendant waits for
    in the kernel) are the reason to prefer this to ``asyncio.wait_for``.
    """
    # Wrapped, for asyncio.wait refuses a Call: it is a future and a coroutine.
    task = asyncio.create_task(_result_of(awaitable))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        dump_stacks()
        task.cancel()
        # What swallows its cancellation must not hold up the report.
        await asyncio.wait({task}, timeout=1.0)
        pytest.fail(f"not done after {seconds} s: {task!r}")
    return task.result()


async def in_one_try(attempt: Callable[[], Awaitable[bool]], tries: int = 8) -> bool:
    """Whether ``attempt`` finds true once, for what is measured in time.

    A machine that is busy with others may hold up one try, or some; what is slow by itself is so in each.
    """
    for _ in range(tries):
        if await bounded(attempt()):
            return True
    return False


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call ``function`` in a thread of its own and wait for it.

    A thread of ``asyncio.to_thread`` that waits for what never comes keeps the loop from closing and
    pytest from ending; this one does neither.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], outcome: Any) -> None:
        if not ended.done():
            settle(outcome)

    def work() -> None:
        try:
            outcome: Any = function(*args)
            settle: Callable[[Any], None] = ended.set_result
        except BaseException as error:  # noqa: BLE001  # raised where it is waited for
            outcome, settle = error, ended.set_exception
        with contextlib.suppress(RuntimeError):  # nobody waits any more, and the loop is closed
            loop.call_soon_threadsafe(tell, settle, outcome)

    threading.Thread(target=work, daemon=True).start()
    return await ended


def exit_code_of(child: int, seconds: float = PATIENCE) -> int:
    """Wait for the end of a forked child; one that does not end is killed, and fails the test."""
    descriptor = os.pidfd_open(child)
    try:
        ended = bool(select.select([descriptor], [], [], seconds)[0])
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    status = os.waitpid(child, 0)[1]
    if not ended:
        pytest.fail(f"a forked child had not ended after {seconds} s")
    return os.waitstatus_to_exitcode(status)


class Heartbeat:
    """The longest time that the running loop did not come round to what was due."""

    def __init__(self, every: float = 0.01) -> None:
        self._loop = asyncio.get_running_loop()
        self._every = every
        self._last = self._loop.time()
        self.longest = 0.0
        self._timer = self._loop.call_later(every, self._beat)

    def _beat(self) -> None:
        now = self._loop.time()
        self.longest = max(self.longest, now - self._last - self._every)
        self._last = now
        self._timer = self._loop.call_later(self._every, self._beat)

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_error: object) -> None:
        self.longest = max(self.longest, self._loop.time() - self._last - self._every)
        self._timer.cancel()


async def _result_of(awaitable: Awaitable[T]) -> T:
    return await awaitable


def dump_stacks() -> None:
    """Write the stacks of this process's threads and tasks, and the state of its descendants."""
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    with contextlib.suppress(RuntimeError):  # no running loop
        for task in asyncio.all_tasks():
            task.print_stack(limit=20, file=sys.stderr)
    for process in descendants():
        sys.stderr.write(f"{process}; {_kernel_wait(process.pid)}\n")


def _kernel_wait(pid: int) -> str:
    """Where each thread of ``pid`` waits in the kernel, as ``name:function``."""
    waits: list[str] = []
    with contextlib.suppress(OSError):
        waits.extend(
            f"{(thread / 'comm').read_text().strip()}:{(thread / 'wchan').read_text() or '-'}"
            for thread in Path(f"/proc/{pid}/task").iterdir()
        )
    return "threads wait in " + (", ".join(waits) or "(unknown)")


@contextlib.contextmanager
def no_leaks(report: Callable[[str], None] = pytest.fail) -> Generator[None, None, None]:
    """Run a block that must leave nothing; ``report`` gets the text of what it left."""
    before = Snapshot.take()
    yield
    left = leaks_since(before, SETTLE)
    if left:
        report("left behind:\n" + "\n".join(f"  {line}" for line in left))
