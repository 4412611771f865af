"""Why a process ended: what the kernel and its last words tell."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncwg._driver.output import Output
from asyncwg.errors import WorkerDiedError

_CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def oom_kills() -> int:
    """Return how often the out-of-memory killer has struck in this process's control group."""
    for events in _memory_events():
        try:
            words = events.read_text().split()
            return int(words[words.index("oom_kill") + 1])
        except (OSError, ValueError, IndexError):
            continue  # no such controller here, or not for us to read
    return 0


def _memory_events() -> Iterator[Path]:
    """Yield where the kernel may count them: the ways of version 2 and 1 of control groups."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield _CONTROL_GROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield _CONTROL_GROUPS / "memory" / path.lstrip("/") / "memory.oom_control"


def signal_name(exit_code: int | None) -> str | None:
    """Return ``"SIGKILL"`` for -9, None for what is no signal."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def explain(
    *,
    rank: int,
    pid: int,
    exit_code: int | None,
    output: Output,
    oom_before: int,
    method: str | None,
    call_id: int | None,
    guardian_pid: int | None,
) -> WorkerDiedError:
    """Put together what is known of a rank that died; ``guardian_pid`` is of a guardian that has too."""
    lines, crash = output.tail(rank)
    name = signal_name(exit_code)
    return WorkerDiedError(
        rank,
        pid,
        exit_code,
        signal_name=name,
        stderr_tail=lines,
        crash_stack=crash,
        oom_killed=(name == "SIGKILL" or guardian_pid is not None) and oom_kills() > oom_before,
        method=method,
        call_id=call_id,
        stderr_note=output.note,
        guardian_pid=guardian_pid,
    )
