"""Why a process ended: what the kernel and its last words tell."""

from __future__ import annotations

import signal
from pathlib import Path

from asyncwg._driver.output import Output
from asyncwg.errors import WorkerDiedError


def oom_kills() -> int:
    """Return how often the out-of-memory killer has struck in this process's control group."""
    try:
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                events = Path(f"/sys/fs/cgroup{path}/memory.events").read_text().split()
                return int(events[events.index("oom_kill") + 1])
    except (OSError, ValueError):
        pass  # no control groups of version 2, or not for us to read
    return 0


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
    )
    guardian_pid: int | None,
        guardian_pid=guardian_pid,
