"""The arena's books: which block is whose. One arena per controller process, for all its groups.

A block is held by whom it was sent or granted to, so many times as it was sent; when nobody holds it, its
place is free. Free places keep their memory for the next block, since memory that was touched before is
five times as fast to fill, and give it back when the arena has been idle for `IDLE_AFTER`.

- B-1 No two blocks overlap.
- B-2 A place is given out again only when every holder has let go, or is dead.
"""

from __future__ import annotations

import bisect
import collections
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncwg import _linux as linux
from asyncwg import shards
from asyncwg._wire import sources
from asyncwg._wire.arena import GRANULE, Mapping
from asyncwg._wire.books import Books
from asyncwg._wire.joined import joined
from asyncwg.errors import ResourceError

_TRIM_STEP: Final = 64 << 20
"""Bytes given back at a time: about 10 ms of the kernel's work."""
IDLE_AFTER: Final = 60.0
"""Seconds without a block after which the memory of free places is given back."""

Holder = tuple[str, int]
"""A generation of a group, and a rank of it, or `TRANSIT`; `CONTROLLER` is the controller itself."""
CONTROLLER: Final[Holder] = ("controller", -1)
TRANSIT: Final = -1
"""Stands for a rank while a block is filled or granted and nobody has it yet."""


class Block:
    """A place in the arena that somebody holds."""

    __slots__ = ("holders", "offset", "owner", "size")

    def __init__(self, offset: int, size: int, owner: str) -> None:
        self.offset = offset
        self.size = size
        """Bytes, whole pages."""
        self.owner = owner
        """The generation it was allocated for, whose limit it counts against."""
        self.holders: collections.Counter[Holder] = collections.Counter()


