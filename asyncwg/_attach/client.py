"""The processes of a group that another program hosts: what `Gang` is for a group of one's own."""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncwg._attach import wire
from asyncwg._attach.calls import RemoteCalls
from asyncwg._attach.lent import OUTBOX, LentArena
from asyncwg._attach.outbox import Outbox
from asyncwg._attach.transfers import RemoteTransfers
from asyncwg._attach.wire import State
from asyncwg._driver.arena import Block
from asyncwg._driver.pending import Outcome, Pending
from asyncwg._driver.stacks import HangReport, Stacks
from asyncwg._driver.transfers import in_thread
from asyncwg._transport.aio import SocketChannel
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import Buffer, Kind, pack, unpack
from asyncwg.errors import (
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    WorkerDiedError,
)

_RESULT: Final = int(Kind.RESULT)
_PAIR: Final = struct.Struct("<QQ")


class _Lane:
    """Stands for a rank: for how much waits for it, and for what is told to it by the way of the host."""

    def __init__(self) -> None:
        self.channel: SocketChannel | None = None
        self.lanes = (self,)
        self.control = self

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Tell the host."""
        if self.channel is not None:
            self.channel.send(pieces)

    @property
    def backlog(self) -> int:
        return 0 if self.channel is None else self.channel.backlog


class RemoteWatch:
    """Looks at the ranks through the host."""

    def __init__(self, gang: RemoteGang) -> None:
        self._gang = gang
        self._tell: Callable[[HangReport], None] = lambda _report: None
        self._tasks: set[asyncio.Task[None]] = set()

    async def stacks(self, ranks: Sequence[int] | None = None, timeout: float = 2.0) -> Stacks:
        """Return the Python stacks of all ranks."""
        del ranks
        stacks: Stacks = await self._gang.ask("stacks", timeout)
        return stacks

    async def ping(self, timeout: float) -> list[float | None]:
        """Return the seconds in which each rank's control lane answers the host."""
        seconds: list[float | None] = await self._gang.ask("ping", timeout)
        return seconds

    def tell_with(self, tell: Callable[[HangReport], None]) -> None:
        """Take who is told of calls that have a limit of their own."""
        self._tell = tell

    def report(self, pending: Pending, after: float) -> None:
        """Report one call that hangs."""
        if self._gang.calls.get(pending.call_id) is pending and not pending.hung:
            pending.hung = True
            task = asyncio.get_running_loop().create_task(self._report(pending, after))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _report(self, pending: Pending, after: float) -> None:
        stacks = await self.stacks()
        if self._gang.calls.get(pending.call_id) is pending:
            self._tell(
                HangReport(
                    self._gang.name, pending.label, pending.call_id, after, pending.silent, stacks
                )
            )


