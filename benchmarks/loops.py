"""The two event loops that everything is measured on."""

from __future__ import annotations

import asyncio

LOOPS = ("uvloop", "asyncio")


def runner(name: str) -> asyncio.Runner:
    """Return a runner on the loop of that name."""
    if name == "uvloop":
        import uvloop

        return asyncio.Runner(loop_factory=uvloop.new_event_loop)
    return asyncio.Runner()
