"""What a test may leave behind: nothing. Snapshots of this process, and the difference of two.

Nothing here knows asyncwg, so a mistake in asyncwg can't hide itself. Everything is read from
``/proc``; a helper process is recognised by its command line alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import os
import re
import select
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import psutil
import pytest

T = TypeVar("T")

GUARDIAN: Final = "asyncwg-guardian"
"""Part of the command line of the helper that lives as long as its controller."""

SETTLE: Final = 2.0
"""Seconds that what is about to go is given. Ending a process is a matter of milliseconds."""

GUARDIAN_DESCRIPTORS: Final = 4
"""Descriptors that the test in which a guardian first appears may keep open.

They are this process's ends of its line to the guardian (one socket, one pipe that tells either
side of the other's end, one pidfd) and one in reserve. Later tests find them in their first
snapshot, so the allowance counts once per guardian.
"""

ARENA: Final = re.compile(r"/memfd:asyncwg-arena|/proc/\d+/pagemap$")
ARENA_DESCRIPTORS: Final = 5
"""Descriptors of the arena, which a process that drives groups keeps for its life: the file, the
arena's own copy and those of its two maps, and the page map. More are views of a result."""

UNOWNED_TARGETS: Final = re.compile(r"/dev/(urandom|nvidia.*)$")
"""Files that a library opens once for the life of the process: random numbers, the GPU driver."""

SHM: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """This process at one moment."""

    descriptors: dict[int, str]
    shared_memory: frozenset[str]
    processes: frozenset[psutil.Process]
    guardians: frozenset[int]

    @classmethod
    def take(cls) -> Snapshot:
        """Look now."""
        processes, guardians = _descendants()
        return cls(_descriptors(), _shared_memory(), processes, guardians)


def leaks_since(before: Snapshot, settle: float = SETTLE) -> list[str]:
    """Say what is there now and was not in ``before``, one line each; [] is the good case.

    Waits at most ``settle`` seconds for things that are about to go.
    """
    found = _differences(before)
    if not found:
        return []
    # Descriptors can hang on reference cycles; a finaliser that closes them warns by itself.
    gc.collect()
    deadline = time.monotonic() + settle
    while found := _differences(before):
        left = deadline - time.monotonic()
        if left <= 0:
            return found
        _wait_for_an_end(_descendants()[0] - before.processes, left)
    return []


def _differences(before: Snapshot) -> list[str]:
    now = Snapshot.take()
    found = [f"process {_describe(process)}" for process in now.processes - before.processes]
    arena = [number for number, target in now.descriptors.items() if ARENA.match(target)]
    kept = set(arena if len(arena) <= ARENA_DESCRIPTORS else ())
    descriptors = [
        f"descriptor {number} -> {target}"
        for number, target in now.descriptors.items()
        if before.descriptors.get(number) != target
        and number not in kept
        and not UNOWNED_TARGETS.match(target)
    ]
    if len(descriptors) > GUARDIAN_DESCRIPTORS * len(now.guardians - before.guardians):
        found += descriptors
    names = now.shared_memory - before.shared_memory
    return found + [f"shared memory {SHM / name}" for name in sorted(names) if _is_ours(name)]


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for number in os.listdir("/proc/self/fd"):
        # The descriptor of the folder that is being read is gone when its turn comes.
        with contextlib.suppress(FileNotFoundError):
            found[int(number)] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _shared_memory() -> frozenset[str]:
    return frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset()


def _descendants() -> tuple[frozenset[psutil.Process], frozenset[int]]:
    """Every descendant but the guardians, and the guardians' pids."""
    guardians: set[int] = set()
    others: set[psutil.Process] = set()
    for process in psutil.Process().children(recursive=True):
        if GUARDIAN in _command(process):
            guardians.add(process.pid)
        else:
            others.add(process)
    return frozenset(others), frozenset(guardians)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _describe(process: psutil.Process) -> str:
    try:
        with process.oneshot():
            return (
                f"{process.pid} (parent {process.ppid()}, {process.status()}): {_command(process)}"
            )
    except psutil.Error:
        return f"{process.pid} (gone while it was looked at)"


def _wait_for_an_end(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until one of ``processes`` ends, or a moment if none can tell.

    A pidfd and not ``wait``: that would take the exit status of our own children away from the
    code that is under test.
    """
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        waiting = 0
        for process in processes:
            with contextlib.suppress(OSError, psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue  # its pidfd is ready for ever; it waits for its parent
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                waiting += 1
        poll.poll(1000 * (seconds if waiting else min(seconds, 0.02)))


def _is_ours(name: str) -> bool:
    """Whether no foreign process maps ``name``: other programs use /dev/shm at the same time."""
    ours = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    needle = os.fsencode(SHM / name)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) not in ours:
            with contextlib.suppress(OSError):
                if needle in (folder / "maps").read_bytes():
                    return False
    return (SHM / name).exists()


async def pending_tasks(settle: float = SETTLE) -> list[str]:
    """Return the tasks of the running loop that don't end within ``settle``, one text each."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if not tasks:
        return []
    _, pending = await asyncio.wait(tasks, timeout=settle)
    return [f"task {task!r}" for task in pending]


async def bounded(awaitable: Awaitable[T], seconds: float = 10.0) -> T:
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
    for process in psutil.Process().children(recursive=True):
        sys.stderr.write(f"{_describe(process)}; {_kernel_wait(process.pid)}\n")


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
    left = leaks_since(before)
    if left:
        report("left behind:\n" + "\n".join(f"  {line}" for line in left))
