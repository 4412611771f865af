"""From the name of a group to the way to its host."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Final

from asyncwg._attach import wire
from asyncwg._attach.client import RemoteGang
from asyncwg._attach.registry import Folder, peer_of
from asyncwg.errors import CallTimeoutError, GroupClosedError, UsageError

TIMEOUT: Final = 30.0
"""Seconds that a host has to answer; it also waits for a group that is being started."""


async def open_gang(
    gang: RemoteGang, directory: str | None, name: str, token: str, timeout: float | None
) -> tuple[str, Any]:
    """Find the host of a group and attach to it.

    Args:
        gang: gets the way to it.
        directory: where sockets are; None for the user's own folder.
        name: of the group.
        token: of the very host that is meant; "" for any.
        timeout: seconds that the host has to answer; None for no limit.

    Returns:
        The folder, and the group's offer, packed.

    Raises:
        UsageError: there is no such group, or it can't be reached safely.
        GroupClosedError: there was, and it has ended.
        CallTimeoutError: the host does not answer.
    """
    loop = asyncio.get_running_loop()
    with Folder(directory) as folder:
        path = folder.path
        sock = folder.connect(name)
    if sock is None:
        if token:
            raise GroupClosedError(f"group {name!r} has ended: nobody listens for it any more")
        raise UsageError(
            f"there is no group {name!r} to attach to in {path}: 'python -m asyncwg list' shows those "
            "that there are"
        )
    opened = False
    try:
        async with asyncio.timeout(timeout):
            arena_fd = await greeting(loop, sock, name)
            gang.open(sock, arena_fd, peer_of(sock).pid)
            opened = True
            state, packed = await gang.ask("attach")
        if token and state.token != token:
            raise GroupClosedError(f"group {name!r} has ended, and another one has its name now")
    except TimeoutError:
        error = CallTimeoutError(f"the host of group {name!r} has not answered within {timeout} s")
        _drop(gang, sock, opened, error)
        raise error from None
    except BaseException as error:
        _drop(gang, sock, opened, error)
        raise
    gang.take(state)
    return path, packed


async def until_readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    """Wait until there is something to read, or until a process has ended, for its pidfd."""
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)


async def greeting(loop: asyncio.AbstractEventLoop, sock: socket.socket, name: str) -> int:
    """Wait for the host's greeting and return the descriptor of its arena.

    Raises:
        UsageError: it is another version's.
        GroupClosedError: the host has gone.
    """
    await until_readable(loop, sock.fileno())
    try:
        data, fds, _flags, _address = socket.recv_fds(sock, len(wire.VERSION), 1)
    except ConnectionResetError:
        data, fds = b"", []
    if data == wire.VERSION and len(fds) == 1:
        return fds[0]
    for fd in fds:
        os.close(fd)
    if not data:
        raise GroupClosedError(f"the host of group {name!r} has gone, or refuses this user")
    raise UsageError(f"group {name!r} is hosted by another version of asyncwg")


def _drop(gang: RemoteGang, sock: socket.socket, opened: bool, error: BaseException) -> None:
    if opened:
        if isinstance(error, Exception):
            gang.fail_to_open(error)
        gang.close()
    else:
        sock.close()
