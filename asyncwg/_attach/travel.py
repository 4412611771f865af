"""A group that has arrived in another process, as an argument or in a pickle."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

from asyncwg._attach.handle import AttachedCore
from asyncwg._job import Job, Quick
from asyncwg.call import Call
from asyncwg.errors import GroupClosedError, UsageError


class TravellingCore(AttachedCore):
    """A group that has arrived in another process: it attaches in each loop that uses it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state = "running"
        self._here: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AttachedCore] = (
            weakref.WeakKeyDictionary()
        )
        self._make: Callable[[], AttachedCore] = lambda: AttachedCore(*args, **kwargs)
        self._owner: weakref.ref[Any] | None = None

    def arrive(self, facade: Any) -> None:
        """Take who holds it."""
        self._owner = weakref.ref(facade)

    def here(self) -> AttachedCore:
        """Return the handle of the running loop, attached now if it is not."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                f"group {self.name!r} is called without an event loop: call it in an async def method with "
                "await, or give asyncio.run(...) the coroutine that awaits it"
            ) from None
        core = self._here.get(loop)
        facade = None if self._owner is None else self._owner()
        if core is None or _is_over(core):
            if facade is None:
                raise GroupClosedError(f"group {self.name!r} was dropped by its user")
            core = self._here[loop] = self._make()
            core.begin(facade)
        return core

    @property
    def gang(self) -> Any:
        """The way to the host in the running loop; None where there is none."""
        try:
            core = self._here.get(asyncio.get_running_loop())
        except (RuntimeError, AttributeError):  # also before it is made
            return None
        return None if core is None else core.gang

    @property
    def state(self) -> str:
        """As the host has told this loop; ``"new"`` before it is attached here."""
        try:
            core = self._here.get(asyncio.get_running_loop())
        except RuntimeError:
            core = None
        return "new" if core is None else core.state

    def submit(self, job: Job) -> Call[Any]:
        """Send a call. For proxies."""
        return self.here().submit(job)

    def submit_quick(self, quick: Quick) -> Call[Any]:
        """Send a call without arguments. For proxies."""
        return self.here().submit_quick(quick)

    def running(self) -> Any:
        """Return the way to the host if it takes calls."""
        return self.here().running()

    async def start(self, facade: Any) -> None:
        """Attach, and wait until that is done."""
        del facade
        core = self.here()
        await core.opened()
        core.running()

    async def detach(self) -> None:
        """Let go, in this loop."""
        core = self._here.pop(asyncio.get_running_loop(), None)
        if core is not None:
            await core.opened()
            await core.detach()

    async def stop(self, grace: float) -> None:
        """End the group."""
        await self.here().stop(grace)

    async def restart(self, grace: float = 5.0, *, last: bool = True) -> None:
        """Have the host start the group again."""
        await self.here().restart(grace, last=last)

    async def save(self) -> None:
        """Have the host keep what the ranks' ``save_state()`` returns."""
        await self.here().save()


def _is_over(core: AttachedCore) -> bool:
    gang = core.remote
    return gang is None or gang.closed or gang.unopened is not None
