"""Workers that are chosen one by one."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncwg import Dispatch, Worker, register


class Chosen(Worker):
    """Says which rank it is, at once or when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[Any, asyncio.Event] = {}
        self.cancelled: list[Any] = []
        self.running = 0
        self.most = 0
        self.full = asyncio.Event()

    @register()
    def who(self, value: Any = None) -> tuple[int, Any]:
        return self.rank, value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def whole(self, rows: list[int]) -> list[int]:
        return rows

    @register()
    async def hold(self, name: Any) -> tuple[int, Any]:
        """Answer when `let` is called with the name."""
        try:
            await self.events.setdefault(name, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        return self.rank, name

    @register()
    async def hold_strings(self, value: Any) -> Any:
        """Hold strings; answer at once to anything else."""
        return (await self.hold(value))[1] if isinstance(value, str) else value

    @register(max_concurrency=3)
    async def counted(self, value: Any) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running == 3:
            self.full.set()
        await self.full.wait()  # the first ones wait for as many as may run beside each other
        await asyncio.sleep(0)
        self.running -= 1
        return value

    @register()
    async def let(self, name: Any) -> None:
        self.events.setdefault(name, asyncio.Event()).set()

    @register()
    async def holding(self) -> list[Any]:
        return list(self.events)

    @register()
    async def were_cancelled(self) -> list[Any]:
        return self.cancelled

    @register()
    async def most_running(self) -> int:
        return self.most

    @register()
    def inverse(self, value: float) -> float:
        return 1 / value

    @register()
    def items(self) -> Any:
        yield 1
