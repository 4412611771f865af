"""One program that is attached, as its host sees it."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import uuid
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from asyncwg._attach import wire
from asyncwg._attach.wire import Route
from asyncwg._driver.arena import Block, Holder
from asyncwg._driver.pending import Pending
from asyncwg._transport.aio import SocketChannel
from asyncwg._wire import codec
from asyncwg._wire.frames import (
    ARENA,
    HEADER,
    HEADER_SIZE,
    NONE,
    STREAM,
    Buffer,
    FrameError,
    Kind,
    pack,
    unpack_placed,
)
from asyncwg.errors import GroupClosedError, InternalError, WorkerDiedError

if TYPE_CHECKING:
    from asyncwg._attach.host import Host
    from asyncwg._driver.gang import Gang

_RELAY: Final = int(Kind.RELAY)
_ITEM: Final = int(Kind.ITEM)
_HEADER_PACK: Final = HEADER.pack
_JOIN_BELOW: Final = 64 * 1024
"""Bytes. A smaller frame is made one piece."""
_PAIR: Final = struct.Struct("<QQ")


class Relayed:
    """One call of another program: gets its answers and its end, and passes them on."""

    __slots__ = ("_counts", "_guest", "number", "pending")

    _counts: dict[int, int] | None

    def __init__(self, guest: Guest, number: int) -> None:
        self._guest = guest
        self.number = number
        """The call's number there."""
        self.pending: Pending | None = None
        self._counts = None

    def put(self, rank: int, item: Any) -> None:
        """Items are passed on instead."""
        raise InternalError(f"item {item!r} of rank {rank} is another program's")

    def count(self, rank: int) -> int:
        """Return how many items of a rank have come, for a generator method."""
        return self._counts.get(rank, 0) if self._counts is not None else 0

    def forward(self, rank: int, kind: int, flags: int, n_buffers: int, body: Buffer) -> None:
        """Pass a rank's answer on, as it is."""
        guest = self._guest
        if kind == _ITEM:
            if self._counts is None:
                self._counts = {}
            self._counts[rank] = self.count(rank) + 1
        if flags & ARENA:
            assert guest.gang is not None
            guest.gang.transfers.pass_on(rank, body, n_buffers, guest.holder)
        header = _HEADER_PACK(len(body), self.number, kind, flags, rank, n_buffers)
        guest.channel.send([header + body] if len(body) < _JOIN_BELOW else [header, body])

    def settle(self, results: list[Any] | None, error: Exception | None) -> None:
        """Take its end."""
        guest, pending = self._guest, self.pending
        guest.calls.pop(self.number, None)
        if results is not None or error is None or pending is None or not pending.left:
            return  # the answers of all ranks say it all
        guest.tell_if_broken()
        told = list((pending.errors or {}).values())
        # With what ranks have raised, which is there in full; or with something else.
        own = bool(told) and not isinstance(error, WorkerDiedError | GroupClosedError)
        body = getattr(error, "__notes__", []) if own else wire.pack_error(error)
        flags = wire.ITS_OWN if own else 0
        guest.channel.send(pack(Kind.FAILED, self.number, codec.encode(body).stream, flags=flags))


