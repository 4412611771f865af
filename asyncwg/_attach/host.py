"""The host's side: a group listens, and carries out the calls of programs that attach.

- H-1 The name is claimed before a process of the group exists, and given back when none does.
- H-2 No argument and no result of another program is unpickled here.
- H-3 What a program that has gone had asked for is given up, and what it held is free.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncwg._attach import wire
from asyncwg._attach.guest import Guest
from asyncwg._attach.registry import Folder, peer_of
from asyncwg._driver.arena import Holder, arena
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import Kind, pack
from asyncwg.errors import GroupClosedError, UsageError, WorkerGroupError

if TYPE_CHECKING:
    from asyncwg._core import Core
    from asyncwg._driver.gang import Gang

_PARTING: Final = 2.0
"""Seconds that programs have to hear of the end before their sockets are closed."""


class Host:
    """Makes a group one that can be attached to. Belongs to the group's event loop.

    Args:
        core: the group.
        directory: where its socket is; None for the user's own.
    """

    own_process = False
    """Whether this process is there for the group alone."""

    def __init__(self, core: Core, directory: str | None = None) -> None:
        self.core: Final = core
        self.token: Final = uuid.uuid4().hex
        self.since: Final = time.time()
        self.ended: asyncio.Future[None] | None = None
        """Done when nobody can attach any more, and everybody has been told."""
        self._directory = directory
        self._folder: Folder | None = None
        self._sock: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._guests: set[Guest] = set()
        self._waiting: list[tuple[Guest, int]] = []
        """Who attached before the group had started."""
        self._told: Gang | None = None
        self._broken: failures.Failure | None = None
        self._info: wire.Packed | None = None
        self._closing = False
        self._askers: list[tuple[Guest, int]] = []
        """Who wants the group to end."""
        self._ending: asyncio.Task[None] | None = None
        self._nobody: asyncio.Event = asyncio.Event()
        self._dropped: Any = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The group's."""
        assert self._loop is not None
        return self._loop

    @property
    def gang(self) -> Gang | None:
        """The group's processes; None while there are none."""
        return self.core.gang

    async def claim(self) -> None:
        """Take the group's name and listen.

        Raises:
            UsageError: it is taken, or the folder is not safe.
        """
        self._loop = asyncio.get_running_loop()
        self.ended = self._loop.create_future()
        folder = Folder(self._directory)
        claiming = self._loop.run_in_executor(None, folder.claim, self.core.name)
        try:
            sock = await asyncio.shield(claiming)
        except asyncio.CancelledError:
            # The thread goes on; what it gets must not stay.
            claiming.add_done_callback(lambda _claimed: undo(claiming, folder, self.core.name))
            raise
        except BaseException:
            folder.__exit__()
            raise
        self._sock, self._folder, self._directory = sock, folder, folder.path
        self._loop.add_reader(sock.fileno(), self._accept)

    def ticket(self) -> wire.Ticket:
        """Return what another process needs to attach.

        Raises:
            GroupClosedError: the group does not run.
        """
        if self._directory is None or self._sock is None:
            raise GroupClosedError(f"group {self.core.name!r} does not run: start it first")
        return wire.Ticket(
            self._directory, self.core.name, self.token, self._session(), self.info()
        )

    def info(self) -> wire.Info:
        """Return what the group offers."""
        core = self.core
        gang = self.gang
        return wire.offer_of(
            core.spec,
            core.catalogs,
            core.pool.store,
            core.options.on_error,
            {} if gang is None else dict(gang.meshes),
        )

    def packed_info(self) -> wire.Packed:
        """Return the same as bytes."""
        if self._info is None:
            self._info = wire.pack_info(self.info())
        return self._info

    def state(self) -> wire.State:
        """Return how the group is now."""
        gang = self.gang
        return wire.State(
            self.core.state,
            os.getpid(),
            self.own_process,
            self.token,
            self._session(),
            [] if gang is None else gang.pids,
            self.core.port,
            0 if gang is None else gang.transfers.limit,
            {} if gang is None else dict(gang.meshes),
            self._broken if self.core.state == "broken" else None,
        )

    def changed(self, cause: Exception | None = None) -> None:
        """Take note that the group has started, or has broken for ``cause``."""
        self._broken = None if cause is None else failures.capture(cause)
        gang = self.gang
        if gang is not None and gang is not self._told:
            self._told = gang
            gang.on_meshes = self.tell
            gang.transfers.on_relief.append(self._relieve)
            self._watch_facade()
        self.tell()
        if self.core.state == "running":
            waiting, self._waiting = self._waiting, []
            for guest, number in waiting:
                guest.welcome(number)
        self._end_if_useless()

    def look(self) -> None:
        """Tell everybody if the group has just broken: a call may be failing because of it."""
        gang = self.gang
        if gang is not None and gang.broken is not None and self._broken is None:
            self._broken = failures.capture(gang.broken)
            self.tell()

    def _watch_facade(self) -> None:
        """Give the name back when the group's user drops it."""
        facade = self.core.facade
        if self._dropped is not None or facade is None:
            return
        loop = self.loop

        def dropped() -> None:
            if loop.is_closed():
                self.abandon()
            else:
                loop.call_soon_threadsafe(self.abandon)

        self._dropped = weakref.finalize(facade, dropped)
        self._dropped.atexit = False

    def tell(self) -> None:
        """Tell everybody how the group is now."""
        if self._guests:
            frame = pack(Kind.STATE, 0, codec.encode(self.state()).stream)
            for guest in list(self._guests):
                guest.tell(frame)

    def wait_for_start(self, guest: Guest, number: int) -> None:
        """Answer ``guest`` when the group runs."""
        self._waiting.append((guest, number))

    def left(self, guest: Guest) -> None:
        """Take note that a program has gone."""
        self._guests.discard(guest)
        self._waiting = [(each, number) for each, number in self._waiting if each is not guest]
        if not self._guests:
            self._nobody.set()
        self._end_if_useless()

    def summary(self) -> dict[str, Any]:
        """Return what ``list`` shows."""
        return {
            "name": self.core.name,
            "pid": os.getpid(),
            "class": self.core.cls.__qualname__,
            "ranks": self.core.pool.world_size,
            "devices": list(self.core.pool.devices),
            "state": self.core.state,
            "since": self.since,
            "own_process": self.own_process,
            "programs": sum(guest.attached for guest in self._guests),
        }

    def free(self, holder: Holder, offset: int | None = None, count: int = 1) -> None:
        """Take back what a program held: one block so many times, or all."""
        if offset is None:
            arena().release_all(holder)
        else:
            arena().release(offset, holder, count)

    def shut_down(self, grace: float, guest: Guest, number: int) -> None:
        """End the group because a program asks for it, and answer when nothing is left of it."""
        self._askers.append((guest, number))
        if self._ending is None:
            # Not a task of that program's: it goes on when that one ends.
            self._ending = self.loop.create_task(self._shut_down(grace))

    async def _shut_down(self, grace: float) -> None:
        try:
            await self.core.stop(grace)
        except Exception:  # noqa: BLE001, S110  # told to those who have asked
            pass
        await self.close()

    async def close(self, errors: Sequence[Exception] = ()) -> None:
        """The group has ended: tell everybody, and give the name back. May be called twice.

        Args:
            errors: what ``close()`` of the ranks raised, for those who have asked for the end.
        """
        if self._sock is None or self._folder is None or self._loop is None:
            return
        if self._closing:
            assert self.ended is not None
            await asyncio.shield(self.ended)
            return
        self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        self._folder.give_up(self.core.name)
        self._sock.close()
        try:
            for guest, number in self._askers:
                if errors:
                    told = f"{self.core.cls.__name__}.close failed in {self.core.name!r}"
                    guest.refuse(number, WorkerGroupError(told, errors))
                else:
                    guest.answer(number, None)
            self.tell()
            for guest, number in self._waiting:
                guest.refuse(number, GroupClosedError(f"group {self.core.name!r} did not start"))
            self._waiting.clear()
            # Each leaves when it has heard; who does not read is not waited for.
            try:
                async with asyncio.timeout(_PARTING):
                    while self._guests:
                        self._nobody.clear()
                        await self._nobody.wait()
            except TimeoutError:
                pass
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close everything now. Where the loop is closed, what it watched goes with it."""
        gone = self._loop is None or self._loop.is_closed()
        if self._dropped is not None:
            self._dropped.detach()
        if self._sock is not None and self._loop is not None and self._sock.fileno() >= 0:
            if not gone:
                self._loop.remove_reader(self._sock.fileno())
            if self._folder is not None:
                self._folder.give_up(self.core.name)
            self._sock.close()
        self._sock = None
        for guest in () if gone else list(self._guests):
            guest.close()
        if self._folder is not None:
            self._folder.__exit__()
            self._folder = None
        if not gone and self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def _session(self) -> str:
        gang = self.gang
        return "" if gang is None else gang.session

    def _end_if_useless(self) -> None:
        """A broken group in a process of its own ends with the last program that could look at it."""
        core = self.core
        if not self.own_process or self._closing or any(g.attached for g in self._guests):
            return
        over = core.state == "closed" or (core.state == "broken" and not core.supervisor.busy)
        if over and self.ended is not None and not self.ended.done():
            self.ended.set_result(None)

    def _relieve(self) -> None:
        for guest in self._guests:
            guest.relieve([block.offset for block in arena().held_by(guest.holder)])

    def _accept(self) -> None:
        assert self._sock is not None
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        sock.setblocking(False)
        peer = peer_of(sock)
        if peer.uid != os.geteuid():
            sock.close()  # not a byte was read
            return
        try:
            socket.send_fds(sock, [wire.VERSION], [arena().fd])
            self._guests.add(Guest(self, sock, peer.pid))
        except OSError:
            sock.close()  # it has gone already

    def use(self) -> Gang:
        """Return the processes if they take calls.

        Raises:
            AsyncwgError: they don't.
        """
        return self.core.running()

    async def carry_out(self, request: str, argument: Any) -> Any:
        """Do what a program asks for by name."""
        core = self.core
        if request == "summary":
            return self.summary()
        if request == "stacks":
            return await core.running().watch.stacks(timeout=argument)
        if request == "ping":
            return await core.running().watch.ping(argument)
        if request == "save":
            return await core.save()
        if request == "restart":
            return await core.restart(argument)
        raise UsageError(f"a host knows no request {request!r}")


def undo(claiming: asyncio.Future[socket.socket], folder: Folder, name: str) -> None:
    if not claiming.cancelled() and claiming.exception() is None:
        folder.give_up(name)
        claiming.result().close()
    folder.__exit__()
