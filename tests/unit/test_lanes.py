"""The lanes of a worker: the async one answers every call, whenever it is cancelled."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from asyncwg._wire.frames import HEADER, HEADER_SIZE, NONE, Kind
from asyncwg._worker.blocks import Blocks
from asyncwg._worker.context import CurrentCall
from asyncwg._worker.lanes import AsyncLane, ComputeLane
from asyncwg._worker.service import Request, Service
from asyncwg.decorator import Address

BOUND = 10.0
"""Seconds that an answer is given."""


class Worker:
    pass


async def forever() -> None:
    await asyncio.Event().wait()


@pytest.fixture
def ends() -> Iterator[tuple[AsyncLane, socket.socket]]:
    """A lane that takes calls, and the controller's end of its socket."""
    ours, theirs = socket.socketpair()
    ours.settimeout(BOUND)
    lane = AsyncLane(theirs, {})
    blocks: Any = None
    lane.serve(Service({None: Worker()}, [], blocks, ()))
    yield lane, ours
    loop = lane._loop
    channel = lane._channel
    assert channel is not None
    loop.call_soon_threadsafe(channel.close)
    loop.call_soon_threadsafe(loop.stop)
    lane._thread.join(BOUND)
    loop.close()
    ours.close()


def test_a_call_that_is_cancelled_before_its_first_step_has_an_answer(
    ends: tuple[AsyncLane, socket.socket],
) -> None:
    """Its task was cancelled, so it never ran, and the controller waited for ever."""
    lane, ours = ends
    call = CurrentCall(1, "Worker.forever")

    def start_and_cancel() -> None:
        lane._start(Request(call, forever, (), {}))
        assert lane.gate.cancel(1) is call  # by the control lane, from its thread
        lane._cancel(1)

    lane._loop.call_soon_threadsafe(start_and_cancel)
    _, call_id, kind, *_ = HEADER.unpack(ours.recv(HEADER_SIZE))
    assert (call_id, kind) == (1, Kind.ERROR)


def test_a_call_that_is_cancelled_while_it_waits_has_an_answer(
    ends: tuple[AsyncLane, socket.socket],
) -> None:
    lane, ours = ends
    call = CurrentCall(1, "Worker.forever")
    begun = asyncio.run_coroutine_threadsafe(
        _begin(lane, Request(call, forever, (), {})), lane._loop
    )
    begun.result(BOUND)
    assert lane.gate.cancel(1) is call
    lane.cancel(1)
    _, call_id, kind, *_ = HEADER.unpack(ours.recv(HEADER_SIZE))
    assert (call_id, kind) == (1, Kind.ERROR)


def test_a_worker_whose_answer_nobody_takes_leaves_without_a_word() -> None:
    """It printed a traceback while its group was being broken off."""
    ours, theirs = socket.socketpair()

    class Closing:
        def step(self) -> int:
            ours.close()
            return 1

    lane = ComputeLane(theirs)
    blocks: Any = Blocks(os.memfd_create("blocks"), 4096)
    ours.sendall(HEADER.pack(0, 1, Kind.CALL, NONE, 0, 0))
    with pytest.raises(SystemExit) as caught:
        lane.serve(Service({None: Closing()}, [Address(None, "step")], blocks, ()))
    assert caught.value.code == 0
    os.close(blocks.woken)
    lane.channel.close()


async def _begin(lane: AsyncLane, request: Request) -> None:
    lane._start(request)
    await asyncio.sleep(0)
