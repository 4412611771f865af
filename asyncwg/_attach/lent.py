"""The host's arena in a program that is attached: what it was lent, and what goes back.

The host's books have this program as one holder of each block. Here stands why: views of results that
were received, places for arguments that are being filled, and calls that wait for their turn. When none is
left, the host is told.

- L-1 A block is given back only after every call that refers to it has been sent.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Sequence
from typing import Final

from asyncwg import shards
from asyncwg._driver.arena import CONTROLLER, TRANSIT, Block, Holder
from asyncwg._driver.transfers import COPYING
from asyncwg._wire import sources
from asyncwg._wire.arena import Mapping
from asyncwg._wire.books import Books
from asyncwg._wire.joined import joined

Released = Callable[[int, int], None]
"""Takes a block's offset and how often the host had written down that it was lent. In any thread."""
OUTBOX: Final[Holder] = ("outbox", 0)
"""Holds what a call refers to until that has been sent."""


class LentArena:
    """What `asyncwg._driver.arena.Arena` is for an arena of one's own. Any thread may use it.

    Args:
        fd: the host's arena; it is closed.
        released: told of blocks that go back.
    """

    allocations = 0

    def __init__(self, fd: int, released: Released) -> None:
        try:
            self.size: Final = os.fstat(fd).st_size
            self.mapping: Final = Mapping(fd, self.size, self._let_go)
        finally:
            os.close(fd)
        self._books = Books()
        self._blocks: dict[int, Block] = {}
        self._lent: collections.Counter[int] = collections.Counter()
        """How often the host has written down that we hold a block."""
        self._released = released
        self._then: Callable[[], None] | None = None
        find = self.mapping.find
        self._joiner = lambda parts: joined(parts, find)
        shards.in_place_joiners.append(self._joiner)

    @property
    def in_use(self) -> bool:
        """Whether anything is lent."""
        return bool(self._blocks)

    def forget(self) -> None:
        """Nothing is received any more."""
        if self._joiner in shards.in_place_joiners:
            shards.in_place_joiners.remove(self._joiner)

    def let_go(self, then: Callable[[], None]) -> None:
        """Make what is still in use this process's own, and call ``then`` when nobody writes either.

        Takes as long as a copy of it: not for the event loop's thread.
        """
        self.mapping.own_all()
        with self._books:
            if self._is_written():
                self._then = then
                return
        then()

    def _is_written(self) -> bool:
        return any(rank == COPYING for block in self._blocks.values() for _, rank in block.holders)

    @property
    def room(self) -> int:
        """How large a block could be at most; the host knows better."""
        return self.size

    def fits(self, weight: int) -> bool:
        """Whether a block of that size could ever be had, for all that is known here."""
        return weight <= self.size

    def granted(self, places: Sequence[tuple[int, int]], owner: str) -> list[Block]:
        """Take blocks to be filled, held by the owner's `TRANSIT`."""
        with self._books:
            return [self._take(offset, size, (owner, TRANSIT)) for offset, size in places]

    def received(self, offset: int, size: int) -> None:
        """Take a block in which a result stands, held by `CONTROLLER`: that is, by views of it."""
        with self._books:
            self._take(offset, size, CONTROLLER)

    def hold(self, block: Block, holder: Holder, count: int = 1) -> None:
        """Write down one more reason to keep a block."""
        with self._books:
            block.holders[holder] += count

    def release(self, offset: int, holder: Holder, count: int = 1) -> None:
        """Take back what ``hold`` wrote; a block without holders goes back."""
        then: Callable[[], None] | None = None
        with self._books:
            tell = self._release(offset, holder, count)
            if self._then is not None and not self._is_written():
                then, self._then = self._then, None
        for each in (tell, then):
            if each is not None:
                each()

    def locate(self, source: sources.Source, holder: Holder) -> tuple[Block, int] | None:
        """Return the block in which a buffer stands as the host's ranks wrote it; None if in none."""
        if not self._blocks or isinstance(source, sources.Strided):
            return None
        address = sources.address_of(source)
        with self._books:
            found = self.mapping.untouched(address, len(source))
            block = None if found is None else self._blocks.get(found[0])
            if found is None or block is None:
                return None
            block.holders[holder] += 1
            return block, found[1]

    def _take(self, offset: int, size: int, holder: Holder) -> Block:
        block = self._blocks.get(offset)
        if block is None:
            block = self._blocks[offset] = Block(offset, size, "")
        block.holders[holder] += 1
        self._lent[offset] += 1
        return block

    def _release(self, offset: int, holder: Holder, count: int) -> Callable[[], None] | None:
        block = self._blocks.get(offset)
        if block is None or holder not in block.holders:
            return None
        block.holders[holder] -= count
        if block.holders[holder] <= 0:
            del block.holders[holder]
        if block.holders:
            return None
        del self._blocks[offset]
        lent = self._lent.pop(offset)
        return lambda: self._released(offset, lent)

    def _let_go(self, offset: int, count: int) -> None:
        """The last view of a block is gone. For finalisers."""
        self._books.later(lambda: self._release(offset, CONTROLLER, count))
