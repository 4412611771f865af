"""Frames: how messages stand in a byte stream.

A frame is a header of 24 bytes and a body. The body is a table of buffer sizes, one pickle
stream, and the out-of-band buffers of that stream, each starting at a multiple of `ALIGNMENT`::

    | body size u64 | call id u64 | kind u8 | flags u8 | aux u16 | buffers u32 |
    | sizes: buffers x u64 | stream | padding | buffer 0 | padding | buffer 1 | ...

With the flag `ARENA` the buffers stand in blocks of the arena instead, and the body is::

    | blocks u64 | blocks x (offset u64, size u64) | buffers x (size, block, place: u64) | stream

where a place is counted from the start of its block. Sizes are 64-bit, so one message may be larger
than 4 GiB.
"""

from __future__ import annotations

import enum
import mmap
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from asyncwg.errors import InternalError

Buffer = bytes | bytearray | memoryview

HEADER: Final = struct.Struct("<QQBBHI")
HEADER_SIZE: Final = HEADER.size
ALIGNMENT: Final = 16
"""Bytes. What malloc gives and what the widest dtype (complex128) needs."""
READ_SIZE: Final = 256 * 1024
"""Bytes asked of the kernel at a time: a little more than a socket's default buffer holds."""
_JOIN_BELOW: Final = 64 * 1024
"""Bytes. A smaller frame is made one piece."""
MMAP_FROM: Final = 1 << 20
"""Bytes. A larger body is an anonymous map, which is not filled with zeros by the processor first."""
MAX_BODY: Final = 1 << 48
"""Bytes. A header that claims more is broken: it is more than the address space holds."""
NO_METHOD: Final = 0xFFFF
"""``aux`` of a call whose method has no number; its name is among the extras, or it is a function.

``NO_METHOD - i`` is such a call to the i-th role, counted from 1."""
UNNUMBERED: Final = 0xFF00
"""From here on ``aux`` is no method's number."""


class Kind(enum.IntEnum):
    """What a frame asks or answers."""

    INIT = 1
    """Driver: build the object. Worker: READY or ERROR."""
    CALL = 2
    RUN = 3
    """Call a function with the worker object as its first argument."""
    STOP = 4
    """Finish, run ``close()``, answer STOPPED."""
    EXIT = 5
    READY = 6
    RESULT = 7
    ERROR = 8
    STOPPED = 9
    MESHES = 10
    """Worker: the meshes it has registered, ahead of the answer that follows."""
    PING = 11
    """Driver, on the control lane: PONG, please; with ``aux`` 1 and the main thread's Python stack in it."""
    PONG = 12
    HOLD = 13
    """Driver, on the control lane: don't start this call. Worker: HELD or STARTED."""
    HELD = 14
    STARTED = 15
    DROP = 16
    RESUME = 17
    CANCEL = 18
    OFFER = 19
    """Worker: a large result is ready; where is it to stand? The stream holds the sizes of its buffers."""
    GRANT = 20
    """Driver, on the control lane: there; or nowhere, and why."""
    RELEASE = 21
    """Worker: pairs of a block's offset and how often it was received, now let go."""
    OWN = 22
    """Driver, on the control lane: make these blocks your own and let go of them."""
    EXPIRED = 23
    """Worker: the deadline of the call has passed, and its body was cancelled."""
    ITEM = 24
    """Worker: what a generator has yielded; RESULT or ERROR follows when it ends."""
    PULL = 25
    """Driver, on the control lane: an item of this call was taken; one more may come."""
    ROUTE = 26
    """Attached program: what the calls of one kind have in common, under a number."""
    RELAY = 27
    """Attached program: a call, as the frames that the ranks are to get."""
    ABANDON = 28
    """Attached program: nobody waits for this call any more."""
    WANT = 29
    """Attached program: places for arguments of these sizes, please. Host: GRANT."""
    UNWANT = 30
    FAILED = 31
    """Host: the call has ended otherwise than by the answers of its ranks."""
    STATE = 32
    """Host: how the group is now."""
    ASK = 33
    """A request by name. The other side: TOLD, with the same number."""
    TOLD = 34


KINDS: Final = frozenset(int(kind) for kind in Kind)

