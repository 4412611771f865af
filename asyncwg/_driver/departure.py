"""One call with large arguments, between its place in the order and its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncwg._driver.arena import Arena, Block, Holder
from asyncwg._driver.calls import Calls
from asyncwg._driver.pending import Pending
from asyncwg._transport.aio import Slot
from asyncwg._wire import sources
from asyncwg._wire.codec import Encoded
from asyncwg._wire.frames import Buffer, Placed, pack, pack_placed
from asyncwg._wire.shipment import Shipment, joined_places
from asyncwg.errors import UsageError

if TYPE_CHECKING:
    from asyncwg._driver.transfers import Transfers

COPY_LATER_FROM: Final = 1 << 20
"""Bytes. Copying more on the event loop would be felt: 1 MB takes about 0.1 ms when warm."""
_SPLIT_FROM: Final = 8 << 20
"""Bytes. A larger buffer is copied by two threads at once."""


class Load(NamedTuple):
    """One payload of a call: its frame's head, and its value."""

    kind: int
    flags: int
    aux: int
    encoded: Encoded
    large: Shipment | None


class _Reference(NamedTuple):
    """Stands for a buffer that is in the arena already, and is sent as it is."""

    block: Block
    place: int
    size: int


class Cargo(NamedTuple):
    """One load, and which of its buffers are copied to where in a block for it."""

    load: Load
    buffers: list[_Reference | sources.Source]
    sizes: list[int]
    places: list[int]
    """In the block that is filled; 0 for references."""
    weight: int
    """Bytes of that block; 0 where all buffers are references."""

    @classmethod
    def of(cls, load: Load, arena: Arena, holder: Holder) -> Cargo:
        """Look where the buffers stand; ``holder`` holds the blocks of those that are in the arena."""
        if load.large is None:
            # It is small, but may leave late: beside a load that is copied first (D-1).
            stream, small = load.encoded
            taken: list[sources.Source] = [bytes(each) for each in sources.inline(small)]
            return cls(load._replace(encoded=Encoded(stream, taken)), [], [], [], 0)
        buffers: list[_Reference | sources.Source] = []
        for source, size in zip(load.large.sources, load.large.sizes, strict=True):
            found = arena.locate(source, holder)
            buffers.append(source if found is None else _Reference(*found, size))
        copied = [
            0 if isinstance(buffer, _Reference) else size
            for buffer, size in zip(buffers, load.large.sizes, strict=True)
        ]
        places, weight = joined_places(copied, 0, 1)
        return cls(load, buffers, load.large.sizes, places, weight)

    @property
    def copied(self) -> list[tuple[sources.Source, int]]:
        """What is copied, and where to in the block."""
        return [
            (buffer, place)
            for buffer, place in zip(self.buffers, self.places, strict=True)
            if not isinstance(buffer, _Reference)
        ]

    @property
    def references(self) -> list[Block]:
        """The blocks that are sent as they are, as often as they are held."""
        return [each.block for each in self.buffers if isinstance(each, _Reference)]

    def steady(self, *, always: bool) -> Cargo:
        """Return it with copies of what may change without a trace, or of all."""
        return self._replace(
            buffers=[
                each if isinstance(each, _Reference) else sources.steady(each, always=always)
                for each in self.buffers
            ]
        )

    def frame(self, call_id: int, filled: Block | None) -> tuple[list[Buffer], list[Block]]:
        """Return the frame, and the blocks that it refers to."""
        kind, flags, aux, encoded, large = self.load
        if large is None:
            stream, buffers = encoded
            inlined = sources.inline(buffers)
            return pack(kind, call_id, stream, inlined, flags=flags, aux=aux), []
        blocks: list[Block] = [] if filled is None else [filled]
        entries: list[tuple[int, int, int]] = []
        for buffer, size, place in zip(self.buffers, self.sizes, self.places, strict=True):
            if isinstance(buffer, _Reference):
                if buffer.block not in blocks:
                    blocks.append(buffer.block)
                entries.append((size, blocks.index(buffer.block), buffer.place))
            else:
                entries.append((size, 0, place))
        placed = Placed([(block.offset, block.size) for block in blocks], entries)
        return pack_placed(kind, call_id, large.stream, placed, flags=flags, aux=aux), blocks


