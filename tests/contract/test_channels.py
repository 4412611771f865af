"""Every channel keeps the contract C-1 to C-4 of ``_transport.base``, on both kinds of loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, NamedTuple

import pytest
import pytest_asyncio

from asyncwg._transport.aio import IOV_MAX, SocketChannel
from asyncwg._transport.base import Channel
from asyncwg._transport.blocking import BlockingChannel
from asyncwg._transport.memory import MemoryChannel
from asyncwg._wire.frames import HEADER, Buffer, FrameError, Kind, pack, unpack
from tests.leaks import bounded, in_thread

CALL: Final = Kind.CALL
LARGE: Final = 8 << 20
"""Bytes; many times what a socket's buffer holds."""


class Frame(NamedTuple):
    """A delivered frame, copied."""

    call_id: int
    stream: bytes
    buffers: list[bytes]


class End:
    """What one end hears."""

    channel: Channel

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.ended: list[BaseException | None] = []
        self.then: Callable[[int], None] | None = None
        """Called with the number of each frame while it is delivered."""
        self._changed = asyncio.Event()

    def deliver(
        self, call_id: int, _kind: int, _flags: int, _aux: int, n_buffers: int, body: memoryview
    ) -> None:
        stream, buffers = unpack(body, n_buffers)
        self.frames.append(Frame(call_id, bytes(stream), [bytes(each) for each in buffers]))
        self._changed.set()
        if self.then is not None:
            self.then(call_id)

    def closed(self, error: BaseException | None) -> None:
        self.ended.append(error)
        self._changed.set()

    def send(self, call_id: int, stream: bytes = b"", buffers: Sequence[Buffer] = ()) -> None:
        self.channel.send(pack(CALL, call_id, stream, buffers))

    async def until(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        await bounded(wait())

    async def receives(self, count: int) -> list[int]:
        """Wait for ``count`` frames and return the numbers of all."""
        await self.until(lambda: len(self.frames) >= count)
        return [frame.call_id for frame in self.frames]

    async def ends(self) -> BaseException | None:
        """Wait for the end, and return what ``closed`` was told."""
        await self.until(lambda: self.ended)
        return self.ended[0]


async def a_turn() -> None:
    """Let the loop do what is due, and what that has made due."""
    for _ in range(2):
        done = asyncio.Event()
        asyncio.get_running_loop().call_soon(done.set)
        await done.wait()


class Ends(NamedTuple):
    """Two ends that are connected."""

    near: End
    far: End


@pytest_asyncio.fixture(params=["socket", "memory"])
async def ends(request: pytest.FixtureRequest, loop_kind: str) -> AsyncIterator[Ends]:
    """Both ends of each kind of channel."""
    loop = asyncio.get_running_loop()
    near, far = End(), End()
    if request.param == "socket":
        for end, sock in zip((near, far), socket.socketpair(), strict=True):
            end.channel = SocketChannel(loop, sock, end.deliver, end.closed)
    else:
        near.channel, far.channel = MemoryChannel.pair(
            loop, (near.deliver, near.closed), (far.deliver, far.closed)
        )
    yield Ends(near, far)
    near.channel.close()
    far.channel.close()


async def test_a_frame_arrives_whole(ends: Ends) -> None:
    ends.near.send(7, b"stream", [b"buffer" * 10])
    await ends.far.receives(1)
    assert ends.far.frames == [Frame(7, ends.far.frames[0].stream, [b"buffer" * 10])]
    assert ends.far.frames[0].stream.startswith(b"stream")


async def test_a_frame_without_a_body_arrives(ends: Ends) -> None:
    ends.near.send(7)
    await ends.far.receives(1)
    assert ends.far.frames == [Frame(7, b"", [])]


async def test_2000_frames_of_one_turn_arrive_once_and_in_order(ends: Ends) -> None:
    for number in range(2000):
        ends.near.send(number, b"x" * (number % 300))
    assert await ends.far.receives(2000) == list(range(2000))


async def test_frames_of_all_sizes_arrive_in_order(ends: Ends) -> None:
    sizes = [0, 1, LARGE, 5, 300_000, 256 * 1024 - 24, 256 * 1024 - 23, 3]
    for number, size in enumerate(sizes):
        ends.near.send(number, b"x" * size)
    assert await ends.far.receives(len(sizes)) == list(range(len(sizes)))
    assert [len(frame.stream) for frame in ends.far.frames] == sizes


async def test_a_frame_of_more_pieces_than_the_kernel_takes_at_once_arrives(ends: Ends) -> None:
    buffers = [bytes([i % 256]) * 16 for i in range(2 * IOV_MAX + 1)]
    ends.near.send(1, b"stream", buffers)
    await ends.far.receives(1)
    assert ends.far.frames[0].buffers == buffers


async def test_both_ends_can_send_more_than_the_carrier_holds_at_once(ends: Ends) -> None:
    """Both blocked in a write: https://github.com/mdavis-xyz/lambda_multiprocessing/issues/17."""
    for number in range(4):
        ends.near.send(number, b"n" * LARGE)
        ends.far.send(number, b"f" * LARGE)
    assert await ends.near.receives(4) == await ends.far.receives(4) == [0, 1, 2, 3]
    assert {frame.stream[:1] + frame.stream[-1:] for frame in ends.near.frames} == {b"ff"}


async def test_an_answer_can_be_sent_while_a_frame_is_delivered(ends: Ends) -> None:
    ends.far.then = lambda number: ends.far.send(number, b"x" * 100_000)
    for number in range(50):
        ends.near.send(number, b"x" * 100_000)
    assert await ends.near.receives(50) == list(range(50))


@pytest.mark.parametrize("size", [100, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("before", [0, LARGE], ids=["first", "behind-another"])
async def test_what_is_changed_after_send_is_sent_as_it_was(
    ends: Ends, size: int, before: int
) -> None:
    if before:
        ends.near.send(0, b"x" * before)
    buffer = bytearray(b"a" * size)
    ends.near.send(1, b"", [memoryview(buffer)])
    buffer[:] = b"b" * size
    await ends.far.receives(1 + bool(before))
    assert set(ends.far.frames[-1].buffers[0]) == {ord("a")}


async def test_memory_can_be_freed_after_send(ends: Ends) -> None:
    buffer = bytearray(LARGE)
    ends.near.send(1, b"", [buffer])
    buffer.clear()  # raises while a view of it is held
    await ends.far.receives(1)
    assert len(ends.far.frames[0].buffers[0]) == LARGE


async def test_the_backlog_counts_what_is_not_on_its_way_and_falls_to_zero(ends: Ends) -> None:
    ends.near.send(1, b"x" * LARGE)
    assert 0 < ends.near.channel.backlog <= LARGE + 100
    await ends.far.receives(1)
    assert ends.near.channel.backlog == 0


async def test_closing_one_end_tells_the_other_once_that_the_stream_has_ended(ends: Ends) -> None:
    ends.near.channel.close()
    assert await ends.far.ends() is None
    ends.far.channel.close()
    await a_turn()
    assert ends.far.ended == [None]


async def test_closing_an_end_does_not_tell_itself(ends: Ends) -> None:
    ends.near.channel.close()
    ends.near.channel.close()
    await ends.far.ends()
    assert ends.near.ended == []


async def test_what_was_sent_before_the_end_arrives_before_it(ends: Ends) -> None:
    ends.near.send(1, b"last words")
    ends.near.channel.close()
    await ends.far.ends()
    assert [frame.call_id for frame in ends.far.frames] == [1]


async def test_sending_on_a_closed_end_does_nothing(ends: Ends) -> None:
    ends.near.channel.close()
    ends.near.send(1)
    ends.near.send(2, b"x" * LARGE, [b"y" * 100])
    await ends.far.ends()
    assert ends.far.frames == []
    assert ends.near.channel.backlog == 0


async def test_sending_to_an_end_that_is_gone_does_nothing(ends: Ends) -> None:
    ends.far.channel.close()
    await ends.near.ends()
    ends.near.send(1, b"x" * LARGE)
    assert ends.near.channel.backlog == 0


async def test_sending_to_an_end_that_is_gone_unnoticed_does_nothing(ends: Ends) -> None:
    ends.far.channel.close()
    for number in range(3):
        ends.near.send(number, b"x" * LARGE, [b"y" * 100])
    await ends.near.ends()
    assert ends.far.frames == []


async def test_an_end_that_closes_drops_its_backlog(ends: Ends) -> None:
    ends.near.send(1, b"x" * LARGE)
    ends.near.channel.close()
    await ends.far.ends()
    assert len(ends.far.ended) == 1


BROKEN: Final = HEADER.pack(3, 1, 255, 0, 0, 0) + b"abc"


async def test_bytes_that_are_no_frame_end_the_channel_with_what_is_wrong(ends: Ends) -> None:
    ends.near.channel.send([BROKEN])
    assert isinstance(await ends.far.ends(), FrameError)


async def test_an_end_that_was_told_nonsense_ends_the_other_too(ends: Ends) -> None:
    ends.near.channel.send([BROKEN])
    await ends.near.ends()
    assert len(ends.near.ended) == 1


async def test_frames_before_broken_bytes_arrive_and_none_after(ends: Ends) -> None:
    ends.near.send(1)
    ends.near.channel.send([BROKEN])
    ends.near.send(2)
    await ends.far.ends()
    await a_turn()
    assert [frame.call_id for frame in ends.far.frames] == [1]
    assert len(ends.far.ended) == 1


async def test_a_stream_that_ends_within_a_frame_delivers_nothing_of_it(ends: Ends) -> None:
    ends.near.channel.send([HEADER.pack(100, 1, CALL, 0, 0, 0) + b"x" * 10])
    ends.near.channel.close()
    await ends.far.ends()
    assert ends.far.frames == []
    assert len(ends.far.ended) == 1


async def test_what_a_delivery_raises_ends_the_channel_with_it(ends: Ends) -> None:
    error = ValueError("can't take it")

    def refuse(_number: int) -> None:
        raise error

    ends.far.then = refuse
    ends.near.send(1)
    ends.near.send(2)
    assert await ends.far.ends() is error
    await a_turn()
    assert [frame.call_id for frame in ends.far.frames] == [1]


class Worker(NamedTuple):
    """A controller's end and the blocking end that it talks to."""

    near: End
    far: BlockingChannel


@pytest_asyncio.fixture
async def worker(loop_kind: str) -> AsyncIterator[Worker]:
    """The socket channel against the end that a worker has."""
    ours, theirs = socket.socketpair()
    near = End()
    near.channel = SocketChannel(asyncio.get_running_loop(), ours, near.deliver, near.closed)
    far = BlockingChannel(theirs)
    yield Worker(near, far)
    near.channel.close()
    far.close()


def _read(channel: BlockingChannel, count: int) -> list[Frame]:
    """Read until there are ``count`` frames, or the end."""
    end = End()
    while len(end.frames) < count and channel.read(end.deliver):
        pass
    return end.frames


async def test_a_blocking_end_reads_frames_in_order(worker: Worker) -> None:
    for number in range(2000):
        worker.near.send(number, b"x" * (number % 500))
    frames = await bounded(in_thread(_read, worker.far, 2000))
    assert [frame.call_id for frame in frames] == list(range(2000))


async def test_a_blocking_end_sends_a_frame_of_many_pieces_whole(worker: Worker) -> None:
    buffers = [bytes([i % 256]) * (i % 40) for i in range(3 * IOV_MAX)]
    buffers.append(b"x" * LARGE)
    await bounded(in_thread(worker.far.send, pack(CALL, 1, b"stream", buffers)))
    await worker.near.receives(1)
    assert worker.near.frames[0].buffers == buffers


async def test_a_blocking_end_and_a_controller_do_not_block_each_other(worker: Worker) -> None:
    """The controller always reads (C-3), so the blocking write ends."""

    def echo() -> None:
        for number in range(4):
            worker.far.send(pack(CALL, number, b"f" * LARGE))
        _read(worker.far, 4)

    for number in range(4):
        worker.near.send(number, b"n" * LARGE)
    await bounded(in_thread(echo))
    assert await worker.near.receives(4) == [0, 1, 2, 3]


async def test_a_blocking_read_says_when_the_stream_has_ended(worker: Worker) -> None:
    worker.near.channel.close()
    assert not worker.far.read(End().deliver)


async def test_a_blocking_read_ends_when_its_own_channel_is_closed(worker: Worker) -> None:
    reading = asyncio.create_task(in_thread(worker.far.read, End().deliver))
    worker.near.send(1)
    assert await bounded(reading)
    reading = asyncio.create_task(in_thread(worker.far.read, End().deliver))
    worker.far.close()
    assert not await bounded(reading)


async def test_a_blocking_send_to_an_end_that_is_gone_raises(worker: Worker) -> None:
    worker.near.channel.close()
    with pytest.raises(OSError, match="pipe"):
        worker.far.send(pack(CALL, 1, b"x"))


async def test_a_blocking_read_of_broken_bytes_raises(worker: Worker) -> None:
    worker.near.channel.send([BROKEN])
    with pytest.raises(FrameError):
        worker.far.read(End().deliver)
