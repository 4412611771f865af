"""The guardian: the one process between a controller and all its workers.

It starts workers, by forking itself with libraries already imported or as fresh interpreters, tells
how they ended, and sees that nothing outlives its group::

    controller ──main socket──▶ guardian ──fork / exec──▶ workers ──▶ their own children
        └─────one session socket per group────┘

- G-1 A worker's exit status is told once, on the socket of its session.
- G-2 When a session ends, by request or because its socket did, no process of it exists, nor a
  child of one: it is a subreaper, so also what left its parent and its process group is below it.
- G-3 When the controller is gone, in whatever way, all of the above is killed and it ends itself.
  It watches the controller's pidfd: the socket alone may be held open by a forked child.

It has one thread and no event loop, because it forks.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import multiprocessing.util
import os
import select
import signal
import socket
import sys
import time
import warnings
from typing import Any, Final, NamedTuple, NoReturn

from asyncwg import _linux as linux
from asyncwg._wire.launch import SESSION_VARIABLE, Descriptors, mark_of, receive, send

SWEEP_EVERY: Final = 0.01
"""Seconds between two looks for what is left, while a session ends: a process that was killed can
leave a child behind that is seen only after its parent is gone."""
LANES_AT: Final = 3
"""First descriptor that a fresh interpreter is given; 0 to 2 are the standard streams."""

WORKER_BOOT: Final = (
    "import sys; del sys.path[0]; import json, os; "
    "sys.path[:] = json.loads(os.environ.pop('ASYNCWG_PATH')); "
    "from asyncwg._worker.guardian import fresh_worker; fresh_worker(sys.argv[1])"
)


class Newborn(NamedTuple):
    """What a forked child needs to become a worker."""

    descriptors: Descriptors
    guardian: int


class _Session:
    """One generation of one group: its processes and its socket."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name = name
        self.mark = mark_of(name)
        self.sock = sock
        self.workers: dict[int, int] = {}
        """Rank by pid, of those that live."""
        self.leaders: set[int] = set()
        """Pids of all its workers ever: the kernel's session ids of what they started."""
        self.ending = False

    def tell(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send, unless nobody listens any more."""
        try:
            send(self.sock, message, fds)
        except OSError:
            self.ending = True


class Guardian:
    """The guardian's state and its loop. `serve` returns in forked children only."""

    def __init__(self, main: socket.socket, controller: int) -> None:
        self._main = main
        self._controller = os.pidfd_open(controller)
        self._pid = os.getpid()
        self._sessions: dict[int, _Session] = {}
        self._tried: dict[str, str | None] = {}
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        signal.signal(signal.SIGTERM, lambda _signum, _frame: self._finish())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def serve(self) -> Newborn:
        """Take requests until the controller is gone; return in a child that is to be a worker."""
        while True:
            for fd in self._wait():
                if fd in (self._controller, self._main.fileno()):
                    self._on_main(fd)
                elif fd == self._wake_read:
                    self._reap()
                else:
                    newborn = self._on_session(fd)
                    if newborn is not None:
                        return newborn
            for session in [s for s in self._sessions.values() if s.ending]:
                self._end(session)

    def _wait(self) -> list[int]:
        poll = select.poll()
        for fd in (self._controller, self._main.fileno(), self._wake_read, *self._sessions):
            poll.register(fd, select.POLLIN)
        ending = any(session.ending for session in self._sessions.values())
        return [fd for fd, _ in poll.poll(SWEEP_EVERY * 1000 if ending else None)]

    def _on_main(self, fd: int) -> None:
        message = None if fd == self._controller else receive(self._main)
        if message is None:
            self._finish()
        request, fds = message
        session = _Session(request["session"], socket.socket(fileno=fds[0]))
        self._sessions[session.sock.fileno()] = session
        failed = self._preload(request["preload"], request["sys_path"])
        if failed and request["explicit"]:
            session.tell({"event": "preload failed", "why": failed})

    def _preload(self, names: list[str], path: list[str]) -> dict[str, str]:
        failed: dict[str, str] = {}
        before = len(self._tried)
        kept, sys.path[:] = list(sys.path), path
        for name in names:
            if name not in self._tried:
                try:
                    importlib.import_module(name)
                    self._tried[name] = None
                except BaseException as error:  # noqa: BLE001  # an import runs anybody's code
                    self._tried[name] = f"{type(error).__name__}: {error}"
            why = self._tried[name]
            if why is not None:
                failed[name] = why
        sys.path[:] = kept
        if len(self._tried) != before:
            # What exists now is shared with every fork: keep the collector from writing to it.
            gc.collect()
            gc.freeze()
        return failed

    def _on_session(self, fd: int) -> Newborn | None:
        session = self._sessions[fd]
        message = receive(session.sock)
        if message is None:
            session.ending = True
            return None
        request, fds = message
        if request["op"] == "end":
            session.ending = True
            return None
        try:
            return self._start(session, request, fds)
        except OSError as error:
            session.tell({"event": "start failed", "rank": request["rank"], "why": str(error)})
        finally:
            if os.getpid() == self._pid:
                for descriptor in fds:
                    os.close(descriptor)
        return None

    def _start(self, session: _Session, request: dict[str, Any], fds: list[int]) -> Newborn | None:
        boot, control, compute, stdout, stderr, arena, stacks, *lane = fds
        descriptors = Descriptors(
            boot=boot,
            control=control,
            compute=compute,
            stdout=stdout,
            stderr=stderr,
            arena=arena,
            stacks=stacks,
            lane=lane[0] if lane else None,
        )
        mark = linux.set_mark(session.mark)  # what is started now inherits it
        try:
            if request["fresh"]:
                pid = self._spawn(session, request["flags"], descriptors)
            else:
                with warnings.catch_warnings():
                    # Libraries may have started threads of their own, with handlers for a fork.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    pid = os.fork()
                if pid == 0:
                    # Their descriptors are closed below: the numbers may soon be somebody else's.
                    for sock in (self._main, *(each.sock for each in self._sessions.values())):
                        sock.detach()
                    _become_child(descriptors)
                    return Newborn(descriptors, self._pid)
        finally:
            if os.getpid() == self._pid:
                linux.set_mark(mark)
        rank = request["rank"]
        session.workers[pid] = rank
        session.leaders.add(pid)
        pidfd = os.pidfd_open(pid)
        session.tell({"event": "started", "rank": rank, "pid": pid}, (pidfd,))
        os.close(pidfd)
        return None

    def _spawn(self, session: _Session, flags: list[str], given: Descriptors) -> int:
        with open(os.dup(given["boot"]), "rb") as file:
            file.seek(0)
            record = json.loads(file.read())
        environment = {**record["env"], "ASYNCWG_PATH": json.dumps(sys.path)}
        # Out of the way first: a target may be the number of another source.
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        sources = [null, given["stdout"], given["stderr"]]
        sources += [
            given["boot"],
            given["control"],
            given["compute"],
            given["arena"],
            given["stacks"],
        ]
        if given["lane"] is not None:
            sources.append(given["lane"])
        high = [fcntl_dup(fd) for fd in sources]
        actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(high)]
        argument = json.dumps({"lane": given["lane"] is not None, "guardian": self._pid})
        try:
            return os.posix_spawn(
                sys.executable,
                [sys.executable, *flags, "-c", WORKER_BOOT, argument],
                environment,
                file_actions=actions,
                setsid=True,
                setsigdef=[signal.SIGINT, signal.SIGHUP],
            )
        finally:
            for fd in (null, *high):
                os.close(fd)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for session in self._sessions.values():
                rank = session.workers.pop(pid, None)
                if rank is not None:
                    code = os.waitstatus_to_exitcode(status)
                    session.tell({"event": "exited", "rank": rank, "code": code})

    def _end(self, session: _Session) -> None:
        """Kill what is left of a session; when nothing is, say so and forget it (G-2)."""
        left = self._members(session)
        for pid in left:
            linux.kill(pid)
        self._reap()
        if not left and not session.workers:
            session.tell({"event": "ended"})
            del self._sessions[session.sock.fileno()]
            session.sock.close()

    def _members(self, session: _Session) -> list[int]:
        table = linux.processes()
        others = {pid for s in self._sessions.values() if s is not session for pid in s.workers}
        tag = f"{SESSION_VARIABLE}={session.name}".encode()
        alone = len(self._sessions) == 1
        roots = set(session.workers)
        for info in table.values():
            if info.parent != self._pid or info.pid in others:
                continue
            # An orphan: one of ours by its kernel session, its marks, or for lack of others.
            if (
                alone
                or info.session in session.leaders
                or linux.has_mark(info.pid, session.mark)
                or linux.environment_has(info.pid, tag)
            ):
                roots.add(info.pid)
        found = [pid for root in roots for pid in (root, *linux.descendants(root, table))]
        return [pid for pid in found if pid in table]

    def _finish(self) -> NoReturn:
        """Kill everything below and end (G-3)."""
        give_up = (
            time.monotonic() + 10.0
        )  # a process in the kernel can't be killed before it returns
        while time.monotonic() < give_up:
            for pid in linux.descendants(self._pid, linux.processes()):
                linux.kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            select.select([], [], [], SWEEP_EVERY)
        os._exit(0)


