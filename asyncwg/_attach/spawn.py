"""Starting a group in a host process that outlives its creator: the creator's side.

The creator hands over what to start in a memory file, and talks to the host over a socket pair until the
group runs. An end of that stream without a word means that the creator is gone, and the host goes on; a
creator that has changed its mind says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from asyncwg._attach import wire
from asyncwg._attach.client import RemoteGang
from asyncwg._attach.connect import open_gang, until_readable
from asyncwg._attach.handle import AttachedCore
from asyncwg._attach.registry import Folder
from asyncwg._catalog import Catalog
from asyncwg._core import check_selector
from asyncwg._driver.guardian import interpreter_flags
from asyncwg._driver.launch import Spec
from asyncwg._driver.stacks import HangReport
from asyncwg._job import CallOptions
from asyncwg._modes import Mode
from asyncwg._restart import RestartPolicy
from asyncwg._transport.aio import SocketChannel
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import Kind, pack
from asyncwg._wire.sources import inline
from asyncwg.errors import InternalError, UsageError, WorkerStartError
from asyncwg.resource_pool import ResourcePool

_BOOT: Final = (
    # Twice forked, so that the host is nobody's child, and no zombie of its creator.
    "import os, sys; os.fork() and os._exit(0); del sys.path[0]; import json; "
    "sys.path[:] = json.loads(os.environ.pop('ASYNCWG_PATH')); "
    "from asyncwg._host import main; main(3, 4)"
)
_CANCEL_WAIT: Final = 15.0
"""Seconds that a host has to end a start that was cancelled."""


class Order(NamedTuple):
    """What a host is to start."""

    cls: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    modes: dict[str | None, dict[str, Mode]]
    store: list[int]
    devices: list[str] | None
    """None for CPUs."""
    colocate: int
    options: dict[str, Any]
    """Of the `WorkerGroup`."""
    directory: str
    argv: list[str]
    name: str
    keep_output: bool
    """Whether its own output goes where the creator's goes."""


class DetachedCore(AttachedCore):
    """A group that this program starts in a host process, for the event loop that starts it."""

    order: Order

    def ticket(self) -> wire.Ticket:
        """Return what another process needs to attach."""
        if self._state != "running":
            self.running()
        return super().ticket()

    async def start(self, facade: Any) -> None:
        """Start the host and attach to it.

        Raises:
            WorkerStartError: what each failed rank raised. Nothing is left.
            UsageError: the name is taken, or something can't be sent.
        """
        if self._state == "running":
            self.running()
            return
        if self._state != "new":
            raise UsageError(f"group {self.name!r} was started before: make a new one")
        self._loop = asyncio.get_running_loop()
        check_selector(self._loop)
        self._state = "starting"
        held = f"{self.name} (detached)"
        devices = self.pool.acquire(held)
        try:
            with Folder() as folder:
                order = self.order._replace(
                    directory=folder.path,
                    devices=[d for d in devices if d is not None] or None,
                )
                await _start(order, folder)
            gang = RemoteGang(self._loop, self.name, self.pool.world_size, {})
            path, _packed = await open_gang(gang, order.directory, self.name, "", None)
        except BaseException:
            self.pool.release(held)
            self._state = "closed"
            raise
        state = gang.state
        assert state is not None
        self._ticket = self._ticket._replace(
            directory=path, token=state.token, session=state.session
        )
        self.adopt(facade, gang)

    async def stop(self, grace: float) -> None:
        """End the group, and with it the host."""
        if self._state == "new":
            self._state = "closed"
            return
        await super().stop(grace)
        # Only where its end was seen: a group that goes on without us keeps its devices.
        self.pool.release(f"{self.name} (detached)")


