"""The few calls of Linux that Python does not offer, and what ``/proc`` says of processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Final, NamedTuple

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, whether or not the GIL is held."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Inherit every orphan below this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set what ``ps -o comm`` and ``nvidia-smi`` show; 15 bytes count."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


class ProcessInfo(NamedTuple):
    """What ``/proc/<pid>/stat`` says."""

    pid: int
    parent: int
    session: int
    state: str


def processes() -> dict[int, ProcessInfo]:
    """Return every process that exists now, by pid."""
    found: dict[int, ProcessInfo] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue  # it has just ended
        # The name stands in parentheses and may hold any byte, so what follows its end counts.
        fields = text[text.rindex(b")") + 2 :].split()
        pid = int(entry)
        found[pid] = ProcessInfo(pid, int(fields[1]), int(fields[3]), fields[0].decode())
    return found


def descendants(root: int, table: dict[int, ProcessInfo]) -> list[int]:
    """Return the pids below ``root``, nearest first."""
    children: dict[int, list[int]] = {}
    for info in table.values():
        children.setdefault(info.parent, []).append(info.pid)
    below: list[int] = []
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop(0)
        below.append(pid)
        queue += children.get(pid, ())
    return below


def environment_has(pid: int, entry: bytes) -> bool:
    """Tell whether ``pid`` was started with ``NAME=value`` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except OSError:
        return False


def kill(pid: int) -> None:
    """SIGKILL ``pid`` if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor of this process that is not in ``keep``."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in keep:
            try:
                os.close(int(entry))
            except OSError:
                pass  # the one that listed the folder