def fcntl_dup(fd: int) -> int:
    """Duplicate ``fd`` to a number far above those that are handed out as targets."""
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)


def _become_child(descriptors: Descriptors) -> None:
    """Drop all of the guardian in a fork of it, but the descriptors that the worker is given."""
    # What the preloaded libraries have registered would clean up after work that was never done here,
    # and takes 30 ms. Two of them matter: logs are flushed, and children of the worker's ended.
    atexit._clear()  # noqa: SLF001  # what multiprocessing's own forks do
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]  # noqa: SLF001
    atexit.register(logging.shutdown)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(descriptors["stdout"], 1)
    os.dup2(descriptors["stderr"], 2)
    given = descriptors
    keep = {
        0,
        1,
        2,
        given["boot"],
        given["control"],
        given["compute"],
        given["arena"],
        given["stacks"],
    }
    linux.close_all_but(keep | (set() if given["lane"] is None else {given["lane"]}))


def fresh_worker(argument: str) -> None:
    """Be the worker in a fresh interpreter."""
    from asyncwg._worker.main import main

    told = json.loads(argument)
    boot, control, compute, arena, stacks, lane = range(LANES_AT, LANES_AT + 6)
    for fd in range(LANES_AT, lane + bool(told["lane"])):
        os.set_inheritable(fd, False)
    descriptors = Descriptors(
        boot=boot,
        control=control,
        compute=compute,
        stdout=1,
        stderr=2,
        arena=arena,
        stacks=stacks,
        lane=lane if told["lane"] else None,
    )
    main(descriptors, told["guardian"])


def main(main_fd: int, controller: int) -> None:
    """Be the guardian; or, in a child of it, a worker."""
    linux.set_name("asyncwg-guardian")
    linux.become_subreaper()
    os.set_inheritable(main_fd, False)
    os.closerange(main_fd + 1, 4096)
    # Loaded here, shared by every fork.
    for name in ("asyncio", "cloudpickle", "uvloop"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    from asyncwg._worker.main import main as worker_main

    newborn = Guardian(socket.socket(fileno=main_fd), controller).serve()
    worker_main(newborn.descriptors, newborn.guardian)