class Departure:
    """One call between its place in the order and its frames."""

    def __init__(
        self,
        transfers: Transfers,
        calls: Calls,
        pending: Pending,
        cargo: Sequence[Cargo],
        index: Sequence[int] | None,
        *,
        now: bool,
    ) -> None:
        self._transfers = transfers
        self._calls = calls
        self._pending = pending
        self._cargo = list(cargo)
        self._index = index
        self._now = now
        self._slots: list[Slot] = transfers.reserve(pending)
        self._blocks: list[Block] = []
        self._copying = False
        self._versions: list[int | None] | None = None
        self._over = False
        pending.unsent = self._take_back

    def begin(self) -> None:
        """Ask for room; go on now if there is some."""
        weights = [each.weight for each in self._cargo if each.weight]
        if not weights:
            self._depart()
        elif not self._transfers.want(weights, self._fill, self._refuse, "arguments"):
            # The copy comes later: what may change without a trace is copied now (D-1).
            self._cargo = [each.steady(always=self._now) for each in self._cargo]
            self._versions = self._now_at()

    def _now_at(self) -> list[int | None]:
        return [sources.version_of(s) for each in self._cargo for s, _ in each.copied]

    def _fill(self, blocks: list[Block]) -> None:
        if self._over:
            self._transfers.settle_transit(blocks)
            return
        self._blocks = blocks
        if self._versions is None:
            self._versions = self._now_at()
        total = sum(each.weight for each in self._cargo)
        later: list[tuple[sources.Source, memoryview]] = []
        try:
            for source, place in self._targets():
                if total < COPY_LATER_FROM or self._now or sources.version_of(source) is None:
                    sources.copy(source, place)
                else:
                    later += _split(source, place)
        except Exception as error:  # noqa: BLE001  # a tensor that can't be read fails its own call alone
            self._copied(error)
            return
        if later:
            self._copying = True
            self._transfers.copy(later, blocks, self._copied)
        else:
            self._copied(None)

    def _targets(self) -> list[tuple[sources.Source, memoryview]]:
        blocks = iter(self._blocks)
        targets: list[tuple[sources.Source, memoryview]] = []
        for each in self._cargo:
            if each.weight:
                block = next(blocks)
                targets += [
                    (source, self._transfers.writable(block, place, sources.size_of(source)))
                    for source, place in each.copied
                ]
        return targets

    def _copied(self, error: BaseException | None) -> None:
        self._copying = False
        if self._over:
            self._transfers.settle_transit(self._blocks)
        elif error is not None:
            self._refuse(UsageError(f"{self._pending.label}: an argument can't be copied: {error}"))
        elif self._now_at() != self._versions:
            self._refuse(
                UsageError(
                    f"{self._pending.label}: an argument was written to while it was being sent. "
                    "Await the call first, or use options(copy='now')"
                )
            )
        else:
            self._depart()

    def _depart(self) -> None:
        self._over = True
        pending, transfers = self._pending, self._transfers
        pending.unsent = None
        blocks = iter(self._blocks)
        frames = [
            each.frame(pending.call_id, next(blocks) if each.weight else None)
            for each in self._cargo
        ]
        numbers = self._index if self._index is not None else [0] * len(pending.ranks)
        for slot, rank, number in zip(self._slots, pending.ranks, numbers, strict=True):
            frame, used = frames[number]
            for block in used:
                transfers.hold(block, rank)
            slot.fill(frame)
        pending.references = [block for each in self._cargo for block in each.references]
        transfers.settle_transit([*self._blocks, *pending.references])
        self._calls.moved()

    def _refuse(self, error: Exception) -> None:
        self._calls.refuse(self._pending, error)

    def _take_back(self) -> None:
        """Nobody wants it any more, or it can't be sent: give up the places in the order."""
        if self._over:
            return
        self._over = True
        self._pending.unsent = None
        for slot in self._slots:
            slot.cancel()
        self._transfers.unwant(self._fill)
        self._transfers.settle_transit([b for each in self._cargo for b in each.references])
        if not self._copying:  # a copy that runs needs its place until it ends
            self._transfers.settle_transit(self._blocks)
            self._blocks = []
        self._calls.moved()


def _split(source: sources.Source, place: memoryview) -> list[tuple[sources.Source, memoryview]]:
    """Cut a copy in two where that pays."""
    if isinstance(source, sources.Strided) or len(source) < _SPLIT_FROM:
        return [(source, place)]
    half = len(source) // 2
    view = memoryview(source)
    return [(view[:half], place[:half]), (view[half:], place[half:])]
