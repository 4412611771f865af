"""Frames: 64-bit sizes, a stream cut anywhere, and bytes that are no frames."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncwg._wire import frames
from asyncwg._wire.frames import (
    ALIGNMENT,
    HEADER,
    HEADER_SIZE,
    KINDS,
    MAX_BODY,
    READ_SIZE,
    Assembler,
    Buffer,
    FrameError,
    Kind,
    pack,
    size_of,
    unpack,
)
from asyncwg.errors import InternalError


class Frame(NamedTuple):
    """One delivered frame, copied."""

    call_id: int
    kind: int
    flags: int
    aux: int
    stream: bytes
    buffers: list[bytes]


class Collector:
    """Takes frames as a lane does, and keeps copies."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.assembler = Assembler()

    def deliver(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        stream, buffers = unpack(body, n_buffers)
        self.frames.append(
            Frame(call_id, kind, flags, aux, bytes(stream), [bytes(each) for each in buffers])
        )

    def feed(self, data: bytes, chunk: int | None = None) -> None:
        """Put ``data`` in as a reader would, at most ``chunk`` bytes at a time."""
        feed(self.assembler, data, self.deliver, chunk)


def feed(
    assembler: Assembler, data: bytes, deliver: frames.Deliver, chunk: int | None = None
) -> None:
    view = memoryview(data)
    while view:
        room = assembler.room()
        assert len(room) > 0
        count = min(len(view), len(room), chunk or len(view))
        room[:count] = view[:count]
        view = view[count:]
        assembler.advance(count, deliver)


def joined(pieces: Iterable[Buffer]) -> bytes:
    return b"".join(pieces)


class Sized:
    """As long as it says, without the memory: `pack` asks for nothing but the length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize("size", [2**31, 2**32, 2**33 + 1])
def test_the_header_of_a_frame_beyond_2_gib_keeps_its_size(size: int) -> None:
    """A signed 32-bit length killed the feeder thread: https://github.com/joblib/loky/issues/143."""
    header, _stream = pack(Kind.CALL, 1, Sized(size))  # type: ignore[arg-type]
    assert HEADER.unpack(header)[0] == size


@pytest.mark.parametrize("size", [2**31, 2**32, 2**33 + 1])
def test_the_table_of_a_frame_keeps_the_size_of_a_buffer_beyond_2_gib(size: int) -> None:
    """https://github.com/joblib/loky/issues/143."""
    pieces = pack(Kind.CALL, 1, b"stream", [Sized(size)])  # type: ignore[list-item]
    head = bytes(pieces[0])
    body_size, _, _, _, _, count = HEADER.unpack_from(head)
    assert struct.unpack_from(f"<{count}Q", head, HEADER_SIZE) == (size,)
    assert body_size == size_of(pieces) - HEADER_SIZE


def test_a_header_may_claim_more_than_4_gib_without_being_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def allocate(size: int) -> memoryview:
        asked.append(size)
        return memoryview(bytearray(64))

    monkeypatch.setattr(frames, "allocate", allocate)
    Collector().feed(HEADER.pack(2**33 + 1, 1, Kind.CALL, 0, 0, 0))
    assert asked == [2**33 + 1]


def test_a_large_piece_is_not_copied_into_a_frame() -> None:
    stream, buffer = b"x" * READ_SIZE, bytearray(100_000)
    assert any(piece is buffer for piece in pack(Kind.CALL, 1, b"s", [buffer]))
    assert any(piece is stream for piece in pack(Kind.CALL, 1, stream))


def test_every_buffer_starts_aligned_in_memory_of_its_own() -> None:
    sizes = [1, 17, 0, 4096, 3]
    body = joined(pack(Kind.CALL, 1, b"stream", [bytes(size) for size in sizes]))[HEADER_SIZE:]
    view = memoryview(body)
    _, buffers = unpack(view, len(sizes))
    starts = [len(body) - len(view[_offset(view, each) :]) for each in buffers if len(each)]
    assert [start % ALIGNMENT for start in starts] == [0] * len(starts)


def _offset(whole: memoryview, part: memoryview) -> int:
    import numpy as np

    return int(
        np.frombuffer(part, np.uint8).ctypes.data - np.frombuffer(whole, np.uint8).ctypes.data
    )


def test_a_body_with_buffers_stays_valid_after_its_delivery() -> None:
    """Tensors are views of it."""
    bodies: list[memoryview] = []
    data = joined(pack(Kind.CALL, 1, b"s", [b"a" * 100])) + joined(pack(Kind.CALL, 2, b"t" * 300))
    feed(Assembler(), data, lambda *frame: bodies.append(frame[-1]), 64)
    assert bytes(unpack(bodies[0], 1)[1][0]) == b"a" * 100


def test_a_body_with_buffers_is_writable() -> None:
    seen: list[bool] = []
    data = joined(pack(Kind.CALL, 1, b"s", [b"a" * 100]))
    assembler = Assembler()
    assembler.room()[: len(data)] = data
    assembler.advance(len(data), lambda *frame: seen.append(frame[-1].readonly))
    assert seen == [False]


def test_an_assembler_is_idle_between_frames_only() -> None:
    data = joined(pack(Kind.CALL, 1, b"stream"))
    collector = Collector()
    collector.feed(data[:10])
    assert not collector.assembler.idle
    collector.feed(data[10:])
    assert collector.assembler.idle


def test_what_a_deliver_raises_does_not_bring_the_same_frame_twice() -> None:
    data = joined(pack(Kind.CALL, 1, b"one"))
    assembler, seen = Assembler(), list[int]()

    def deliver(call_id: int, *_rest: object) -> None:
        seen.append(call_id)
        raise ValueError

    assembler.room()[: len(data)] = data
    with pytest.raises(ValueError):  # noqa: PT011  # raised here
        assembler.advance(len(data), deliver)
    assembler.room()[: len(data)] = data
    with pytest.raises(ValueError):  # noqa: PT011  # raised here
        assembler.advance(len(data), deliver)
    assert seen == [1, 1]


blobs = st.binary(max_size=400) | st.builds(
    lambda size, fill: bytes([fill]) * size,
    st.sampled_from([READ_SIZE - HEADER_SIZE, READ_SIZE, READ_SIZE + 1]),
    st.integers(0, 255),
)
one_frame = st.builds(
    Frame,
    call_id=st.integers(0, 2**64 - 1),
    kind=st.sampled_from(sorted(KINDS)),
    flags=st.integers(0, 3),
    aux=st.integers(0, 0xFFFF),
    stream=blobs,
    buffers=st.lists(blobs, max_size=4),
)


def written(frame: Frame) -> bytes:
    return joined(
        pack(
            frame.kind,
            frame.call_id,
            frame.stream,
            frame.buffers,
            flags=frame.flags,
            aux=frame.aux,
        )
    )


def told(found: Sequence[Frame]) -> list[Frame]:
    """Without what pads a stream in front of buffers: it stands where no pickle is read."""
    return [
        each._replace(stream=each.stream.rstrip(b"\0")) if each.buffers else each for each in found
    ]


@given(st.lists(one_frame, max_size=6), st.sampled_from([1, 7, 23, 24, 25, 4096, None]))
def test_a_stream_cut_anywhere_gives_the_same_frames_in_order(
    sent: list[Frame], chunk: int | None
) -> None:
    data = b"".join(map(written, sent))
    if chunk is not None:
        chunk = max(chunk, len(data) // 2000)  # a byte at a time is for short streams
    collector = Collector()
    collector.feed(data, chunk)
    assert told(collector.frames) == told(sent)
    assert collector.assembler.idle


@given(st.data())
def test_a_stream_cut_at_uneven_places_gives_the_same_frames_in_order(data: st.DataObject) -> None:
    sent = data.draw(st.lists(one_frame, min_size=1, max_size=4))
    stream = b"".join(map(written, sent))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=20)))
    collector = Collector()
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        collector.feed(stream[start:stop])
    assert told(collector.frames) == told(sent)