NONE: Final = 1
"""Flag of a RESULT: the value is None and the body is empty. Of a CALL: no arguments."""
EXTRAS: Final = 2
"""Flag of a CALL: the stream holds ``(args, kwargs, extras)``, else ``(args, kwargs)``."""

ARENA: Final = 4
"""Flag of a CALL, RUN or RESULT: its buffers stand in the arena."""

STREAM: Final = 8
"""Flag of a CALL or RUN: the method is a generator, and what it yields is sent as ITEMs."""

BESIDE: Final = 16
"""Flag of an OFFER: the method has returned, and its lane takes the next call before this is answered."""

ITEMS: Final = struct.Struct("<Q")
"""Body of STARTED: how many items of a generator have been begun. Of CANCEL: at which one it is to end."""
STREAM_WINDOW: Final = 2
"""Items of a generator that may be on their way, or wait for their reader, per rank: one is read while
the next one is made."""

Deliver = Callable[[int, int, int, int, int, memoryview], None]
"""Takes ``(call_id, kind, flags, aux, n_buffers, body)``. The body is valid until it returns,
and for good when ``n_buffers`` is not 0."""


class FrameError(InternalError):
    """The bytes are not a frame. The stream can't be read on from there."""


def _aligned(offset: int) -> int:
    return (offset + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def pack(
    kind: int,
    call_id: int,
    stream: Buffer = b"",
    buffers: Sequence[Buffer] = (),
    *,
    flags: int = 0,
    aux: int = 0,
) -> list[Buffer]:
    """Return the pieces of one frame, in order; large ones are not copied."""
    if not buffers:
        header = HEADER.pack(len(stream), call_id, kind, flags, aux, 0)
        return [header + stream] if len(stream) < READ_SIZE else [header, stream]
    sizes = [len(buffer) for buffer in buffers]
    table = struct.pack(f"<{len(sizes)}Q", *sizes)
    pieces: list[Buffer] = [b"", stream]
    offset = len(table) + len(stream)
    for buffer, size in zip(buffers, sizes, strict=True):
        start = _aligned(offset)
        if start != offset:
            pieces.append(bytes(start - offset))
        pieces.append(buffer)
        offset = start + size
    pieces[0] = HEADER.pack(offset, call_id, kind, flags, aux, len(sizes)) + table
    # One piece is sent by a cheaper call than several, and to several ranks.
    return [b"".join(pieces)] if offset < _JOIN_BELOW else pieces


class Placed(NamedTuple):
    """Where in the arena the buffers of a frame stand."""

    blocks: Sequence[tuple[int, int]]
    """Offset in the arena, and size, of each block."""
    buffers: Sequence[tuple[int, int, int]]
    """Of each buffer: its size, the number of its block, and its place from the block's start."""


def pack_placed(
    kind: int, call_id: int, stream: Buffer, placed: Placed, *, flags: int = 0, aux: int = 0
) -> list[Buffer]:
    """Return the pieces of a frame whose buffers stand in the arena."""
    blocks, buffers = placed
    numbers = [number for entry in (*blocks, *buffers) for number in entry]
    table = struct.pack(f"<{1 + len(numbers)}Q", len(blocks), *numbers)
    size = len(table) + len(stream)
    header = HEADER.pack(size, call_id, kind, flags | ARENA, aux, len(buffers))
    return [header + table + stream] if len(stream) < READ_SIZE else [header + table, stream]


def unpack_placed(body: memoryview, n_buffers: int) -> tuple[memoryview, Placed]:
    """Cut the body of a frame with the flag `ARENA` into its stream and where its buffers stand.

    Raises:
        FrameError: the table is longer than the body, or a buffer lies outside of its block.
    """
    if len(body) < 8:  # one number
        raise FrameError(f"no table in a body of {len(body)} bytes")
    (n_blocks,) = struct.unpack_from("<Q", body)
    start = 8 * (1 + 2 * n_blocks + 3 * n_buffers)
    if start > len(body):
        raise FrameError(f"a table of {n_buffers} buffers does not fit a body of {len(body)} bytes")
    numbers = struct.unpack_from(f"<{2 * n_blocks + 3 * n_buffers}Q", body, 8)
    blocks = list(zip(numbers[0 : 2 * n_blocks : 2], numbers[1 : 2 * n_blocks : 2], strict=True))
    rest = numbers[2 * n_blocks :]
    buffers = list(zip(rest[::3], rest[1::3], rest[2::3], strict=True))
    for size, block, place in buffers:
        if block >= n_blocks or place + size > blocks[block][1]:
            raise FrameError("a buffer reaches out of its block")
    return body[start:], Placed(blocks, buffers)


def size_of(pieces: Sequence[Buffer]) -> int:
    """Return the number of bytes in ``pieces``."""
    return sum(len(piece) for piece in pieces)


def unpack(body: memoryview, n_buffers: int) -> tuple[memoryview, list[memoryview]]:
    """Cut a body into its stream and its buffers, without a copy.

    Raises:
        FrameError: the sizes don't add up.
    """
    if not n_buffers:
        return body, []
    table_size = 8 * n_buffers
    sizes = struct.unpack_from(f"<{n_buffers}Q", body)
    # The first buffer is aligned, so its start follows from the end: the buffers fill the rest.
    total = 0
    for size in sizes:
        total = _aligned(total) + size
    offset = len(body) - total
    if offset < table_size or offset % ALIGNMENT:
        raise FrameError(f"buffers of {total} bytes don't fit a body of {len(body)}")
    # What pads the stream stands behind its STOP opcode, where nobody reads.
    stream = body[table_size:offset]
    buffers: list[memoryview] = []
    for size in sizes:
        offset = _aligned(offset)
        buffers.append(body[offset : offset + size])
        offset += size
    return stream, buffers


def allocate(size: int) -> memoryview:
    """Return writable memory for a body of ``size`` bytes.

    Raises:
        FrameError: there is not so much.
    """
    if size < MMAP_FROM:
        return memoryview(bytearray(size))
    try:
        return memoryview(mmap.mmap(-1, size))
    except OSError as error:
        raise FrameError(f"no memory for a frame of {size} bytes: {error}") from error


class Assembler:
    """Cuts a byte stream into frames. One reader owns it.

    ``room()`` says where the next bytes go; after they are there, ``advance(n, deliver)`` hands
    out every frame that is complete. A large body is read straight into its own memory.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(READ_SIZE))
        self._end = 0
        self._body: memoryview | None = None
        self._filled = 0
        self._header: tuple[int, ...] = ()
        self.rest = 0
        """Bytes that have come behind the frame that is being delivered."""

    def room(self) -> memoryview:
        """Where to put the next bytes; never empty."""
        if self._body is not None:
            return self._body[self._filled :]
        return self._memory[self._end :] if self._end else self._memory

    @property
    def idle(self) -> bool:
        """Whether no part of a frame is waiting for its rest."""
        return self._body is None and self._end == 0

    def advance(self, count: int, deliver: Deliver) -> None:
        """Take note of ``count`` new bytes and deliver the frames they complete.

        Raises:
            FrameError: a header is not one. Nothing more can be read.
        """
        if self._body is not None:
            self._filled += count
            if self._filled < len(self._body):
                return
            body, self._body = self._body, None
            self.rest = 0
            call_id, kind, flags, aux, n_buffers = self._header
            deliver(call_id, kind, flags, aux, n_buffers, body)
            return
        memory, end, start = self._memory, self._end + count, 0
        # A deliver that raises must not make the same bytes come twice.
        self._end = 0
        while end - start >= HEADER_SIZE:
            size, call_id, kind, flags, aux, n_buffers = HEADER.unpack_from(memory, start)
            if kind not in KINDS or size > MAX_BODY or 8 * n_buffers > size:
                raise FrameError(f"not a frame: kind {kind}, {size} bytes, {n_buffers} buffers")
            body_start = start + HEADER_SIZE
            stop = body_start + size
            if stop > end:
                if HEADER_SIZE + size > READ_SIZE or n_buffers:
                    self._header = (call_id, kind, flags, aux, n_buffers)
                    self._body = allocate(size)
                    self._filled = end - body_start
                    self._body[: self._filled] = memory[body_start:end]
                    return
                break
            self.rest = end - stop
            if n_buffers:
                owned = allocate(size)
                owned[:] = memory[body_start:stop]
                deliver(call_id, kind, flags, aux, n_buffers, owned)
            else:
                deliver(call_id, kind, flags, aux, n_buffers, memory[body_start:stop])
            start = stop
        if start != end and start:
            memory[: end - start] = bytes(memory[start:end])
        self._end = end - start
