"""The process of a detached group: it starts the group, listens, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from asyncwg import _linux as linux
from asyncwg._attach import wire
from asyncwg._attach.host import Host
from asyncwg._attach.registry import Folder
from asyncwg._attach.spawn import Order
from asyncwg._transport.aio import SocketChannel
from asyncwg._wire import codec
from asyncwg._wire.frames import Buffer, Kind, pack
from asyncwg.errors import UsageError
from asyncwg.resource_pool import ResourcePool
from asyncwg.worker_group import ClassWithInitArgs, WorkerGroup


def main(sock_fd: int, order_fd: int) -> NoReturn:
    """Be the host. Called in a fresh process, with its creator at the other end of a socket."""
    for fd in (sock_fd, order_fd):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        code = runner.run(_serve(socket.socket(fileno=sock_fd), order_fd))
    sys.exit(code)


async def _serve(sock: socket.socket, order_fd: int) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def deliver(_n: int, kind: int, _f: int, _a: int, _b: int, _body: memoryview) -> None:
        if kind == Kind.ABANDON:
            task.cancel()

    # When the creator is gone without a word, the group is started all the same.
    creator = SocketChannel(loop, sock, deliver, lambda _error: None)
    order: Order | None = None
    try:
        order = _read_order(order_fd)
        linux.set_name(f"{order.name[:10]}:host")
        group, host = _build(order)
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        await group.__aenter__()
    except asyncio.CancelledError:
        return 1
    except Exception as error:  # noqa: BLE001  # border: the creator is told
        _tell(
            sock, pack(Kind.TOLD, 0, codec.encode(wire.pack_error(error)).stream, flags=wire.FAILED)
        )
        if order is not None:
            _drop_log(order)
        return 1
    creator.send(pack(Kind.TOLD, 0, codec.encode(None).stream))
    assert host.ended is not None
    broken = False
    try:
        await asyncio.shield(host.ended)
        broken = group.state == "broken"
    except asyncio.CancelledError:
        pass  # SIGTERM
    try:
        await group.shutdown()
    except Exception as error:  # noqa: BLE001  # told to who asked for the end, and to the log
        sys.stderr.write(f"{error!r}\n")
    if not broken:  # else it says what happened
        _drop_log(order)
    return 0


def _tell(sock: socket.socket, pieces: Sequence[Buffer]) -> None:
    """Tell the creator the last thing, whatever its size."""
    with contextlib.suppress(OSError):  # it is gone
        sock.setblocking(True)
        sock.sendall(b"".join(pieces))


def _drop_log(order: Order) -> None:
    with Folder(order.directory) as folder:
        folder.drop_log(order.name)


def _read_order(fd: int) -> Order:
    with open(fd, "rb") as file:
        stream, buffers = pickle.load(file)  # from our creator
    try:
        order: Order = codec.decode(stream, [bytearray(buffer) for buffer in buffers])
    except BaseException as error:
        raise UsageError(
            f"the worker's class or its arguments can't be unpickled in the host process: "
            f"{type(error).__name__}: {error}"
        ) from error
    sys.argv[:] = order.argv
    return order


def _build(order: Order) -> tuple[WorkerGroup, Host]:
    pool = ResourcePool(
        order.store,
        order.colocate,
        use_gpu=order.devices is not None,
        devices=order.devices,
    )
    cls: Any = ClassWithInitArgs(order.cls, *order.args, **order.kwargs)
    group = WorkerGroup(pool, cls, name=order.name, **order.options)
    core = group._core  # noqa: SLF001  # its own package's
    for role, modes in order.modes.items():
        core.catalogs[role].modes.update(modes)
    host = core.host = Host(core, order.directory)
    host.own_process = True
    return group, host


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