async def _start(order: Order, folder: Folder) -> None:
    """Start a host and wait until its group runs.

    Raises:
        WorkerStartError: the ranks did not start. Nothing is left.

    Cancelling it leaves nothing either.
    """
    loop = asyncio.get_running_loop()
    payload = _payload(order)
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            pid = _spawn(order, folder, theirs.fileno(), payload)
        await _first_fork_over(loop, pid)
    except BaseException:
        ours.close()
        raise
    finally:
        os.close(payload)
    answer: asyncio.Future[Any] = loop.create_future()
    over: asyncio.Future[None] = loop.create_future()

    def deliver(_n: int, kind: int, flags: int, _a: int, _b: int, body: memoryview) -> None:
        if kind == Kind.TOLD and not answer.done():
            value = codec.decode(body)
            if flags & wire.FAILED:
                answer.set_exception(wire.unpack_error(value))
            else:
                answer.set_result(value)

    def closed(_error: BaseException | None) -> None:
        if not over.done():
            over.set_result(None)
        if not answer.done():
            answer.set_exception(_died(folder, order))

    channel = SocketChannel(loop, ours, deliver, closed)
    try:
        await answer
    except asyncio.CancelledError:
        channel.send(pack(Kind.ABANDON, 0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_WAIT):
                await asyncio.shield(over)
        raise
    except Exception:
        # It ends by itself; nothing of it is left then.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_WAIT):
                await over
        raise
    finally:
        channel.close()


def _payload(order: Order) -> int:
    """Write the order to a memory file."""
    try:
        stream, buffers = codec.encode(order)
    except Exception as error:
        culprit = codec.explain_failure(
            {"class": order.cls, "args": order.args, "kwargs": order.kwargs, **order.options},
            "the group",
        )
        raise UsageError(
            f"{order.cls.__name__} can't be sent to a host process: {culprit} can't be pickled: "
            f"{failures.text_of(error)}"
        ) from error
    fd = os.memfd_create("asyncwg-order", os.MFD_CLOEXEC)
    with open(os.dup(fd), "wb") as file:
        pickle.dump((stream, [bytes(buffer) for buffer in inline(buffers)]), file)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _spawn(order: Order, folder: Folder, sock: int, payload: int) -> int:
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    log = os.dup(1) if order.keep_output else folder.log(order.name)
    errors = os.dup(2) if order.keep_output else os.dup(log)
    # Out of the way first: a target may be the number of another source.
    high = [_high(fd) for fd in (null, log, errors, sock, payload)]
    try:
        return os.posix_spawn(
            sys.executable,
            [sys.executable, *interpreter_flags(), "-c", _BOOT, "asyncwg-host", order.name],
            {**os.environ, "ASYNCWG_PATH": json.dumps(sys.path)},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(high)],
            setsid=True,  # a terminal's Ctrl-C and its end are not the host's
        )
    finally:
        for fd in (null, log, errors, *high):
            os.close(fd)


async def _first_fork_over(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    over = loop.create_task(until_readable(loop, pidfd))
    cancelled: asyncio.CancelledError | None = None
    try:
        while not over.done():  # some milliseconds
            try:
                await asyncio.wait({over})
            except asyncio.CancelledError as error:
                cancelled = error
    finally:
        os.close(pidfd)
        _reap(pid)
    if cancelled is not None:
        raise cancelled


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # somebody else's wait took it
        os.waitpid(pid, 0)


def _high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 100)


def _died(folder: Folder, order: Order) -> Exception:
    where = "" if order.keep_output else f"; what it wrote is in {folder.log_path(order.name)}"
    return WorkerStartError(
        f"the host of group {order.name!r} ended before the group ran{where}",
        [InternalError("the host process ended without a word")],
    )


def detached_core(
    spec: Spec,
    pool: ResourcePool,
    catalogs: Mapping[str | None, Catalog],
    options: CallOptions,
    *,
    start_timeout: float | None,
    hang_after: float | None,
    on_hang: Callable[[HangReport], None] | None,
    restart: RestartPolicy | None,
) -> DetachedCore:
    """Return the inside of a group that is going to be started in a host process.

    Args:
        spec: what each rank builds, and how it is started.
        pool: where it runs.
        catalogs: what its class and each of its roles can be asked for.
        options: options of its calls.
        start_timeout: as for `WorkerGroup`.
        hang_after: likewise.
        on_hang: likewise; it is called in the host.
        restart: likewise.
    """
    info = wire.offer_of(spec, catalogs, pool.store, options.on_error, {})
    core = DetachedCore(wire.Ticket("", spec.name, "", "", info), spec, pool, catalogs, options)
    output = spec.output if isinstance(spec.output, str) else os.fspath(spec.output)
    if output not in ("prefix", "inherit"):
        output = os.path.abspath(output)
    core.order = Order(
        cls=spec.cls,
        args=spec.args,
        kwargs=dict(spec.kwargs),
        modes=info.modes,
        store=pool.store,
        devices=None,
        colocate=pool.max_colocate_count,
        options={
            "worker_env": dict(spec.worker_env),
            "start_method": spec.start_method,
            "start_timeout": start_timeout,
            "preload": spec.preload,
            "output": output,
            "error_grace": spec.error_grace,
            "on_error": options.on_error,
            "hang_after": hang_after,
            "on_hang": on_hang,
            "restart": restart,
            "arena_limit": spec.arena_limit,
            "arena_timeout": spec.arena_timeout,
        },
        directory="",
        argv=list(sys.argv),
        name=spec.name,
        keep_output=output == "inherit",
    )
    return core
