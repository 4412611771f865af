"""The controller's handle on its guardian. One per controller process, made when first needed.

Everything about a group goes over a socket of its own (`Guardian.open_session`), which the group's
event loop watches; so groups on several loops and threads share one guardian.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Sequence
from typing import Final

from asyncwg._wire.launch import GUARDIAN_VARIABLE, send

_BOOT: Final = (
    "import sys; del sys.path[0]; import json, os; "
    "sys.path[:] = json.loads(os.environ.pop('ASYNCWG_PATH')); "
    "from asyncwg._worker.guardian import main; main(3, int(sys.argv[2]))"
)
_MAIN_FD: Final = 3
_EXIT_WAIT: Final = 3.0
"""Seconds that the end of the program waits for the guardian to have killed everything."""


def interpreter_flags() -> list[str]:
    """Return the options this interpreter was started with, for another one."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]  # noqa: SLF001


class Guardian:
    """A running guardian.

    Attributes:
        pid: its process id.
        environment: the environment it was started with, frozen in all that it forks.
        token: the entry of its environment by which ``/proc`` tells its forks.
    """

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        self.token = f"{GUARDIAN_VARIABLE}={name}".encode()
        self.environment = dict(os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **self.environment,
            GUARDIAN_VARIABLE: name,
            "ASYNCWG_PATH": json.dumps(sys.path),
        }
        argv = [sys.executable, *interpreter_flags(), "-c", _BOOT, "asyncwg-guardian"]
        with theirs:
            # A kernel session of its own: Ctrl-C in the terminal reaches the controller alone.
            self.pid = os.posix_spawn(
                sys.executable,
                [*argv, str(os.getpid())],
                environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), _MAIN_FD)],
                setsid=True,
            )
        self._pidfd = os.pidfd_open(self.pid)
        self._sock = ours
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether its process still runs."""
        return not select.select([self._pidfd], [], [], 0)[0]

    def open_session(self, name: str, preload: Sequence[str], *, explicit: bool) -> socket.socket:
        """Return the group's socket to the guardian.

        Args:
            name: unique; the mark of everything that is started in it.
            preload: modules to import before forking, each once.
            explicit: whether the user named them, so that a failure must be told.

        Raises:
            OSError: the guardian is gone.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = {
            "session": name,
            "preload": list(preload),
            "explicit": explicit,
            "sys_path": sys.path,
        }
        with theirs, self._lock:
            send(self._sock, message, (theirs.fileno(),))
        ours.setblocking(False)
        return ours

    def close(self, wait: float) -> None:
        """Let it kill everything and end; wait at most ``wait`` seconds for that."""
        self._sock.close()
        if select.select([self._pidfd], [], [], wait)[0]:
            try:
                os.waitpid(self.pid, 0)
            except ChildProcessError:
                pass  # somebody else's wait took it
        os.close(self._pidfd)

    def forget(self) -> None:
        """Drop the descriptors without touching the process: in a fork of the controller."""
        self._sock.close()
        os.close(self._pidfd)

    def kill(self) -> None:
        """End it the hard way; its workers die with it."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


_guardian: Guardian | None = None
_lock = threading.Lock()


def guardian() -> Guardian:
    """Return this controller's guardian, started now if there is none that lives."""
    global _guardian  # one per process
    with _lock:
        if _guardian is not None and not _guardian.alive:
            _guardian.close(0)
            _guardian = None
        if _guardian is None:
            _guardian = Guardian()
        return _guardian


def bury(gone: Guardian) -> bool:
    """Let go of a guardian that has ended, and take its exit status; False while it lives."""
    global _guardian  # one per process
    with _lock:
        if gone is not _guardian:
            return True
        if gone.alive:
            return False
        gone.close(0)
        _guardian = None
        return True


def _at_exit() -> None:
    global _guardian
    if _guardian is not None:
        _guardian.close(_EXIT_WAIT)
        _guardian = None


def _after_fork() -> None:
    global _guardian, _lock
    _lock = threading.Lock()
    if _guardian is not None:
        _guardian.forget()
        _guardian = None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
