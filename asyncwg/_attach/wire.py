"""What a program that attaches and the host of a group tell each other.

A `Kind.RELAY` frame carries a call as the frames that ranks will get, but for the call's number in each.
Its ``aux`` is the number of a route, which says what all calls of a kind have in common. With `SEVERAL` the
body is::

    | positions u32 | frames u32 | positions x frame number u32 | frames x size u64 | frame 0 | frame 1 ...

and without it one frame, for all positions.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncwg._catalog import Catalog, roles_of
from asyncwg._driver.launch import Spec
from asyncwg._modes import Mode
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import HEADER, HEADER_SIZE, Buffer, FrameError, size_of
from asyncwg._wire.sources import inline
from asyncwg.decorator import ROLES, Address
from asyncwg.errors import WorkerGroupError, WorkerStartError

VERSION: Final = b"\x01"
"""The host's greeting, which carries the arena's descriptor."""
SEVERAL: Final = 1
"""Flag of a RELAY: ranks get different frames."""
FAILED: Final = 2
"""Flag of a TOLD: the body is a `Failure`."""
ITS_OWN: Final = 4
"""Flag of a FAILED: the error is what the ranks have raised so far, and the body only adds notes."""
_HEAD: Final = struct.Struct("<II")
_put_number: Final = struct.Struct("<Q").pack_into
_unpack_header: Final = HEADER.unpack_from
_CALL_ID_AT: Final = 8
"""Where a frame's header has the number of the call."""


class Route(NamedTuple):
    """What all calls of a kind have in common."""

    label: str
    ranks: tuple[int, ...]
    lane: int
    single: bool
    on_error: str
    joins: tuple[int, ...]


class Info(NamedTuple):
    """What a group offers: all that dispatch needs. The same for its life."""

    cls: type
    roles: dict[str, type]
    """Of a colocated class."""
    addresses: list[Address]
    """Methods by number."""
    modes: dict[str | None, dict[str, Mode]]
    """By role, and the name of the proxy."""
    store: list[int]
    """Ranks on each node."""
    has_async: bool
    on_error: str
    meshes: dict[Any, Any]
    """By role, and the mesh's name, as far as they were known."""


class Ticket(NamedTuple):
    """What another process needs to attach."""

    directory: str
    name: str
    token: str
    """Of the host: another group may have the name later."""
    session: str
    """Of the generation that ran when the ticket was made."""
    info: Info


class State(NamedTuple):
    """How a group is now. Plain values."""

    state: str
    pid: int
    """The host's."""
    own_process: bool
    """Whether that process is there for the group alone."""
    token: str
    session: str
    pids: list[int]
    port: int
    limit: int
    """Bytes of large arguments beyond which calls wait."""
    meshes: dict[Any, Any]
    broken: failures.Failure | None


Packed = tuple[Any, bytes, Sequence[bytes]]
"""An offer in plain values, and the bytes of what is the user's: the class and its modes."""


def pack_info(info: Info) -> Packed:
    """Return a group's offer as bytes, to be kept and sent to many."""
    stream, buffers = codec.encode((info.cls, info.roles, info.modes))
    plain = info._replace(cls=object, roles={}, modes={})
    return tuple(plain), stream, [bytes(buffer) for buffer in inline(buffers)]


def unpack_info(packed: Packed, cls: type | None = None) -> Info:
    """Undo `pack_info`. Runs the user's unpickling, but where the caller has the class."""
    plain, stream, buffers = packed
    info = Info(*plain)
    if cls is not None:
        roles = {role: built.cls for role, built in roles_of(cls).items()}
        return info._replace(cls=cls, roles=roles)
    known, roles, modes = codec.decode(stream, [bytearray(buffer) for buffer in buffers])
    return info._replace(cls=known, roles=roles, modes=modes)


def offer_of(
    spec: Spec,
    catalogs: Mapping[str | None, Catalog],
    store: list[int],
    on_error: str,
    meshes: dict[Any, Any],
) -> Info:
    """Return what a group offers."""
    cls = spec.cls
    if ROLES in vars(cls):
        # Made by `create_colocated_worker_cls`: it has the arguments of its roles, which stay at home.
        cls = type(cls.__name__, cls.__bases__, {"__doc__": cls.__doc__, "__module__": "asyncwg"})
    return Info(
        cls,
        {role: built.cls for role, built in spec.roles.items()},
        list(spec.addresses),
        {role: dict(catalog.modes) for role, catalog in catalogs.items()},
        store,
        spec.has_async,
        on_error,
        meshes,
    )


def relay_body(frames: Sequence[Sequence[Buffer]], index: Sequence[int] | None) -> list[Buffer]:
    """Return the body of a RELAY, in pieces."""
    if index is None:
        return list(frames[0])
    sizes = [size_of(frame) for frame in frames]
    head = _HEAD.pack(len(index), len(frames))
    table = struct.pack(f"<{len(index)}I{len(sizes)}Q", *index, *sizes)
    return [head + table, *(piece for frame in frames for piece in frame)]


def relayed(body: memoryview, call_id: int) -> tuple[list[memoryview], Sequence[int], int]:
    """Cut the body of a RELAY with `SEVERAL` into frames, and put the host's number on each.

    Returns:
        The frames; by position, the number of its frame; and the flags that any of the frames has.

    Raises:
        FrameError: the sizes don't add up.
    """
    try:
        n_positions, n_frames = _HEAD.unpack_from(body)
        layout = f"<{n_positions}I{n_frames}Q"
        numbers = struct.unpack_from(layout, body, _HEAD.size)
    except struct.error as error:
        raise FrameError(f"no table of frames in {len(body)} bytes") from error
    start = _HEAD.size + struct.calcsize(layout)
    frames: list[memoryview] = []
    kinds = 0
    for size in numbers[n_positions:]:
        frames.append(body[start : start + size])
        kinds |= readdress(frames[-1], call_id)
        start += size
    index = numbers[:n_positions]
    if start != len(body) or any(number >= n_frames for number in index):
        raise FrameError(f"{n_frames} frames don't fit a body of {len(body)} bytes")
    return frames, index, kinds


def readdress(frame: memoryview, call_id: int) -> int:
    """Put another number on a frame, and return its flags.

    Raises:
        FrameError: it is not one frame.
    """
    room = len(frame) - HEADER_SIZE
    size: int = -1
    flags: int = 0
    if room >= 0:
        size, _, _, flags, _, _ = _unpack_header(frame)
    if size != room:
        raise FrameError(f"a frame of {size} bytes does not fit {len(frame)}")
    _put_number(frame, _CALL_ID_AT, call_id)
    return flags


def pack_error(error: BaseException) -> tuple[str, list[failures.Failure]]:
    """Take an exception apart so that it arrives in another controller as it was."""
    if isinstance(error, WorkerGroupError):
        parts = [failures.capture(each) for each in error.exceptions]
        return f"{type(error).__name__}:{error.message}", parts
    return "", [failures.capture(error)]


def unpack_error(packed: tuple[str, Sequence[failures.Failure]]) -> Exception:
    """Undo `pack_error`. Runs the user's unpickling."""
    text, parts = packed
    if not text:
        return failures.relay(parts[0])
    name, _, message = text.partition(":")
    kind = WorkerStartError if name == WorkerStartError.__name__ else WorkerGroupError
    return kind(message, [failures.relay(each) for each in parts])
