"""The processes of one generation of a group: started through the guardian, watched by pidfd.

- P-1 ``on_exit(rank, code)`` is called once for every process that was started, after it has ended;
  ``code`` is None when nobody can tell.
- P-2 After ``end()`` no process of the generation exists, nor a child of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import Any, Final

from asyncwg import _linux as linux
from asyncwg._driver.guardian import Guardian, bury
from asyncwg._wire.launch import SESSION_VARIABLE, mark_of, receive, send

_CODE_WAIT: Final = 0.5
"""Seconds that the guardian has to tell an exit code once the process is seen to have ended. It
answers in a millisecond unless it is importing a library."""
_SWEEP_EVERY: Final = 0.01
"""Seconds between two looks for what a killed guardian has left."""


class Processes:
    """Starts, signals and ends the processes of one generation. Belongs to one event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        guardian: Guardian,
        sock: socket.socket,
        name: str,
        on_exit: Callable[[int, int | None], None],
        on_failure: Callable[[int | None, str], None],
    ) -> None:
        self._loop = loop
        self._guardian = guardian
        self._sock = sock
        self._name = name
        self._on_exit = on_exit
        self._on_failure = on_failure
        self.pids: dict[int, int] = {}
        self.guardian_gone: int | None = None
        """Process id of the guardian, if that ended before the generation did."""
        self._pidfds: dict[int, int] = {}
        self._waiting: dict[int, asyncio.TimerHandle] = {}
        self._exited: set[int] = set()
        self._changed: list[asyncio.Future[None]] = []
        self._ended = False
        self._sweeping: asyncio.TimerHandle | None = None
        self._dying: list[int] = []
        loop.add_reader(sock.fileno(), self._readable)

    async def start(
        self, rank: int, fds: tuple[int, ...], *, fresh: bool, flags: list[str]
    ) -> None:
        """Ask for one process; its pid is known when the guardian has answered."""
        request = {"op": "start", "rank": rank, "fresh": fresh, "flags": flags}
        while True:
            try:
                send(self._sock, request, fds)
            except BlockingIOError:
                await self._writable()
            except OSError:
                return  # the guardian is gone: the end of the stream tells it
            else:
                return

    async def known(self, ranks: int) -> None:
        """Wait until the guardian has told of so many processes, or is gone."""
        while len(self.pids) < ranks and self.guardian_gone is None:
            await self._new_change()

    def alive(self, rank: int) -> bool:
        """Whether the process of ``rank`` was started and has not been seen to end."""
        return rank in self._pidfds and rank not in self._exited

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to a rank's process if it lives. The pidfd can't mean another process."""
        if self.alive(rank):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[rank], signum)

    async def wait_exits(self, ranks: list[int], timeout: float) -> bool:
        """Wait until the processes of ``ranks`` have ended; False if some have not in time."""
        deadline = self._loop.time() + timeout
        while any(self.alive(rank) for rank in ranks):
            left = deadline - self._loop.time()
            if left <= 0 or not await self._next_change(left):
                return not any(self.alive(rank) for rank in ranks)
        return True

    async def end(self) -> None:
        """Kill what is left and return when nothing is (P-2). Cancelling it does not stop that."""
        if not self._ended:
            try:
                send(self._sock, {"op": "end"})
            except OSError:
                pass  # the guardian is gone; `_sweep` kills what is left
        while not self._ended:
            await asyncio.shield(self._new_change())

    def close(self) -> None:
        """Let go of every descriptor. The guardian kills what is left."""
        for handle in self._waiting.values():
            handle.cancel()
        self._waiting.clear()
        self._finish_stream()
        for pidfd in self._pidfds.values():
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        for pidfd in self._dying:
            os.close(pidfd)
        self._dying.clear()

    def _readable(self) -> None:
        while True:
            try:
                got = receive(self._sock)
            except BlockingIOError:
                return
            if got is None:
                self._guardian_gone()
                return
            message, fds = got
            self._take(message, fds)
            if self._ended:
                return

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        event = message["event"]
        if event == "started":
            rank = message["rank"]
            self.pids[rank] = message["pid"]
            self._pidfds[rank] = fds[0]
            self._loop.add_reader(fds[0], self._process_ended, rank)
        elif event == "exited":
            self._settle(message["rank"], message["code"])
        elif event == "start failed":
            self._on_failure(message["rank"], message["why"])
        elif event == "preload failed":
            self._on_failure(None, "; ".join(f"{k}: {v}" for k, v in message["why"].items()))
        elif event == "ended":
            self._finish_stream()
        self._notify()

    def _process_ended(self, rank: int) -> None:
        self._loop.remove_reader(self._pidfds[rank])
        if rank not in self._exited:
            self._waiting[rank] = self._loop.call_later(_CODE_WAIT, self._settle, rank, None)

    def _settle(self, rank: int, code: int | None) -> None:
        if rank in self._exited:
            return
        self._exited.add(rank)
        handle = self._waiting.pop(rank, None)
        if handle is not None:
            handle.cancel()
        if rank in self._pidfds:
            self._loop.remove_reader(self._pidfds[rank])
        self._on_exit(rank, code)
        self._notify()

    def _guardian_gone(self) -> None:
        """Its workers die with it; what they had started is found by its mark and killed here."""
        if self._ended or self._sweeping is not None:
            return
        self.guardian_gone = self._guardian.pid
        self._close_stream()
        self._sweep()
        for rank in list(self._pidfds):
            self._settle(rank, None)
        self._on_failure(None, f"the guardian process (pid {self._guardian.pid}) was killed")
        self._notify()

    def _sweep(self) -> None:
        """Kill what a guardian that is gone has left; when nothing is, say so (P-2).

        A process that is about to end has no environment any more, so no look finds it: those that
        were found are watched to their end.
        """
        mark, tag = mark_of(self._name), f"{SESSION_VARIABLE}={self._name}".encode()
        found = False
        for pid, info in linux.processes().items():
            if info.state not in "ZX" and (
                linux.has_mark(pid, mark)
                or linux.environment_has(pid, tag)
                or linux.environment_has(pid, self._guardian.token)
            ):
                found = True
                with contextlib.suppress(OSError):  # it has just ended
                    pidfd = os.pidfd_open(pid)
                    self._dying.append(pidfd)
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        watched = select.poll()
        everyone = {*self._dying, *self._pidfds.values()}
        for pidfd in everyone:
            watched.register(pidfd, select.POLLIN)
        if found or len(watched.poll(0)) < len(everyone) or not bury(self._guardian):
            self._sweeping = self._loop.call_later(_SWEEP_EVERY, self._sweep)
            return
        self._sweeping = None
        self._ended = True
        self._notify()

    def _finish_stream(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
        elif not self._ended:
            self._close_stream()
        self._ended = True

    def _close_stream(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _new_change(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._changed.append(future)
        return future

    async def _next_change(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._new_change()
        except TimeoutError:
            return False
        return True

    def _notify(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    async def _writable(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        fd = self._sock.fileno()

        def writable() -> None:
            if not future.done():
                future.set_result(None)

        self._loop.add_writer(fd, writable)
        try:
            await future
        finally:
            self._loop.remove_writer(fd)
