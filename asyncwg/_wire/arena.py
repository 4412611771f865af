"""One process's view of the arena: the anonymous file in which large values pass between processes.

Every process maps the whole file twice. What it has been *granted* it writes through a shared mapping; what
it *receives* it reads through a private one, so its own writes stay its own (O-8): the kernel copies a
page when it is written. The file is sparse and the maps reserve nothing, so only blocks in use
cost memory.

Assumed: the controller gives a block out again only when every process it was sent to has let go.

- A-1 ``released`` is told of a block once the last view of it in this process is gone, or when
  the process has made the block its own.
- A-2 What was written to a block here is never seen in a block that stands there later.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from asyncwg import _linux as linux

_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
GRANULE: Final = mmap.PAGESIZE
"""Bytes. Blocks start and end at pages, because pages are what is private or not."""

Released = Callable[[int, int], None]
"""Takes a block's offset and how often it had been received. Called in any thread, from a finaliser."""


class _Live:
    """A block that this process has received and has views of."""

    __slots__ = ("address", "extra", "holds", "owned", "ref", "size")

    def __init__(self, ref: weakref.ref[Any], address: int, size: int, extra: Any) -> None:
        self.ref = ref
        self.address = address
        self.size = size
        self.extra = extra
        """A mapping of its own, where the place in the common one is taken."""
        self.holds = 1
        self.owned = False
        """Whether every page is this process's own, and the block has been let go."""


class Mapping:
    """The arena as this process sees it.

    Args:
        fd: the file; stays the caller's.
        size: bytes.
        released: told of blocks that are let go.
    """

    def __init__(self, fd: int, size: int, released: Released) -> None:
        self._fd = os.dup(fd)
        self._size = size
        self._released = released
        self._shared: mmap.mmap | None = None
        self._private: mmap.mmap | None = None
        self._private_address = 0
        self._shared_address = 0
        # Re-entrant: a finaliser may run in this thread while it is held.
        self._lock = threading.RLock()
        self._live: dict[int, dict[int, _Live]] = {}
        """By offset and address: a block may be received again while an earlier view of it lives."""
        self._kept: dict[int, Any] = {}
        self._taken: dict[int, _Live] = {}
        """Places of the common private mapping whose pages are owned, by address."""
        os.register_at_fork(before=self.own_all)

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

    def receive(self, offset: int, size: int, *, again: bool = False) -> memoryview:
        """Return the block at ``offset`` as bytes that are this process's own, and writable.

        Args:
            offset: of the block.
            size: of the block.
            again: whether this is another part of what was received before, and shares its bytes.
        """
        with self._lock:
            views = self._live.setdefault(offset, {})
            if again and views:
                live = next(iter(views.values()))
                block = live.ref()
                if block is not None:
                    live.holds += 1
                    return memoryview(block).cast("B")
            if self._private is None:
                self._map()
            common = self._private
            assert common is not None
            extra, start, at = common, self._private_address + offset, offset
            if views or any(
                start < o.address + o.size and o.address < start + size
                for o in self._taken.values()
            ):
                extra = mmap.mmap(
                    self._fd, size, mmap.MAP_PRIVATE | _NO_RESERVE, _READ_WRITE, offset=offset
                )
                start, at = ctypes.addressof(ctypes.c_char.from_buffer(extra)), 0
            # A ctypes array is what all views of it keep alive, and one can see it go:
            # memoryviews share what they view, and numpy skips arrays in between.
            array = (ctypes.c_ubyte * size).from_buffer(extra, at)
            live = _Live(
                weakref.ref(array, lambda _ref: self._gone(offset, live)), start, size, extra
            )
            views[start] = live
            return memoryview(array).cast("B")

    def own(self, offset: int) -> bool:
        """Make a block this process's own and let go of it, views and all.

        Returns:
            Whether that was possible; it is on Linux 5.14 and later.
        """
        holds = 0
        with self._lock:
            for live in list(self._live.get(offset, {}).values()):
                if live.ref() is None:
                    continue  # its finaliser is about to let it go
                if not linux.own_pages(live.address, live.size):
                    return False
                live.owned = True
                self._forget(offset, live)
                self._taken[live.address] = live
                holds += live.holds
        if holds:
            self._released(offset, holds)
        return True

    def own_all(self) -> None:
        """Make every block this process's own: before a fork, whose child would see them reused."""
        for offset in list(self._live):
            self.own(offset)

    def untouched(self, address: int, size: int) -> tuple[int, int] | None:
        """Return where in the arena the bytes at ``address`` stand, unless they were written here.

        Returns:
            The offset of their block, and their place in it: whoever is sent those sees the same bytes. None
            where the bytes are no received ones, or are this process's own by now.
        """
        with self._lock:
            for offset, views in self._live.items():
                for live in views.values():
                    if live.address <= address and address + size <= live.address + live.size:
                        start = address - address % GRANULE
                        if linux.written_pages(start, address + size - start) != []:
                            return None
                        return offset, address - live.address
        return None

    def find(self, address: int) -> tuple[Any, int] | None:
        """Return the array of the block in which ``address`` lies, and its position in it."""
        with self._lock:
            for live in (live for views in self._live.values() for live in views.values()):
                if live.address <= address < live.address + live.size:
                    array = live.ref()
                    return None if array is None else (array, address - live.address)
        return None

    def _map(self) -> None:
        with self._lock:
            if self._private is not None:
                return
            self._shared = mmap.mmap(
                self._fd, self._size, mmap.MAP_SHARED | _NO_RESERVE, _READ_WRITE
            )
            self._shared_address = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))
            private = mmap.mmap(self._fd, self._size, mmap.MAP_PRIVATE | _NO_RESERVE, _READ_WRITE)
            self._private_address = ctypes.addressof(ctypes.c_char.from_buffer(private))
            self._private = private

    def _gone(self, offset: int, live: _Live | None) -> None:
        if live is None:
            return
        with self._lock:
            if live.owned:
                self._taken.pop(live.address, None)
                linux.drop_pages(live.address, live.size)
                return
            self._forget(offset, live)
            if live.extra is self._private:
                linux.drop_written_pages(live.address, live.size)
        self._released(offset, live.holds)

    def _forget(self, offset: int, live: _Live) -> None:
        views = self._live.get(offset, {})
        if views.get(live.address) is live:
            del views[live.address]
        if not views:
            self._live.pop(offset, None)
