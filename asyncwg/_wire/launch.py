"""What the controller, the guardian and a newborn worker tell each other."""

from __future__ import annotations

import json
import signal
import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict

from asyncwg.decorator import Address

SESSION_VARIABLE: Final = "ASYNCWG_SESSION"
"""Names the group's session in the environment of all that a worker starts."""
GUARDIAN_VARIABLE: Final = "ASYNCWG_GUARDIAN"
"""Names the guardian in its own environment, and so in what ``/proc`` tells of its forks."""
MAX_MESSAGE: Final = 128 * 1024
"""Bytes; a message of the guardian's sockets is a small JSON object."""
MAX_DESCRIPTORS: Final = 16
STACKS_SIGNAL: Final = signal.SIGRTMAX - 3
"""Makes a worker write its Python stacks; a real-time signal that nobody uses for anything."""


class BootRecord(TypedDict):
    """What a rank is told before anything else. Travels as JSON in a memory file."""

    env: dict[str, str]
    sys_path: list[str]
    argv: list[str]
    cwd: str
    group: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    threads: int | None
    """Threads for torch, or None where the user has set the number."""
    preload: list[str]
    arena_size: int


class Init(NamedTuple):
    """What a rank builds, and how calls name what it has built."""

    cls: type
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    roles: Sequence[str]
    """Of the objects that a colocated class builds."""
    addresses: Sequence[Address]
    """Of the registered methods, by number."""
    limits: Mapping[int, int]
    """How many calls of an ``async def`` method may run at once, by the method's number."""
    to_device: Sequence[int]
    """Numbers of the methods whose tensors are placed on the rank's device."""


class Descriptors(TypedDict):
    """Descriptors that a worker is born with."""

    boot: int
    control: int
    compute: int
    stdout: int
    stderr: int
    arena: int
    stacks: int
    lane: int | None
    """The async lane's, if there is one."""


def mark_of(session: str) -> int:
    """Return the number by which the kernel knows all that a session has started."""
    return 1 << 40 | zlib.crc32(session.encode())  # no limit that anybody would set


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message with descriptors."""
    data = json.dumps(message).encode()
    if fds:
        socket.send_fds(sock, [data], list(fds))
    else:
        sock.send(data)


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one message; None at the end of the stream."""
    try:
        data, fds, _flags, _address = socket.recv_fds(sock, MAX_MESSAGE, MAX_DESCRIPTORS)
    except (ConnectionResetError, BrokenPipeError):
        return None
    return (json.loads(data), fds) if data else None