class Guest:
    """A connected program. Belongs to the host's event loop."""

    def __init__(self, host: Host, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        self.attached = False
        """Whether it calls the group, and does not only ask how it is."""
        self.holder: Final[Holder] = (f"program {pid} {uuid.uuid4().hex}", 0)
        self.calls: dict[int, Relayed] = {}
        """What it waits for, by its own numbers."""
        self.gang: Gang | None = None
        """The processes that its calls went to last."""
        self._host = host
        self._routes: dict[int, Route] = {}
        self._wants: dict[int, tuple[Gang, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = True
        self._pidfd = -1
        self.channel = SocketChannel(host.loop, sock, self._deliver, lambda _error: self.close())
        if pid > 0:
            try:
                # A forked child of it may hold the socket open when it has died.
                self._pidfd = os.pidfd_open(pid)
                host.loop.add_reader(self._pidfd, self.close)
            except ProcessLookupError:
                host.loop.call_soon(self.close)

    def close(self) -> None:
        """It has gone: give up what it asked for, and free what it held."""
        if not self._open:
            return
        self._open = False
        if self._pidfd >= 0:
            self._host.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self.channel.close()
        for task in self._tasks:
            task.cancel()
        for gang, take in self._wants.values():
            gang.transfers.unwant(take)
        self._wants.clear()
        running = self._host.gang
        for relayed in list(self.calls.values()):
            if relayed.pending is not None and running is not None:
                running.calls.abandon(relayed.pending)
        self.calls.clear()
        self._host.free(self.holder)
        self._host.left(self)

    def tell_if_broken(self) -> None:
        """Have the news that the group has broken out before what it did to a call."""
        self._host.look()

    def tell(self, frame: list[Buffer]) -> None:
        """Send the news to who is attached."""
        if self.attached:
            self.channel.send(frame)

    def welcome(self, number: int) -> None:
        """Answer a program that attaches."""
        self.attached = True
        try:
            body = codec.encode((self._host.state(), self._host.packed_info())).stream
        except Exception as error:  # noqa: BLE001  # the user's class can't be pickled
            self.refuse(number, error)
            return
        self.channel.send(pack(Kind.TOLD, number, body))

    def answer(self, number: int, value: Any) -> None:
        """Answer a request."""
        self.channel.send(pack(Kind.TOLD, number, codec.encode(value).stream))

    def refuse(self, number: int, error: BaseException) -> None:
        """Answer a request with an error."""
        body = codec.encode(wire.pack_error(error)).stream
        self.channel.send(pack(Kind.TOLD, number, body, flags=wire.FAILED))

    def relieve(self, offsets: Sequence[int]) -> None:
        """Ask it to make blocks its own, because room is short."""
        if offsets:
            self.channel.send(pack(Kind.OWN, 0, struct.pack(f"<{len(offsets)}Q", *offsets)))

    def _deliver(
        self, number: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        if kind == _RELAY:
            self._relay(number, flags, aux, body)
        elif kind == Kind.RELEASE:
            for offset, count in _PAIR.iter_unpack(body):
                self._host.free(self.holder, offset, count)
        elif kind == Kind.ABANDON:
            relayed = self.calls.pop(number, None)
            if relayed is not None and relayed.pending is not None and self._host.gang is not None:
                self._host.gang.calls.abandon(relayed.pending)
        elif kind in (Kind.PULL, Kind.CANCEL):
            self._on_stream(number, kind, aux)
        elif kind == Kind.ROUTE:
            self._routes[aux] = Route(*codec.decode(body))
        elif kind == Kind.WANT:
            self._want(number, [size for (size,) in struct.iter_unpack("<Q", body)])
        elif kind == Kind.UNWANT:
            want = self._wants.pop(number, None)
            if want is not None:
                want[0].transfers.unwant(want[1])
        elif kind == Kind.ASK:
            self._ask(number, *codec.decode(body))
        else:
            raise FrameError(f"a program that is attached sent a frame of kind {kind}")

    def _on_stream(self, number: int, kind: int, rank: int) -> None:
        relayed, gang = self.calls.get(number), self._host.gang
        if relayed is None or relayed.pending is None or gang is None:
            return
        if kind == Kind.PULL:
            gang.calls.pull(relayed.pending, rank)
        else:
            gang.calls.cancel_silent(relayed.pending)

    def _relay(self, number: int, flags: int, aux: int, body: memoryview) -> None:
        label, ranks, lane, single, on_error, joins = self._routes[aux]
        gang = self.gang
        if gang is None or not gang.usable:
            try:
                gang = self.gang = self._host.use()
            except Exception as error:  # noqa: BLE001  # told to who calls
                failed = codec.encode(wire.pack_error(error)).stream
                self.channel.send(pack(Kind.FAILED, number, failed))
                return
        calls = gang.calls
        calls.last_id = call_id = calls.last_id + 1
        given: Sequence[Sequence[Buffer]] = ((body,),)
        frames, index = [body], None
        if flags:
            frames, index, kinds = wire.relayed(body, call_id)
            given = [[frames[each]] for each in index]
        else:
            kinds = wire.readdress(body, call_id)
        if kinds & ARENA:
            self._lend(gang, ranks, frames, index)
        relayed = self.calls[number] = Relayed(self, number)
        pending = relayed.pending = calls.send(
            call_id, label, ranks, lane, given, relayed, single, on_error, joins, relayed
        )
        if kinds & STREAM:
            pending.feed = relayed
            pending.hung = True  # it lasts as long as its reader takes

    def _lend(
        self,
        gang: Gang,
        ranks: Sequence[int],
        frames: Sequence[memoryview],
        index: Sequence[int] | None,
    ) -> None:
        """Write down which blocks of this program the ranks are sent."""
        for position, rank in enumerate(ranks):
            frame = frames[0 if index is None else index[position]]
            _, _, _, flags, _, n_buffers = HEADER.unpack_from(frame)
            if flags & ARENA:
                for offset, _ in unpack_placed(frame[HEADER_SIZE:], n_buffers)[1].blocks:
                    if not gang.transfers.lend(offset, self.holder, rank):
                        raise FrameError(f"block {offset} was sent by a program that has it not")

    def _want(self, number: int, weights: list[int]) -> None:
        def take(blocks: list[Block]) -> None:
            self._wants.pop(number, None)
            gang.transfers.give(blocks, self.holder)
            places = b"".join(_PAIR.pack(block.offset, block.size) for block in blocks)
            self.channel.send(pack(Kind.GRANT, number, places))

        def refuse(error: Exception) -> None:
            self._wants.pop(number, None)
            self.channel.send(
                pack(Kind.GRANT, number, codec.encode(wire.pack_error(error)).stream, flags=NONE)
            )

        try:
            gang = self._host.use()
            gang.transfers.check_fits(sum(weights), "a call")
        except Exception as error:  # noqa: BLE001  # told to who calls
            refuse(error)
            return
        if not gang.transfers.want(weights, take, refuse, "arguments"):
            self._wants[number] = (gang, take)

    def _ask(self, number: int, request: str, argument: Any) -> None:
        if request == "attach":
            if self._host.core.state == "starting":
                self._host.wait_for_start(self, number)
            else:
                self.welcome(number)
        elif request == "shutdown":
            # Not a task of this program's: it must not end with it.
            self._host.shut_down(argument, self, number)
        else:
            self._spawn(self._answer(number, request, argument))

    async def _answer(self, number: int, request: str, argument: Any) -> None:
        try:
            value = await self._host.carry_out(request, argument)
        except Exception as error:  # noqa: BLE001  # told to who asks
            self.refuse(number, error)
            return
        self.answer(number, value)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._host.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
