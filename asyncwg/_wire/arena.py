"""One process's view of the arena: the anonymous file in which large values pass between processes.

Every process maps the whole file twice. What it has been *granted* it writes through a shared mapping; what
it *receives* it reads through a private one, so its own writes stay its own (O-8): the kernel copies a
page when it is written. The file is sparse and the maps reserve nothing, so only blocks in use
cost memory.

Assumed: the controller gives a block out again only when every process it was sent to has let go.

- A-1 ``released`` is told of a block once the last view of it in this process is gone, or when
  the process has made the block its own.
- A-2 What was written to a block here is never seen in a block that stands there later.
- A-3 A forked child keeps what this process had received at the fork, whatever becomes of the blocks.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from asyncwg import _linux as linux
from asyncwg._wire.books import Books

_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
GRANULE: Final = mmap.PAGESIZE
"""Bytes. Blocks start and end at pages, because pages are what is private or not."""

Released = Callable[[int, int], None]
"""Takes a block's offset and how often it had been received. Called in any thread, from a finaliser."""


class _Live:
    """A block that this process has received and has views of."""

    __slots__ = ("address", "apart", "holds", "offset", "owned", "ref", "settled", "size")

    def __init__(self, offset: int, address: int, size: int, *, apart: bool) -> None:
        self.offset = offset
        self.address = address
        self.size = size
        self.apart = apart
        """Whether it has a mapping of its own, because its place in the common one was taken."""
        self.ref: Callable[[], Any] = _nothing
        """Returns the array that all views keep alive."""
        self.holds = 1
        self.settled = False
        """Whether its pages are being made this process's own: what arrives from now on is not in them."""
        self.owned = False
        """Whether every page is this process's own, and the block has been let go."""


def _nothing() -> Any:
    return None


