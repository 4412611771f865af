"""The contract of a channel.

Assumed of the carrier: bytes arrive in order, once, or the stream ends.

Guaranteed by every channel:

- C-1 Frames arrive whole, in the order of ``send``, each exactly once.
- C-2 ``send`` never waits for the other side, and takes its pieces as they are at that moment: the
  caller may change or free their memory when it returns. (`BlockingChannel.send` waits instead.)
- C-3 A channel reads while it has something to write, so two ends that both send without limit
  don't block each other.
- C-4 ``closed`` is called once, with None at the end of the stream, or with what broke it. No frame
  is delivered after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from asyncwg._wire.frames import Buffer

Closed = Callable[[BaseException | None], None]


class Channel(Protocol):
    """One end, on an event loop. Its frames go to the ``deliver`` it was made with."""

    def send(self, pieces: Sequence[Buffer]) -> None:
        """Send one frame. After the end of the stream this does nothing."""
        ...

    @property
    def backlog(self) -> int:
        """Bytes that were sent and are not yet on their way."""
        ...

    def close(self) -> None:
        """End it from this side; what is unsent is dropped and ``closed`` is not called."""
        ...