class RemoteGang:
    """The way to a group that another program hosts. Belongs to the event loop that made it.

    Args:
        loop: whose.
        name: the group's.
        size: number of its ranks.
        meshes: as far as they are known.
    """

    has_arena = True

    def __init__(
        self, loop: asyncio.AbstractEventLoop, name: str, size: int, meshes: dict[Any, Any]
    ) -> None:
        self.name: Final = name
        self.broken: Exception | None = None
        self.unopened: Exception | None = None
        """Why there never was a way to the host."""
        self.usable = True
        """Whether calls may be made; until there is a way to the host they are kept back."""
        self.closed = False
        self.on_break: Callable[[Exception], None] | None = None
        self.on_end: Callable[[], None] | None = None
        """Called when nothing comes from the host any more."""
        self.meshes: dict[Any, dict[str, Any]] = {}
        self._learn(meshes)
        self.watch = RemoteWatch(self)
        self.state: State | None = None
        self._loop = loop
        self._thread = threading.get_ident()
        self._lanes = [_Lane() for _ in range(size)]
        self._channel: SocketChannel | None = None
        self._pidfd = -1
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._gone: collections.deque[tuple[int, int]] = collections.deque()
        self._telling = False
        self._lent: LentArena | None = None
        self._sock: socket.socket | None = None
        ranks: Any = self._lanes
        self.calls = RemoteCalls(loop, ranks, 0.0, _never, self._receive_large, _no_readers)
        self.calls.decides = False
        self.calls.outbox = self._outbox = Outbox(self.calls, self._sent)
        self.transfers: RemoteTransfers

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [] if self.state is None or self.closed else list(self.state.pids)

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self.usable and self.broken is None

    @property
    def session(self) -> str:
        """The mark of its processes; "" before it is known."""
        return "" if self.state is None else self.state.session

    def open(self, sock: socket.socket, arena_fd: int, pid: int) -> None:
        """Take the way to the host."""
        self._sock = sock
        self._lent = LentArena(arena_fd, self._let_go)
        self.transfers = RemoteTransfers(self._loop, self._lent, self._lent.size)
        self._channel = SocketChannel(self._loop, sock, self._deliver, self._lost)
        self.transfers.channel = self._outbox.channel = self._channel
        self.transfers.outbox = self._outbox
        for lane in self._lanes:
            lane.channel = self._channel
        if pid > 0:
            try:
                # A forked child of the host may hold the socket open when it has died.
                self._pidfd = os.pidfd_open(pid)
                self._loop.add_reader(self._pidfd, self._host_ended)
            except ProcessLookupError:
                self._loop.call_soon(self._host_ended)

    def _learn(self, told: dict[Any, Any]) -> None:
        """Take all meshes. The tables of a role stay the same objects: layouts refer to them."""
        for tables in self.meshes.values():
            tables.clear()
        for role, tables in told.items():
            self.meshes.setdefault(role, {}).update(tables)

    def grow(self, size: int) -> None:
        """Take how many ranks there are, where that was not known before."""
        self._lanes += [_Lane() for _ in range(size - len(self._lanes))]
        for lane in self._lanes:
            lane.channel = self._channel
        self.calls.load[:] = [0] * size

    async def ask(self, request: str, argument: Any = None) -> Any:
        """Have the host do something by name, and return what it answers.

        Raises:
            GroupClosedError: the way to the host has ended.
            Exception: what the host raised.
        """
        if self._channel is None:
            self.check()
            raise GroupClosedError(f"group {self.name!r} is not attached")
        self._number += 1
        number = self._number
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._answers[number] = answer
        self._channel.send(pack(Kind.ASK, number, codec.encode((request, argument)).stream))
        try:
            return await answer
        finally:
            self._answers.pop(number, None)

    def take(self, state: State) -> None:
        """Take how the group is now."""
        self.state = state
        self._learn(state.meshes)
        self.transfers.limit = state.limit
        if state.state == "broken":
            cause = (
                failures.relay(state.broken)
                if state.broken is not None
                else GroupBrokenError(f"group {self.name!r} broke")
            )
            self._break(cause)
        elif state.state == "closed":
            self._end(GroupClosedError(f"group {self.name!r} was shut down"))
        elif state.state == "running":
            self.broken, self.usable = None, not self.closed
        else:
            self.usable = False

    def check(self) -> None:
        """Raise if no call can be taken.

        Raises:
            GroupBrokenError: it broke, or its host has ended.
            GroupClosedError: it was shut down, or let go.
            AsyncwgError: what has kept it from being attached.
        """
        if self.unopened is not None:
            raise _copy(self.unopened) from self.unopened
        if self.broken is not None:
            text = failures.text_of(self.broken).partition("\n")[0]
            raise GroupBrokenError(
                f"group {self.name!r} broke and takes no calls: {type(self.broken).__name__}: {text}"
            ) from self.broken
        if self.closed:
            raise GroupClosedError(f"group {self.name!r} was shut down or let go")
        if not self.usable:
            raise GroupBrokenError(f"group {self.name!r} is being started again")

    def close(self, error: Exception | None = None) -> None:
        """Let go of the group; what is in flight fails with ``error``."""
        if error is None:
            error = GroupClosedError(f"group {self.name!r} was let go")
        self._end(error)

    def fail_to_open(self, error: Exception) -> None:
        """There is no way to the host."""
        self.unopened, self.usable = error, False

    def _end(self, error: Exception) -> None:
        if self.closed:
            return
        self.closed, self.usable = True, False
        self._fail_all(error)
        channel, self._channel = self._channel, None
        self._outbox.channel = None
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        for answer in list(self._answers.values()):
            if not answer.done():
                answer.set_exception(_copy(error))
        if channel is not None:
            self.transfers.channel = None
            self._return_all(channel)
        if self.on_end is not None:
            self.on_end()

    def _return_all(self, channel: SocketChannel) -> None:
        """Close the way to the host, which then uses the places again that this program has been lent."""
        lent, sock = self._lent, self._sock
        assert lent is not None
        assert sock is not None
        lent.forget()
        if lent.in_use and self.broken is None:
            # The host hears of the end when the last descriptor of the socket is closed.
            keeper = os.dup(sock.fileno())
            in_thread(lent.let_go, lambda: os.close(keeper))
        channel.close()
        # A handle that is kept for its name must not keep the mapping.
        self._lent = self._sock = None
        del self.transfers

    def _break(self, cause: Exception) -> None:
        if self.broken is not None or self.closed:
            return
        self.broken, self.usable = cause, False
        # What the host has been sent it fails by itself, and knows better why.
        self.calls.fail_unsent(self._error_of(cause))
        if self.on_break is not None:
            self._loop.call_soon(self.on_break, cause)

    def _fail_all(self, cause: Exception) -> None:
        self.calls.fail_all(self._error_of(cause))

    def _error_of(self, cause: Exception) -> Callable[[Pending], Exception]:
        def error_of(pending: Pending) -> Exception:
            if isinstance(cause, GroupClosedError):
                return GroupClosedError(f"{pending.label} had not answered: {cause}")
            if isinstance(cause, WorkerDiedError):
                return _copy(cause)
            error = GroupBrokenError(f"{pending.label} was cut off: {cause}")
            error.__cause__ = cause
            return error

        return error_of

    def _host_ended(self) -> None:
        if self._channel is not None:
            self._channel.drain()
        self._lost(None)

    def _lost(self, error: BaseException | None) -> None:
        if self.closed:
            return
        pid = 0 if self.state is None else self.state.pid
        why = GroupBrokenError(
            f"the process {pid or ''} that hosts group {self.name!r} has ended or dropped it"
            if error is None
            else f"what came from the host of group {self.name!r} makes no sense: {error}"
        )
        self._break(why)
        self._end(why)

    def _deliver(
        self, number: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        calls = self.calls
        if self.closed:
            return  # what came in one go with the news of the end
        if kind == _RESULT:
            calls.result(aux, number, flags, n_buffers, body)
        elif kind == Kind.ERROR:
            calls.error(aux, number, codec.decode(*unpack(body, n_buffers)))
        elif kind == Kind.ITEM:
            calls.item(aux, number, flags, n_buffers, body)
        elif kind == Kind.EXPIRED:
            calls.expired(aux, number)
        elif kind == Kind.FAILED:
            calls.failed(number, flags, codec.decode(body))
        elif kind == Kind.GRANT:
            self.transfers.granted(number, flags, body)
        elif kind == Kind.STATE:
            self.take(codec.decode(body))
        elif kind == Kind.TOLD:
            self._told(number, flags, codec.decode(body))
        elif kind == Kind.OWN:
            for offset in memoryview(bytes(body)).cast("Q").tolist():
                in_thread(self.transfers.lent.mapping.own, offset)
        else:
            raise InternalError(f"the host sent a frame of kind {kind}")

    def _told(self, number: int, flags: int, value: Any) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if flags & wire.FAILED:
            answer.set_exception(wire.unpack_error(value))
        else:
            answer.set_result(value)

    def _receive_large(
        self, rank: int, flags: int, body: memoryview, n_buffers: int, wanted: bool
    ) -> tuple[memoryview, list[memoryview]]:
        return self.transfers.receive(rank, flags, body, n_buffers, wanted)

    def _sent(self, block: Block) -> None:
        if self._lent is not None:
            self._lent.release(block.offset, OUTBOX)

    def _let_go(self, offset: int, count: int) -> None:
        """A block goes back. In any thread, from a finaliser too."""
        self._gone.append((offset, count))
        if not self._telling:
            self._telling = True
            try:
                if threading.get_ident() == self._thread:
                    self._loop.call_soon(self._tell_released)
                else:
                    self._loop.call_soon_threadsafe(self._tell_released)
            except RuntimeError:
                pass  # the loop is closed, and the way to the host with it

    def _tell_released(self) -> None:
        self._telling = False
        pairs: list[bytes] = []
        while self._gone:
            pairs.append(_PAIR.pack(*self._gone.popleft()))
        if pairs and self._channel is not None:
            self._channel.send(pack(Kind.RELEASE, 0, b"".join(pairs)))


def _copy(error: Exception) -> Exception:
    """Return another exception that says the same: each call has one of its own."""
    copy = type(error)(*error.args)
    for note in getattr(error, "__notes__", []):
        copy.add_note(note)
    copy.__cause__ = error.__cause__
    return copy


def _never(_pending: Pending, _outcome: Outcome | None, _error: Exception) -> None:
    raise InternalError("the host decides how long other ranks are waited for")


async def _no_readers(_blocks: Sequence[Block]) -> None:
    """Nothing is sent by reference that could be written here."""
