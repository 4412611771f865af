"""Large values on their way: arguments into the arena, results to where they are to stand.

Arguments: a call takes its place in its lanes at once (`Slot`); when there is room, its buffers are copied,
large ones in a thread; when they stand, the slots get their frames. Results: a rank offers one by the sizes
of its buffers; it is granted a place, side by side with the other ranks' where they will be joined.

- D-1 What a call sends is what its arguments were when it was made, or the call fails: a tensor's version
  counter is compared after a copy that was made later, and what has no counter is copied at once (O-7).
- D-2 Arguments wait for room when the group's blocks exceed ``limit``. Results don't: they wait only for
  memory, or calls whose ranks wait to answer would keep the room they wait for.
- D-3 Who waits is told after ``timeout``, with a `ResourceError`.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from asyncwg._driver.arena import (
    CONTROLLER,
    IDLE_AFTER,
    TRANSIT,
    Arena,
    Block,
    Holder,
    arena,
)
from asyncwg._driver.calls import Calls
from asyncwg._driver.departure import Cargo, Departure, Load
from asyncwg._driver.pending import Pending, Region
from asyncwg._driver.rank import Rank
from asyncwg._transport.aio import Slot
from asyncwg._wire import sources
from asyncwg._wire.frames import (
    Buffer,
    Kind,
    Placed,
    pack,
    pack_placed,
    unpack_placed,
)
from asyncwg._wire.shipment import joined_places
from asyncwg.errors import ResourceError

RELIEVE_AFTER: Final = 0.2
"""Seconds that arguments wait for room before the holders are asked to make blocks their own."""
_RELIEVE_AGAIN: Final = 0.02
"""The same, when that has helped: who kept those blocks is likely to keep the next ones too."""

COPYING: Final = -2
"""Stands for a rank while threads copy to a block."""

_copiers = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="asyncwg-copy")


def in_thread(function: Callable[..., Any], *args: Any) -> None:
    """Run what would hold up the event loop."""
    _copiers.submit(function, *args)


def _after_fork() -> None:
    global _copiers  # a child has none of its parent's threads
    _copiers = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="asyncwg-copy")


os.register_at_fork(after_in_child=_after_fork)


class _Want(NamedTuple):
    """Somebody who waits for room."""

    weights: Sequence[int]
    take: Callable[[list[Block]], None]
    refuse: Callable[[Exception], None]
    alarm: asyncio.TimerHandle
    what: str
    limited: bool


class Transfers:
    """The traffic of one generation with the arena. Belongs to the group's event loop.

    Args:
        loop: the group's.
        ranks: all ranks, by number.
        calls: the pending table.
        session: the generation's name, for the arena's books.
        limit: bytes of blocks beyond which arguments wait.
        timeout: seconds until who waits gives up.
        books: which block is whose; None for this process's own arena.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ranks: Sequence[Rank],
        session: str,
        limit: int,
        timeout: float,
        books: Arena | None = None,
    ) -> None:
        self._loop = loop
        self._ranks = ranks
        self._session = session
        self._timeout = timeout
        self._arena = arena() if books is None else books
        self._wants: collections.deque[_Want] = collections.deque()
        self._listening = False
        self._relief: asyncio.TimerHandle | None = None
        self._relieved = False
        """Whether the holders have been asked since somebody got room."""
        self._idle: asyncio.TimerHandle | None = None
        self.closed = False
        self.limit = limit
        """Bytes of blocks beyond which arguments wait."""
        self.on_relief: list[Callable[[], None]] = []
        """Called to have those that are no ranks asked for the blocks they keep."""

    def receive(
        self, rank: int, _flags: int, body: memoryview, n_buffers: int, wanted: bool
    ) -> tuple[memoryview, list[memoryview]]:
        """Take a result out of the arena: its stream and its buffers, which are the controller's own."""
        stream, placed = unpack_placed(body, n_buffers)
        ((offset, _size),) = placed.blocks
        self._look_later()
        if not wanted:
            self._arena.release(offset, (self._session, rank))
            return stream, []
        # Held before it is received: from then on another thread may let it go.
        self._arena.move(offset, (self._session, rank), CONTROLLER)
        return self._views(stream, placed)

    def _views(self, stream: memoryview, placed: Placed) -> tuple[memoryview, list[memoryview]]:
        """Return the stream and the buffers of a result whose block is this process's to let go."""
        ((offset, size),) = placed.blocks
        # The parts of a joined result stand in one block, and are views of one array.
        part = (
            min(place for _, _, place in placed.buffers),
            max(place + length for length, _, place in placed.buffers),
        )
        try:
            block = self._arena.mapping.receive(offset, size, part=part)
        except BaseException:  # it is held, and nobody would let it go
            self._arena.release(offset, CONTROLLER)
            raise
        buffers = [block[place : place + length] for length, _, place in placed.buffers]
        return (stream, buffers) if stream else (buffers.pop(), buffers)

    async def readers_gone(self, blocks: Sequence[Block]) -> None:
        """Wait until no rank reads ``blocks``."""
        changed = asyncio.Event()

        def tell() -> None:
            try:
                self._loop.call_soon_threadsafe(changed.set)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        self._arena.listen(tell)
        try:
            while self._arena.readers(blocks):
                await changed.wait()
                changed.clear()
        finally:
            self._arena.unlisten(tell)

    def released(self, rank: int, body: memoryview) -> None:
        """Take a rank's RELEASE."""
        for offset, count in struct.iter_unpack("<QQ", body):
            self._arena.release(offset, (self._session, rank), count)
        self._look_later()

    def _look_later(self) -> None:
        if self._idle is None:
            self._idle = self._loop.call_later(IDLE_AFTER, self._look_idle, -1)

    def _look_idle(self, before: int) -> None:
        """Give memory back when nothing was sent for `IDLE_AFTER`; look again while something is."""
        self._idle = None
        now = self._arena.allocations
        if now != before:
            self._idle = self._loop.call_later(IDLE_AFTER, self._look_idle, now)
        else:
            _copiers.submit(self._arena.trim_if_idle, now)

    def lost(self, rank: int) -> None:
        """Take back what a dead rank held."""
        self._arena.release_all((self._session, rank))

    def close(self) -> None:
        """Take back everything but what the controller's user holds."""
        self.closed = True
        for rank in (TRANSIT, *range(len(self._ranks))):
            self.lost(rank)
        while self._wants:
            self._wants.popleft().alarm.cancel()
        self._listen(False)
        if self._idle is not None:
            self._idle.cancel()
        # In a thread: giving back a gigabyte takes as long as a close may take in all.
        try:
            _copiers.submit(self._arena.trim_if_idle, self._arena.allocations)
        except RuntimeError:
            pass  # the interpreter takes no more work: the program ends, and its memory with it

    def offered(self, rank: int, call_id: int, pending: Pending | None, body: memoryview) -> None:
        """Take a rank's OFFER of a large result and grant it a place, now or when there is room."""
        sizes = [number for (number,) in struct.iter_unpack("<Q", body)]
        control = self._ranks[rank].control
        if pending is None or pending.outcome is None:
            control.send(pack(Kind.GRANT, call_id))
            return
        if rank in pending.joins:
            position, ranks = pending.joins.index(rank), len(pending.joins)
            if pending.region is not None and pending.region.sizes == sizes:
                self._grant(
                    rank,
                    call_id,
                    pending.region.block,
                    sizes,
                    joined_places(sizes, position, ranks)[0],
                )
                return
            alone = pending.region is not None
        else:
            position, ranks, alone = 0, 1, True
        if alone:
            position, ranks = 0, 1
        places, weight = joined_places(sizes, position, ranks)

        def take(blocks: list[Block]) -> None:
            block = blocks[0]
            if pending.outcome is None:  # the caller went while the rank waited for room
                self.settle_transit(blocks)
                control.send(pack(Kind.GRANT, call_id))
            elif alone:
                self._grant(rank, call_id, block, sizes, places)
                self.settle_transit(blocks)
            elif pending.region is None:
                self._make_region(pending, block, sizes)
                self._grant(rank, call_id, block, sizes, places)
            else:  # another rank waited too, and came first
                same = pending.region.sizes == sizes
                self._grant(rank, call_id, pending.region.block if same else block, sizes, places)
                self.settle_transit(blocks)

        def refuse(error: Exception) -> None:
            control.send(pack(Kind.GRANT, call_id, str(error).encode()))

        self._want([weight], take, refuse, f"the result of {pending.label}", limited=False)

    def _make_region(self, pending: Pending, block: Block, sizes: list[int]) -> None:
        pending.region = Region(block, sizes)
        key = (self._session, TRANSIT)
        pending.cleanup = lambda: self._arena.release(block.offset, key)

    def _grant(
        self, rank: int, call_id: int, block: Block, sizes: list[int], places: list[int]
    ) -> None:
        self._arena.hold(block, (self._session, rank))
        placed = Placed(
            [(block.offset, block.size)],
            [(size, 0, place) for size, place in zip(sizes, places, strict=True)],
        )
        self._ranks[rank].control.send(pack_placed(Kind.GRANT, call_id, b"", placed))

    def ship(
        self,
        calls: Calls,
        pending: Pending,
        loads: Sequence[Load],
        index: Sequence[int] | None,
        *,
        now: bool,
    ) -> None:
        """Send a call whose arguments go through the arena.

        Args:
            calls: the pending table.
            pending: the call, registered.
            loads: what is sent, each once.
            index: by position, the number of its load; None when all get the first.
            now: whether to copy everything before this returns.

        Raises:
            ResourceError: it can never fit. Nothing has been sent.
        """
        cargo = [Cargo.of(load, self._arena, (self._session, TRANSIT)) for load in loads]
        try:
            self.check_fits(sum(each.weight for each in cargo), pending.label)
        except ResourceError:
            self.settle_transit([block for each in cargo for block in each.references])
            raise
        Departure(self, calls, pending, cargo, index, now=now).begin()

    def check_fits(self, weight: int, label: str) -> None:
        """Raise if so many bytes of arguments can never fit.

        Raises:
            ResourceError: they are more than the limit, or than there is memory.
        """
        if weight > self.limit or not self._arena.fits(weight):
            raise ResourceError(
                f"{label}: {_bytes(weight)} of arguments can't fit the arena "
                f"(arena_limit is {_bytes(self.limit)}, "
                f"memory has room for {_bytes(self._arena.room)}): send less at a time"
            )

    def give(self, blocks: Sequence[Block], holder: Holder) -> None:
        """Blocks that were wanted for another program are its own now, to fill and to send."""
        for block in blocks:
            self._arena.move(block.offset, (self._session, TRANSIT), holder)

    def lend(self, offset: int, holder: Holder, rank: int) -> bool:
        """A rank is sent a block by another program; False where that does not hold it."""
        return self._arena.lend(offset, holder, (self._session, rank))

    def pass_on(self, rank: int, body: Buffer, n_buffers: int, holder: Holder) -> None:
        """A rank's result goes on to another program, which holds from now on where it stands."""
        for offset, _ in unpack_placed(memoryview(body), n_buffers)[1].blocks:
            self._arena.move(offset, (self._session, rank), holder)
        self._look_later()

    def want(
        self,
        weights: Sequence[int],
        take: Callable[[list[Block]], None],
        refuse: Callable[[Exception], None],
        what: str,
    ) -> bool:
        """Get room for arguments: call ``take``, now (True) or later, or ``refuse`` after the timeout."""
        return self._want(weights, take, refuse, what, limited=True)

    def unwant(self, take: Callable[[list[Block]], None]) -> None:
        """Undo `want`, so that nobody waits behind it."""
        for want in list(self._wants):
            if want.take == take:
                want.alarm.cancel()
                self._wants.remove(want)
                self._loop.call_soon(self._room)

    def hold(self, block: Block, rank: int) -> None:
        """Write down that a rank is sent a block."""
        self._arena.hold(block, (self._session, rank))

    def reserve(self, pending: Pending) -> list[Slot]:
        """Take a call's place in the order of its lane, on every rank."""
        return [self._ranks[rank].lanes[pending.lane].reserve() for rank in pending.ranks]

    def copy(
        self,
        pieces: Sequence[tuple[sources.Source, memoryview]],
        blocks: Sequence[Block],
        done: Callable[[BaseException | None], None],
    ) -> None:
        """Copy in threads; ``done`` is called on the loop when all have ended, with the first error.

        ``blocks``, which are copied to, are nobody else's until then, also when the group ends.
        """
        left = len(pieces)
        lock = threading.Lock()
        errors: list[BaseException] = []
        for block in blocks:
            self._arena.hold(block, (self._session, COPYING))

        def tell(future: concurrent.futures.Future[None]) -> None:
            nonlocal left
            with lock:
                error = future.exception()
                if error is not None:
                    errors.append(error)
                left -= 1
                if left:
                    return
            for block in blocks:
                self._arena.release(block.offset, (self._session, COPYING))
            try:
                self._loop.call_soon_threadsafe(done, errors[0] if errors else None)
            except RuntimeError:
                pass  # the loop is closed, and its group with it

        for source, place in pieces:
            _copiers.submit(sources.copy, source, place).add_done_callback(tell)

    def settle_transit(self, blocks: Sequence[Block]) -> None:
        """Blocks have been filled and sent, or given up."""
        for block in blocks:
            self._arena.release(block.offset, (self._session, TRANSIT))

    def writable(self, block: Block, place: int, size: int) -> memoryview:
        """Return where a buffer of a block is to be written."""
        return self._arena.mapping.writable(block.offset + place, size)

    def _want(
        self,
        weights: Sequence[int],
        take: Callable[[list[Block]], None],
        refuse: Callable[[Exception], None],
        what: str,
        *,
        limited: bool,
    ) -> bool:
        if not (limited and any(want.limited for want in self._wants)):
            blocks = self._allocate(weights, limited=limited)
            if blocks is not None:
                take(blocks)
                return True
            if not limited and not self._arena.fits(sum(weights)):
                refuse(
                    ResourceError(
                        f"{_bytes(sum(weights))} of {what} can't fit the arena: "
                        f"memory has room for {_bytes(self._arena.room)}: send less at a time"
                    )
                )
                return True
        want: _Want

        def give_up() -> None:
            self._wants.remove(want)
            refuse(ResourceError(self._shortage(sum(weights), what)))
            self._room()  # whoever stood behind it

        want = _Want(
            weights, take, refuse, self._loop.call_later(self._timeout, give_up), what, limited
        )
        self._wants.append(want)
        self._listen(True)
        return False

    def _allocate(self, weights: Sequence[int], *, limited: bool) -> list[Block] | None:
        if limited and self._arena.in_use(self._session) + sum(weights) > self.limit:
            return None
        return self._arena.allocate_all(weights, self._session)

    def _listen(self, yes: bool) -> None:
        if yes and not self._listening:
            self._listening = True
            self._arena.listen(self._room_from_any_thread)
            self._relieve_in(RELIEVE_AFTER)
        elif not yes and self._listening:
            self._listening = False
            self._arena.unlisten(self._room_from_any_thread)
            if self._relief is not None:
                self._relief.cancel()
                self._relief = None

    def _room_from_any_thread(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._room)
        except RuntimeError:
            pass  # the loop is closed: nobody waits any more

    def _room(self) -> None:
        # Results first: ranks that wait to answer hold their arguments.
        for want in sorted(self._wants, key=lambda want: want.limited):
            if want not in self._wants:
                continue
            blocks = self._allocate(want.weights, limited=want.limited)
            if blocks is None:
                if want.limited:
                    break
                continue
            self._wants.remove(want)
            want.alarm.cancel()
            want.take(blocks)
            if self._relieved:
                self._relieve_in(_RELIEVE_AGAIN)
        if not self._wants:
            self._listen(False)

    def _relieve_in(self, seconds: float) -> None:
        if self._relief is not None:
            self._relief.cancel()
        self._relieved = False
        self._relief = self._loop.call_later(seconds, self._relieve)

    def _relieve(self) -> None:
        """Ask whoever keeps blocks for long to make them their own."""
        for rank in self._ranks:
            held = [b.offset for b in self._arena.held_by((self._session, rank.index))]
            if held:
                rank.control.send(pack(Kind.OWN, 0, struct.pack(f"<{len(held)}Q", *held)))
        _copiers.submit(self._arena.mapping.own_all)
        for ask in self.on_relief:
            ask()
        self._relieve_in(RELIEVE_AFTER * 5)
        self._relieved = True

    def _shortage(self, weight: int, what: str) -> str:
        keys = [(f"rank {r.index}", (self._session, r.index)) for r in self._ranks]
        held = [
            f"{name} holds {_bytes(size)}"
            for name, key in [*keys, ("the controller", CONTROLLER)]
            if (size := sum(block.size for block in self._arena.held_by(key)))
        ]
        return (
            f"no room in the arena for {_bytes(weight)} of {what} after {self._timeout} s: "
            f"arena_limit is {_bytes(self.limit)}; {', '.join(held) or 'nobody holds any of it'}. "
            "Await calls before making more, or raise arena_limit"
        )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