class Arena:
    """Allocates blocks. Any thread may use it."""

    def __init__(self) -> None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.size: Final = memory - memory % GRANULE
        self.fd: Final = linux.memory_file("asyncwg-arena")
        weakref.finalize(self, os.close, self.fd).atexit = False
        os.ftruncate(self.fd, self.size)
        self.mapping: Final = Mapping(self.fd, self.size, self._let_go)
        self._books = Books()
        self._blocks: dict[int, Block] = {}
        self._starts: list[int] = [0]
        self._free: dict[int, int] = {0: self.size}
        self._used: collections.Counter[str] = collections.Counter()
        """Bytes in blocks, by owner."""
        self.allocations = 0
        """Blocks ever given out."""
        self._shared: dict[int, Block] = {}
        self._touched = 0
        """Bytes from the start that have been given out since the last `trim`."""
        self._listeners: list[Callable[[], None]] = []

    def in_use(self, owner: str | None = None) -> int:
        """Return how many bytes are in blocks, of one owner or of all."""
        with self._books:
            return self._used.total() if owner is None else self._used[owner]

    def allocate(self, weight: int, owner: str) -> Block | None:
        """Return a block of at least ``weight`` bytes, held by the owner's `TRANSIT`; None without room."""
        blocks = self.allocate_all([weight], owner)
        return None if blocks is None else blocks[0]

    def allocate_all(self, weights: Sequence[int], owner: str) -> list[Block] | None:
        """Return a block for each of ``weights``, as `allocate` does; None without room for them all."""
        blocks: list[Block] = []
        with self._books:
            touched = self._touched
            for weight in weights:
                block = self._allocate(round_up(weight), owner)
                if block is None:
                    # Nobody is told: it would be tried again at once, for ever.
                    for each in blocks:
                        self._free_block(each)
                    self._touched = touched
                    return None
                blocks.append(block)
            self.allocations += len(blocks)
        return blocks

    def hold(self, block: Block, holder: Holder, count: int = 1) -> None:
        """Write down that ``holder`` was sent the block."""
        with self._books:
            block.holders[holder] += count

    def release(self, offset: int, holder: Holder, count: int = 1) -> None:
        """Take back what ``hold`` wrote; a block without holders is free."""
        with self._books:
            self._release(offset, holder, count)
        self._tell()

    def move(self, offset: int, giver: Holder, taker: Holder) -> None:
        """Pass one hold on, without a moment in which nobody holds the block."""
        with self._books:
            block = self._blocks.get(offset)
            if block is not None:
                block.holders[taker] += 1
                self._release(offset, giver, 1)
        self._tell()

    def lend(self, offset: int, giver: Holder, taker: Holder) -> bool:
        """Let ``taker`` hold a block too; False where ``giver`` does not hold it."""
        with self._books:
            block = self._blocks.get(offset)
            if block is None or giver not in block.holders:
                return False
            block.holders[taker] += 1
            return True

    def release_all(self, holder: Holder) -> None:
        """Take back everything that a dead process held."""
        with self._books:
            for block in list(self._blocks.values()):
                self._release(block.offset, holder, block.holders.get(holder, 0))
        self._tell()

    def share(self, size: int) -> Any:
        """Return ``size`` bytes in the arena that stay there while somebody has a view of them.

        Raises:
            ResourceError: there is no room.
        """
        block = self.allocate(size, "shared")
        if block is None:
            raise ResourceError(
                f"{size} bytes don't fit the arena: there is room for {self.room} bytes"
            )
        self._shared[block.offset] = block

        def gone() -> None:
            self._shared.pop(block.offset, None)
            self._let_go(block.offset, 1)

        array = self.mapping.share(block.offset, size, gone)
        self.move(block.offset, ("shared", TRANSIT), CONTROLLER)
        return array

    def locate(self, source: sources.Source, holder: Holder) -> tuple[Block, int] | None:
        """Return the block in which a buffer stands already, and its place there; None if in none.

        That is a tensor that is shared, or a result as it came: what its user writes to it goes to
        private pages, so the block still holds what the worker wrote. ``holder`` holds it from now on.
        """
        if not self._blocks or isinstance(source, sources.Strided):
            return None
        address = sources.address_of(source)
        with self._books:
            offset = self.mapping.place_of(address) if self._shared else None
            if offset is not None:
                for block in list(self._shared.values()):
                    if block.offset <= offset < block.offset + block.size:
                        block.holders[holder] += 1
                        return block, offset - block.offset
            # Who lets go of it after this line waits for these books, and finds the new holder.
            found = self.mapping.untouched(address, len(source))
            block_found = None if found is None else self._blocks.get(found[0])
            if found is None or block_found is None:
                return None
            block_found.holders[holder] += 1
            return block_found, found[1]

    def readers(self, blocks: Sequence[Block]) -> int:
        """Return how many ranks hold one of ``blocks``."""
        with self._books:
            return sum(len(block.holders.keys() - {CONTROLLER}) for block in blocks)

    def held_by(self, holder: Holder) -> list[Block]:
        """Return the blocks that ``holder`` has not let go."""
        with self._books:
            return [block for block in self._blocks.values() if holder in block.holders]

    @property
    def room(self) -> int:
        """How large a block could be, in bytes, with all others gone."""
        return min(self.size, self._memory() + self._available())

    def fits(self, weight: int) -> bool:
        """Whether a block of that size could ever be had."""
        return round_up(weight) <= self._touched or round_up(weight) <= self.room

    def listen(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, in any thread, whenever a block has become free."""
        with self._books:
            self._listeners.append(listener)

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Undo `listen`."""
        with self._books:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def trim_if_idle(self, since: int) -> None:
        """Give memory back if no block has been allocated after ``allocations`` was ``since``."""
        if self.allocations == since:
            self.trim()

    def trim(self) -> None:
        """Give the memory of free places back to the system."""
        with self._books:
            since = self.allocations
            places = [
                (start, min(start + room, self._touched))
                for start, room in self._free.items()
                if start < self._touched
            ]
            last = max((block.offset + block.size for block in self._blocks.values()), default=0)
        for start, end in places:
            for piece in range(start, end, _TRIM_STEP):
                # Step by step: whoever needs a block waits for one step alone.
                with self._books:
                    if self.allocations != since:
                        return
                    linux.punch_hole(self.fd, piece, min(_TRIM_STEP, end - piece))
        with self._books:
            if self.allocations == since:
                self._touched = last

    def _available(self) -> int:
        """Return how many bytes of memory could still be put behind the arena."""
        available, room = linux.available_memory(), linux.room_in_file(self.fd)
        return available if room is None else min(available, room)

    def _memory(self) -> int:
        """Return how many bytes of memory are behind the arena now."""
        return os.fstat(self.fd).st_blocks * 512  # whatever the size of a block of the file system

    def _allocate(self, size: int, owner: str) -> Block | None:
        for index, start in enumerate(self._starts):  # noqa: B007  # used below
            room = self._free[start]
            if room >= size:
                break
        else:
            return None
        end = start + size
        if end > self._touched:
            # Blocks that were given out and are not filled yet will need memory too.
            if end - self._memory() > self._available():
                return None
            self._touched = end
        del self._starts[index], self._free[start]
        if room > size:
            self._starts.insert(index, end)
            self._free[end] = room - size
        block = Block(start, size, owner)
        block.holders[(owner, TRANSIT)] = 1
        self._blocks[start] = block
        self._used[owner] += size
        return block

    def _release(self, offset: int, holder: Holder, count: int) -> None:
        block = self._blocks.get(offset)
        if block is None or holder not in block.holders:
            return
        block.holders[holder] -= count
        if block.holders[holder] <= 0:
            del block.holders[holder]
        if not block.holders:
            self._free_block(block)

    def _free_block(self, block: Block) -> None:
        start, room = block.offset, block.size
        del self._blocks[start]
        self._used[block.owner] -= room
        if not self._used[block.owner]:
            del self._used[block.owner]
        index = bisect.bisect(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + room:
            room += self._free.pop(self._starts.pop(index))
        if index and self._starts[index - 1] + self._free[self._starts[index - 1]] == start:
            self._free[self._starts[index - 1]] += room
            return
        self._starts.insert(index, start)
        self._free[start] = room

    def _let_go(self, offset: int, count: int) -> None:
        """Take back what the controller itself held. For finalisers."""

        def note() -> Callable[[], None]:
            self._release(offset, CONTROLLER, count)
            return self._tell

        self._books.later(note)

    def _tell(self) -> None:
        for listener in list(self._listeners):
            listener()


def round_up(weight: int) -> int:
    """Return the size of the block for ``weight`` bytes: whole pages, in steps of an eighth.

    Few sizes, because ctypes keeps a type for every length of an array.
    """
    step = max(GRANULE, 1 << max(0, weight.bit_length() - 4))
    return max(step, -(-weight // step) * step)


_arena: Arena | None = None
_arena_lock = threading.Lock()


def arena() -> Arena:
    """Return this controller's arena, made now if there is none."""
    global _arena  # one per process
    with _arena_lock:
        if _arena is None:
            _arena = Arena()
            find = _arena.mapping.find
            shards.in_place_joiners.append(lambda parts: joined(parts, find))
        return _arena


def _after_fork() -> None:
    global _arena, _arena_lock
    # The child sees its parent's blocks through mappings of its own, and gives none of them out.
    _arena_lock = threading.Lock()
    _arena = None


os.register_at_fork(after_in_child=_after_fork)
