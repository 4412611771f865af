"""What of an encoded value goes through the pipe, and what through the arena."""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from asyncwg._wire.codec import Encoded
from asyncwg._wire.sources import Source, size_of, steady

ARENA_FROM: Final = float(os.environ.get("ASYNCWG_ARENA_FROM", 64 * 1024))
"""Bytes in all buffers of a value. Smaller values go through the pipe: two copies of 64 kB and the
kernel's work cost about as much as a block's bookkeeping (docs/performance.md). ``ASYNCWG_ARENA_FROM``
in the environment of the controller sets it, for tests: to 0 for all values, or to ``inf`` for none."""
_PLACE: Final = 64
"""Bytes. Buffers start at cache lines."""


class Shipment(NamedTuple):
    """A value whose buffers go through the arena."""

    stream: bytes
    """b"" when it is large itself and stands behind the buffers."""
    sources: list[Source]
    sizes: list[int]

    def steady(self) -> Shipment:
        """Return it with copies of what may change without a trace: arrays have no version counter."""
        return self._replace(sources=[steady(source) for source in self.sources])


def shipment(encoded: Encoded, threshold: float = ARENA_FROM) -> Shipment | None:
    """Return the value as a shipment, or None where it is small enough for the pipe."""
    stream, buffers = encoded
    if not buffers and len(stream) < threshold:
        return None
    sizes = [size_of(buffer) for buffer in buffers]
    if sum(sizes) + len(stream) < threshold:
        return None
    if len(stream) >= threshold:
        return Shipment(b"", [*buffers, stream], [*sizes, len(stream)])
    return Shipment(stream, list(buffers), sizes) if sum(sizes) >= threshold else None


def joined_places(sizes: list[int], position: int, ranks: int) -> tuple[list[int], int]:
    """Return where the buffers of one of ``ranks`` alike stand in a block for all, and its size.

    The first buffers of all ranks stand side by side, then the second ones, and so on: so the rows
    of a joined batch are in place when the last rank has written its own.
    """
    places: list[int] = []
    end = 0
    for size in sizes:
        places.append(end + position * size)
        end += -(-size * ranks // _PLACE) * _PLACE
    return places, end
