"""The traffic of a program that is attached with the host's arena."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncwg._attach import wire
from asyncwg._attach.lent import OUTBOX, LentArena
from asyncwg._attach.outbox import Outbox, Share
from asyncwg._driver.arena import CONTROLLER, Block
from asyncwg._driver.pending import Pending
from asyncwg._driver.transfers import Transfers
from asyncwg._transport.aio import SocketChannel
from asyncwg._wire import codec
from asyncwg._wire.frames import NONE, Kind, pack, unpack_placed

_PAIR: Final = struct.Struct("<QQ")
_OWNER: Final = "lent"


class RemoteTransfers(Transfers):
    """The traffic of a program that is attached with the host's arena."""

    outbox: Outbox
    lent: LentArena

    def __init__(self, loop: asyncio.AbstractEventLoop, lent: LentArena, limit: int) -> None:
        books: Any = lent
        super().__init__(loop, (), _OWNER, limit, 0.0, books)
        self.lent = lent
        self.channel: SocketChannel | None = None
        self._asked: dict[int, tuple[Any, Any]] = {}
        self._number = 0

    def receive(
        self, rank: int, _flags: int, body: memoryview, n_buffers: int, wanted: bool
    ) -> tuple[memoryview, list[memoryview]]:
        """Take a result out of the arena: its stream and its buffers, which are this program's own."""
        stream, placed = unpack_placed(body, n_buffers)
        ((offset, size),) = placed.blocks
        self.lent.received(offset, size)
        if not wanted:
            self.lent.release(offset, CONTROLLER)
            return stream, []
        return self._views(stream, placed)

    async def readers_gone(self, blocks: Sequence[Block]) -> None:
        """Nothing is sent by reference that could be written here: what is shared is another arena's."""

    def want(
        self,
        weights: Sequence[int],
        take: Callable[[list[Block]], None],
        refuse: Callable[[Exception], None],
        what: str,
    ) -> bool:
        """Ask the host for room; ``take`` or ``refuse`` is called later."""
        del what
        self._number += 1
        self._asked[self._number] = (take, refuse)
        if self.channel is not None:
            self.channel.send(
                pack(Kind.WANT, self._number, struct.pack(f"<{len(weights)}Q", *weights))
            )
        return False

    def unwant(self, take: Callable[[list[Block]], None]) -> None:
        """Undo `want`."""
        for number, asked in list(self._asked.items()):
            if asked[0] == take:
                del self._asked[number]
                if self.channel is not None:
                    self.channel.send(pack(Kind.UNWANT, number))

    def granted(self, number: int, flags: int, body: memoryview) -> None:
        """Take the host's answer to `want`."""
        asked = self._asked.pop(number, None)
        if flags & NONE:
            if asked is not None:
                asked[1](wire.unpack_error(codec.decode(body)))
            return
        blocks = self.lent.granted(list(_PAIR.iter_unpack(body)), _OWNER)
        if asked is None:
            self.settle_transit(blocks)  # nobody wants them any more
        else:
            asked[0](blocks)

    def hold(self, block: Block, rank: int) -> None:
        """A call refers to a block: keep it until that has been sent."""
        del rank
        self.lent.hold(block, OUTBOX)
        self.outbox.held.append(block)

    def reserve(self, pending: Pending) -> Any:
        """Take a call's place in the order."""
        shares: list[Share] = self.outbox.reserve(pending)
        return shares
