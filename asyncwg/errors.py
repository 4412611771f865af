"""Every error that asyncwg raises, split by what the reader does next.

====================== ==========================================================================
``UsageError``         fix the call (``DispatchError``: its arguments; ``ResourceError``: resources)
``WorkerError``        a method raised something that could not travel as itself
``WorkerGroupError``   one call failed on several ranks: an ``ExceptionGroup`` of the originals
``WorkerStartError``   the same, for the start of a group: no process is left
``WorkerDiedError``    a process ended while it still owed an answer
``GroupClosedError``   *you* closed the group
``GroupBrokenError``   *it* broke earlier; start it again
``CallTimeoutError``   the deadline of a call passed
``InternalError``      a mistake of asyncwg's own: please report it
====================== ==========================================================================

A method that raises on one rank raises the original exception in the controller, not one of these.
Every class keeps its fields through pickle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

__all__ = [
    "AsyncwgError",
    "CallTimeoutError",
    "DispatchError",
    "GroupBrokenError",
    "GroupClosedError",
    "InternalError",
    "ResourceError",
    "UsageError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroupError",
    "WorkerStartError",
]


class AsyncwgError(Exception):
    """Root of the tree."""


class UsageError(AsyncwgError, ValueError):
    """The call can't be right as it stands. No rank has seen it; nothing has changed."""


class DispatchError(UsageError):
    """The arguments of a call can't be given out over its ranks, or its results can't be joined.

    Raised before a rank gets a byte when the arguments are at fault. When the *results* can't be
    joined the methods have run, and what they returned is kept.

    Attributes:
        results: the results by rank when joining them failed, else None.
    """

    def __init__(self, message: str, results: Sequence[Any] | None = None) -> None:
        super().__init__(message, results)
        self.results = results

    def __str__(self) -> str:
        """The message alone; results can be large."""
        return str(self.args[0])


class ResourceError(UsageError):
    """More is asked for than there is; the message says what is free and who holds the rest."""


class WorkerError(AsyncwgError):
    """A method raised something that can't arrive as itself.

    That is an exception that does not survive pickling, one whose class the controller can't
    import, or one that must not be mistaken for the controller's own (``SystemExit``,
    ``KeyboardInterrupt``, ``StopIteration``, ``CancelledError``). The worker lives on.

    Attributes:
        type_name: qualified name of the original class.
        text: the original's ``str()``.
        remote_traceback: the worker's formatted traceback.
        rank: the rank that raised, or None where no rank is to blame.
    """

    def __init__(
        self, type_name: str, text: str, remote_traceback: str = "", rank: int | None = None
    ) -> None:
        super().__init__(type_name, text, remote_traceback, rank)
        self.type_name = type_name
        self.text = text
        self.remote_traceback = remote_traceback
        self.rank = rank

    def __str__(self) -> str:
        """Type and text of the original."""
        return f"{self.type_name}: {self.text}" if self.text else self.type_name


class WorkerGroupError(ExceptionGroup[Exception], AsyncwgError):
    """One call failed on several ranks: one exception per failed rank, the first to fail first.

    Works with ``except* ValueError`` and with ``except AsyncwgError``; each exception in it has
    ``.rank``. The group of workers stays usable when every rank has answered.
    """

    def __new__(cls, message: str, excs: Sequence[Exception]) -> Self:
        """Build like any ``ExceptionGroup``."""
        return super().__new__(cls, message, excs)

    def __init__(self, message: str, excs: Sequence[Exception]) -> None:
        super().__init__(message, excs)

    def derive(self, excs: Sequence[Exception]) -> Self:  # type: ignore[override]  # the stub is overloaded
        """Keep the type through ``split`` and ``except*``."""
        return type(self)(self.message, excs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with notes and attributes."""
        return type(self), (self.message, list(self.exceptions)), self.__dict__


class WorkerStartError(WorkerGroupError):
    """A group could not start; holds what each failed rank raised. No process is left."""


class WorkerDiedError(AsyncwgError):
    """A rank's process ended while it still owed an answer. The group is broken.

    Not a ``WorkerError``: nothing raised inside the method, so a handler for that must not
    swallow this and go on with a group that is no longer whole.

    Attributes:
        rank: position in the group.
        pid: process id it had.
        exit_code: exit code, minus the signal number if a signal ended it, None if unknown.
        signal_name: ``"SIGKILL"`` and the like, or None.
        stderr_tail: the last lines it wrote to stderr, oldest first.
        crash_stack: what faulthandler wrote when it crashed, or "".
        oom_killed: whether the kernel's out-of-memory killer is known to have struck.
        method: the method that was running or waiting, or None.
        call_id: the call's number, or None.
        stderr_note: why ``stderr_tail`` is empty, where that is not the rank's doing.
        guardian_pid: the guardian's process id where that was killed, and all its workers with it;
            else None.
    """

    def __init__(
        self,
        rank: int,
        pid: int,
        exit_code: int | None,
        signal_name: str | None = None,
        stderr_tail: Sequence[str] = (),
        crash_stack: str = "",
        oom_killed: bool = False,
        method: str | None = None,
        call_id: int | None = None,
        stderr_note: str = "",
        guardian_pid: int | None = None,
    ) -> None:
        super().__init__(
            rank,
            pid,
            exit_code,
            signal_name,
            tuple(stderr_tail),
            crash_stack,
            oom_killed,
            method,
            call_id,
            stderr_note,
            guardian_pid,
        )
        self.rank = rank
        self.pid = pid
        self.exit_code = exit_code
        self.signal_name = signal_name
        self.stderr_tail = tuple(stderr_tail)
        self.crash_stack = crash_stack
        self.oom_killed = oom_killed
        self.method = method
        self.call_id = call_id
        self.stderr_note = stderr_note
        self.guardian_pid = guardian_pid

    def __str__(self) -> str:
        """The whole post-mortem."""
        if self.signal_name is not None:
            how = f"was ended by {self.signal_name}"
        elif self.guardian_pid is not None:
            how = (
                f"ended because the guardian process (pid {self.guardian_pid}), the parent of all "
                "workers, was killed"
            )
        elif self.exit_code is None:
            how = "ended, and how is not known"
        else:
            how = f"ended with exit code {self.exit_code}"
        lines = [f"rank {self.rank} (pid {self.pid}) {how}"]
        if self.method is not None:
            lines[0] += f" during {self.method}"
            if self.call_id is not None:
                lines[0] += f" (call {self.call_id})"
        if self.oom_killed:
            lines.append("the kernel's out-of-memory killer ended it: use less memory per rank")
        if self.crash_stack and self.crash_stack not in "\n".join(self.stderr_tail):
            lines.append("stack at the crash:")
            lines += [f"  {line}" for line in self.crash_stack.splitlines()]
        if self.stderr_tail:
            lines.append("last lines of its stderr:")
            lines += [f"  {line}" for line in self.stderr_tail]
        elif self.stderr_note:
            lines.append(self.stderr_note)
        return "\n".join(lines)


class GroupClosedError(UsageError):
    """The group was shut down, or was never started. Start it, or make a new one."""


class GroupBrokenError(AsyncwgError):
    """The group broke earlier and takes no calls; its ``__cause__`` is what broke it."""


class CallTimeoutError(AsyncwgError, TimeoutError):
    """The deadline of a call passed. What the ranks still do for it is thrown away."""


class InternalError(AsyncwgError):
    """Something that asyncwg rules out has happened. Please report it with this text."""
