"""The few operations that every library is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Adapter(ABC):
    """One group of worker processes. Each operation ends when its answers are in the controller.

    A library that can't do one of them leaves it out and is reported as not having it.
    """

    @abstractmethod
    async def start(self, n: int) -> None:
        """Start ``n`` processes and wait until each has answered with torch loaded."""

    @abstractmethod
    async def close(self, last: bool) -> None:
        """End the processes; with ``last`` also whatever the library keeps running beside them."""

    @abstractmethod
    async def pids(self) -> list[int]:
        """Process ids of the workers, by rank."""

    async def one(self) -> None:
        """Call one worker without arguments."""
        raise NotImplementedError

    async def all(self) -> None:
        """Call all workers without arguments."""
        raise NotImplementedError

    async def pipelined(self, calls: int) -> None:
        """Have that many calls to one worker in flight at once."""
        raise NotImplementedError

    async def small(self, tensor: Tensor) -> list[float]:
        """Send a small tensor to all; each answers with its last element."""
        raise NotImplementedError

    async def broadcast(self, tensor: Tensor) -> list[float]:
        """Send a big one to all; each answers with its last element."""
        raise NotImplementedError

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        """Send a chunk to each; each answers with its last element."""
        raise NotImplementedError

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Send a chunk to each; each answers with the chunk times one."""
        raise NotImplementedError

    async def gather(self, numel: int) -> Tensor:
        """Have each make that many ones, and return all of them as one tensor."""
        raise NotImplementedError
