"""Where everybody is: stacks on demand, reports of calls that hang, and whether ranks still answer."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from asyncwg._driver.calls import Calls
from asyncwg._driver.pending import Pending
from asyncwg._driver.process import Processes
from asyncwg._driver.rank import Rank
from asyncwg._driver.stacks import HangReport, Stacks, parse
from asyncwg._wire.frames import Kind, pack
from asyncwg._wire.launch import STACKS_SIGNAL

_STACKS_WAIT: Final = 0.3
"""Seconds for the stacks of silent ranks when a call fails: the caller has its error within a second."""
_LOOKS: Final = 10
"""How often in ``hang_after`` seconds somebody looks for calls that hang."""


class Watch:
    """Looks at the ranks of one generation. Belongs to the group's event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ranks: Sequence[Rank],
        calls: Calls,
        processes: Processes,
        group: str,
    ) -> None:
        self._loop = loop
        self._ranks = ranks
        self._calls = calls
        self._processes = processes
        self._group = group
        self._hang_after = math.inf
        self._tell: Callable[[HangReport], None] = lambda _report: None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pings: dict[int, asyncio.Future[bytes]] = {}

    def start(self, hang_after: float, tell: Callable[[HangReport], None]) -> None:
        """Report calls that run longer than ``hang_after`` seconds, each once, to ``tell``."""
        self._hang_after = hang_after
        self._tell = tell
        self._look([])

    def tell_with(self, tell: Callable[[HangReport], None]) -> None:
        """Take who is told of calls that have a limit of their own."""
        self._tell = tell

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def close(self) -> None:
        """Look no more, and wait for the reports that are being made; the ranks' pipes are closed."""
        self.stop()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def stacks(self, ranks: Sequence[int] | None = None, timeout: float = 2.0) -> Stacks:
        """Ask ranks for their Python stacks; those that don't answer in time are told as such."""
        asked = range(len(self._ranks)) if ranks is None else ranks
        texts = await asyncio.gather(*(self._text_of(rank, timeout) for rank in asked))
        return Stacks(tuple(parse(*each) for each in zip(asked, texts, strict=True)))

    async def _text_of(self, index: int, timeout: float) -> str:
        """Return a rank's stack, "" where it does not answer.

        Its control lane is asked first, whose thread reads the frames while it holds the GIL. A signal's
        handler can't hold it: what it reads may be changing, and that has ended processes with busy threads
        within some thousand looks. So the signal is for a rank that does not answer: it is stuck with the
        GIL, and then nothing changes.
        """
        rank = self._ranks[index]
        if not self._processes.alive(index):
            return ""
        text = await self._asked(rank, timeout / 2, with_stack=True)
        if text is not None:
            return text.decode("utf-8", "replace")
        if not self._processes.alive(index):
            return ""
        ask = functools.partial(self._processes.signal, index, STACKS_SIGNAL)
        return await rank.stacks.take(rank.stacks.expect(ask), timeout / 2)

    def explain(self, pending: Pending, error: Exception, told: Callable[[], None]) -> None:
        """Add to ``error`` where the ranks are that have not answered, then call ``told``."""

        async def add() -> None:
            try:
                stacks = await self.stacks(pending.silent, _STACKS_WAIT)
                error.add_note(f"where the silent ranks are:\n{stacks}")
            finally:
                told()

        self._spawn(add())

    def report(self, pending: Pending, after: float) -> None:
        """Report one call that hangs, with everybody's stacks, if it has not been reported."""
        if self._calls.get(pending.call_id) is not pending:
            return
        pending.hung = True
        self._spawn(self._report(pending, after))

    async def ping(self, timeout: float) -> list[float | None]:
        """Return the seconds in which each rank's control lane answers; None where it does not."""
        pings = (self._ping(rank, timeout) for rank in self._ranks)
        return list(await asyncio.gather(*pings))

    def pong(self, number: int, text: bytes) -> None:
        """Take a rank's answer, with its stack if that was asked for."""
        answer = self._pings.get(number)
        if answer is not None and not answer.done():
            answer.set_result(text)

    def _look(self, seen: list[int]) -> None:
        """Look for calls that were there `_LOOKS` looks ago. No call pays for a timer of its own."""
        self._timer = self._loop.call_later(
            self._hang_after / _LOOKS, self._look, [self._calls.last_id, *seen[:_LOOKS]]
        )
        if len(seen) > _LOOKS:
            for pending in self._calls.unreported(up_to=seen[-1]):
                self.report(pending, self._hang_after)

    async def _report(self, pending: Pending, after: float) -> None:
        stacks = await self.stacks()
        if self._calls.get(pending.call_id) is pending:
            self._tell(
                HangReport(
                    self._group, pending.label, pending.call_id, after, pending.silent, stacks
                )
            )

    async def _ping(self, rank: Rank, timeout: float) -> float | None:
        start = time.perf_counter()  # a loop's own time may have a resolution of 1 ms
        if await self._asked(rank, timeout) is None:
            return None
        return time.perf_counter() - start

    async def _asked(self, rank: Rank, timeout: float, *, with_stack: bool = False) -> bytes | None:
        number = self._calls.next_id()
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._pings[number] = answer
        rank.control.send(pack(Kind.PING, number, aux=int(with_stack)))
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            return None
        finally:
            del self._pings[number]

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