def _feed_until_refused(data: bytes) -> Collector:
    """Feed bytes that may be no frames. A `FrameError` is an answer; so is waiting for the rest."""
    collector = Collector()
    try:
        collector.feed(data)
    except FrameError:
        pass
    return collector


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_refused_or_waited_for(data: bytes) -> None:
    _feed_until_refused(data)


@given(st.data())
def test_a_flipped_bit_gives_a_frame_error_or_frames_of_a_known_kind(data: st.DataObject) -> None:
    stream = bytearray(
        b"".join(
            map(
                written,
                data.draw(
                    st.lists(
                        st.builds(
                            Frame,
                            st.integers(0, 99),
                            st.sampled_from(sorted(KINDS)),
                            st.just(0),
                            st.just(0),
                            st.binary(max_size=60),
                            st.lists(st.binary(max_size=60), max_size=3),
                        ),
                        min_size=1,
                        max_size=3,
                    )
                ),
            )
        )
    )
    position = data.draw(st.integers(0, 8 * len(stream) - 1))
    stream[position // 8] ^= 1 << position % 8
    collector = _feed_until_refused(bytes(stream))
    assert {frame.kind for frame in collector.frames} <= KINDS


@pytest.mark.parametrize(
    "header",
    [
        pytest.param((0, 1, 0, 0, 0, 0), id="kind-0"),
        pytest.param((0, 1, 255, 0, 0, 0), id="kind-255"),
        pytest.param((MAX_BODY + 1, 1, Kind.CALL, 0, 0, 0), id="more-than-memory"),
        pytest.param((2**64 - 1, 1, Kind.CALL, 0, 0, 0), id="minus-one"),
        pytest.param((15, 1, Kind.CALL, 0, 0, 2), id="table-larger-than-body"),
    ],
)
def test_a_header_that_is_none_is_refused_at_once(header: tuple[int, ...]) -> None:
    with pytest.raises(FrameError, match="not a frame"):
        Collector().feed(HEADER.pack(*header))


def test_a_header_that_claims_more_than_there_is_memory_is_a_frame_error() -> None:
    with pytest.raises(FrameError, match="memory"):
        Collector().feed(HEADER.pack(MAX_BODY, 1, Kind.CALL, 0, 0, 0))


@pytest.mark.parametrize("sizes", [(100,), (2**63,), (2**64 - 1, 2**64 - 1), (8, 2**40)])
def test_sizes_that_do_not_add_up_to_the_body_are_a_frame_error(sizes: tuple[int, ...]) -> None:
    body = struct.pack(f"<{len(sizes)}Q", *sizes) + bytes(40)
    with pytest.raises(FrameError, match="don't fit"):
        unpack(memoryview(body), len(sizes))


def test_a_frame_error_asks_to_be_reported() -> None:
    """Only asyncwg's own processes write to its sockets."""
    assert issubclass(FrameError, InternalError)
