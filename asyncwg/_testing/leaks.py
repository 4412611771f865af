"""What a program leaves behind: snapshots of this process, and the difference of two.

Everything is read from ``/proc`` right here, with nothing of the package's own: a mistake there can't hide
itself. A helper process is recognised by its command line alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import select
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

GUARDIAN: Final = "asyncwg-guardian"
"""Part of the command line of the helper that lives as long as its controller."""

SETTLE: Final = 2.0
"""Seconds that what is about to go is given. Ending a process is a matter of milliseconds."""

GUARDIAN_DESCRIPTORS: Final = 4
"""Descriptors that may stay open where a guardian first appears: this process's ends of its line to the
guardian, and one in reserve. Later snapshots find them there, so the allowance counts once per guardian."""

ARENA: Final = re.compile(r"/memfd:asyncwg-arena|/proc/\d+/pagemap$")
ARENA_DESCRIPTORS: Final = 5
"""Descriptors of the arena, which a process that drives groups keeps for its life: the file, the
arena's own copy and those of its two maps, and the page map. More are views of a result."""

UNOWNED_TARGETS: Final = re.compile(r"/dev/(urandom|nvidia.*)$")
"""Files that a library opens once for the life of the process: random numbers, the GPU driver."""

SHM: Final = Path("/dev/shm")
_PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that can't be taken for a later one with the same number."""

    pid: int
    started: int
    """When, in the kernel's ticks."""
    parent: int = field(compare=False)

    def __str__(self) -> str:
        try:
            state, parent, _ = _stat(self.pid)
        except OSError:
            return f"{self.pid} (gone while it was looked at)"
        return f"{self.pid} (parent {parent}, {state}): {command(self.pid)}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """This process at one moment."""

    descriptors: dict[int, str]
    shared_memory: frozenset[str]
    processes: frozenset[Process]
    guardians: frozenset[int]

    @classmethod
    def take(cls) -> Snapshot:
        """Look now."""
        below = descendants()
        # A forked worker has the command line of the guardian, but that is its parent.
        named = {process.pid for process in below if GUARDIAN in command(process.pid)}
        guardians = frozenset(p.pid for p in below if p.pid in named and p.parent not in named)
        others = frozenset(p for p in below if p.pid not in guardians)
        return cls(_descriptors(), _shared_memory(), others, guardians)


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
        _wait_for_an_end(Snapshot.take().processes - before.processes, left)
    return []


async def pending_tasks(
    settle: float = SETTLE, before: frozenset[asyncio.Task[object]] = frozenset()
) -> list[str]:
    """Return the tasks of the running loop that don't end within ``settle``, one text each."""
    tasks = asyncio.all_tasks() - before - {asyncio.current_task()}
    if not tasks:
        return []
    _, pending = await asyncio.wait(tasks, timeout=settle)
    return [f"task {task!r}" for task in pending]


def descendants() -> list[Process]:
    """Return every process below this one."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            with contextlib.suppress(OSError):
                _, parent, started = _stat(int(name))
                children.setdefault(parent, []).append(Process(int(name), started, parent))
    found: list[Process] = []
    parents = [os.getpid()]
    while parents:
        below = children.pop(parents.pop(), [])
        found += below
        parents += [process.pid for process in below]
    return found


def command(pid: int) -> str:
    """Return a process's command line, "" for one that has none any more."""
    try:
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int, int]:
    """State, parent and start of a process."""
    # The name in parentheses may hold anything, a parenthesis too.
    fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[19])


def _differences(before: Snapshot) -> list[str]:
    now = Snapshot.take()
    found = [f"process {process}" for process in now.processes - before.processes]
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


def _wait_for_an_end(processes: Iterable[Process], seconds: float) -> None:
    """Wait until one of ``processes`` ends, or a moment if none can tell.

    A pidfd and not ``wait``: that would take the exit status of our own children away from the
    code that is under test.
    """
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        waiting = 0
        for process in processes:
            with contextlib.suppress(OSError):
                if _stat(process.pid)[0] == "Z":
                    continue  # its pidfd is ready for ever; it waits for its parent
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                waiting += 1
        poll.poll(1000 * (seconds if waiting else min(seconds, 0.02)))


def _is_ours(name: str) -> bool:
    """Whether no foreign process maps ``name``: other programs use /dev/shm at the same time."""
    ours = {os.getpid(), *(process.pid for process in descendants())}
    needle = os.fsencode(SHM / name)
    for folder in _PROC.iterdir():
        if folder.name.isdigit() and int(folder.name) not in ours:
            with contextlib.suppress(OSError):
                if needle in (folder / "maps").read_bytes():
                    return False
    return (SHM / name).exists()