class _Places:
    """What has an address: disjoint ranges, and who has them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._lives: dict[int, _Live] = {}

    def add(self, live: _Live) -> None:
        bisect.insort(self._starts, live.address)
        self._lives[live.address] = live

    def remove(self, live: _Live) -> None:
        if self._lives.get(live.address) is live:
            del self._lives[live.address]
            del self._starts[bisect.bisect_left(self._starts, live.address)]

    def overlap(self, start: int, end: int) -> _Live | None:
        """Return the last one that has an address between ``start`` and ``end``."""
        index = bisect.bisect_left(self._starts, end)
        live = self._lives[self._starts[index - 1]] if index else None
        return live if live is not None and live.address + live.size > start else None

    def all(self) -> list[_Live]:
        return list(self._lives.values())


class Mapping:
    """The arena as this process sees it.

    Args:
        fd: the file; stays the caller's.
        size: bytes.
        released: told of blocks that are let go.
    """

    def __init__(self, fd: int, size: int, released: Released) -> None:
        self._fd = os.dup(fd)
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._size = size
        self._released = released
        self._shared: mmap.mmap | None = None
        self._private: mmap.mmap | None = None
        self._private_address = 0
        self._shared_address = 0
        self._books = Books()
        self._live = _Places()
        """Views of blocks that stand in the arena."""
        self._owned = _Places()
        """Views whose pages are this process's own: nothing else can be received there."""
        self._of: dict[int, list[_Live]] = {}
        """The first ones by their block's offset: it may be received again while an earlier view lives."""
        self._kept: dict[int, Any] = {}
        self._let_go_at_fork: list[tuple[int, int]] = []
        _mappings.add(self)

    def place_of(self, address: int) -> int | None:
        """Return the offset in the arena of an address in the shared mapping."""
        offset = address - self._shared_address
        return offset if self._shared is not None and 0 <= offset < self._size else None

    def share(self, offset: int, size: int, gone: Callable[[], None]) -> Any:
        """Return the bytes at ``offset`` for good; ``gone`` is called when the last view is gone."""
        self.writable(offset, size)
        assert self._shared is not None
        array = (ctypes.c_ubyte * size).from_buffer(self._shared, offset)
        key = id(array)

        def finished(_ref: Any) -> None:
            self._kept.pop(key, None)
            gone()

        self._kept[key] = weakref.ref(array, finished)
        return array

    def writable(self, offset: int, size: int) -> memoryview:
        """Return the place to write what was granted, ``size`` bytes at ``offset``."""
        if self._shared is None:
            self._map()
        assert self._shared is not None
        return memoryview(self._shared)[offset : offset + size]

    def receive(self, offset: int, size: int, *, part: tuple[int, int] | None = None) -> memoryview:
        """Return the block at ``offset`` as bytes that are this process's own, and writable.

        Args:
            offset: of the block.
            size: of the block.
            part: what of the block has arrived, as start and end, where other parts come and go by
                themselves. All parts share their bytes if that is possible.
        """
        if self._private is None:
            self._map()
        with self._books:
            views = self._of.get(offset, [])
            for live in views if part is not None else ():
                block = live.ref()
                if block is None or live.settled or self._has_stale(live, *(part or (0, 0))):
                    continue
                live.holds += 1
                return memoryview(block).cast("B")
            address = self._private_address + offset
            apart = bool(views) or self._owned.overlap(address, address + size) is not None
            if apart:
                address = linux.map_private(self._fd, offset, size)
            live = _Live(offset, address, size, apart=apart)
            # A ctypes array is what all views of it keep alive, and one can see it go:
            # memoryviews share what they view, and numpy skips arrays in between.
            kind = ctypes.c_ubyte * size
            # The one keeps the common mapping alive; the other is unmapped when it goes.
            assert self._private is not None
            array = kind.from_address(address) if apart else kind.from_buffer(self._private, offset)
            live.ref = weakref.ref(array, lambda _ref: self._books.later(lambda: self._bury(live)))
            self._live.add(live)
            self._of.setdefault(offset, []).append(live)
            return memoryview(array).cast("B")

    def own(self, offset: int) -> bool:
        """Make a block this process's own and let go of it, views and all.

        Returns:
            Whether that was possible; it is on Linux 5.14 and later.
        """
        arrays: list[Any] = []  # they must not go while their pages are copied
        lives: list[_Live] = []
        with self._books:
            for live in self._of.get(offset, ()):
                array = live.ref()
                if array is not None:  # else its finaliser is about to let it go
                    live.settled = True
                    lives.append(live)
                    arrays.append(array)
        done = [live for live in lives if linux.own_pages(live.address, live.size)]
        with self._books:
            holds = sum(self._now_owned(live) for live in done)
        if holds:
            self._released(offset, holds)
        return len(done) == len(lives)

    def own_all(self) -> None:
        """Make every block this process's own."""
        for offset in list(self._of):
            self.own(offset)

    def untouched(self, address: int, size: int) -> tuple[int, int] | None:
        """Return where in the arena the bytes at ``address`` stand, unless they were written here.

        Returns:
            The offset of their block, and their place in it: whoever is sent those sees the same bytes. None
            where the bytes are no received ones, or are this process's own by now.
        """
        with self._books:
            live = self._live.overlap(address, address + 1)
            if live is None or address + size > live.address + live.size:
                return None
            start = address - address % GRANULE
            if linux.written_pages(start, address + size - start) != []:
                return None
            return live.offset, address - live.address

    def find(self, address: int) -> tuple[Any, int] | None:
        """Return the array of the block in which ``address`` lies, and its position in it."""
        with self._books:
            live = self._live.overlap(address, address + 1)
            array = None if live is None else live.ref()
            return None if live is None or array is None else (array, address - live.address)

    def before_fork(self) -> None:
        """Make every block this process's own, and let no other thread in until the fork is over."""
        self.own_all()  # most of the work, while other threads may still receive
        self._books.acquire()
        for live in self._live.all():
            if live.ref() is not None and linux.own_pages(live.address, live.size):
                self._let_go_at_fork.append((live.offset, self._now_owned(live)))

    def after_fork(self) -> None:
        """Go on, in the parent."""
        self._books.release()
        let_go, self._let_go_at_fork = self._let_go_at_fork, []
        for offset, holds in let_go:
            self._released(offset, holds)

    def after_fork_in_child(self) -> None:
        """Be a child: what is let go here is no business of the parent's books."""
        self._books = Books()
        self._released = _ignore

    def _has_stale(self, live: _Live, start: int, end: int) -> bool:
        """Whether a page of a part had been written here, beside the part, before the part arrived."""
        edges = (live.address + start, live.address + end - 1)
        return any(linux.is_written(edge - edge % GRANULE) for edge in edges)

    def _map(self) -> None:
        with self._books:
            if self._private is not None:
                return
            shared = mmap.mmap(self._fd, self._size, mmap.MAP_SHARED | _NO_RESERVE, _READ_WRITE)
            private = mmap.mmap(self._fd, self._size, mmap.MAP_PRIVATE | _NO_RESERVE, _READ_WRITE)
            self._shared_address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
            self._private_address = ctypes.addressof(ctypes.c_char.from_buffer(private))
            self._shared, self._private = shared, private

    def _now_owned(self, live: _Live) -> int:
        """Write down that a block is this process's own; return how often it had been received."""
        if live.owned:
            return 0
        live.owned = True
        self._forget(live)
        self._owned.add(live)
        return live.holds

    def _bury(self, live: _Live) -> Callable[[], None] | None:
        """Take down a block whose last view is gone; return what is to be done without the lock."""
        if live.owned:
            self._owned.remove(live)
        else:
            self._forget(live)
        if live.apart:
            linux.unmap(live.address, live.size)
        elif live.owned:
            linux.drop_pages(live.address, live.size)
        else:
            linux.drop_written_pages(live.address, live.size)
        if live.owned:
            return None
        return lambda: self._released(live.offset, live.holds)

    def _forget(self, live: _Live) -> None:
        self._live.remove(live)
        views = self._of.get(live.offset, [])
        with contextlib.suppress(ValueError):
            views.remove(live)
        if not views:
            self._of.pop(live.offset, None)


def _ignore(_offset: int, _holds: int) -> None:
    pass


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
_fork_lock = threading.Lock()
_forking: list[Mapping] = []
"""The mappings that the fork in progress holds."""


def _before_fork() -> None:
    _fork_lock.acquire()
    _forking[:] = _mappings
    for mapping in _forking:
        mapping.before_fork()


def _after_fork() -> None:
    forking = list(_forking)
    _forking.clear()
    _fork_lock.release()
    for mapping in forking:
        mapping.after_fork()


def _after_fork_in_child() -> None:
    global _fork_lock  # the parent's is held
    _fork_lock = threading.Lock()
    for mapping in _forking:
        mapping.after_fork_in_child()
    _forking.clear()


# A child would otherwise see the blocks that its parent had received when they are used again.
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
)
