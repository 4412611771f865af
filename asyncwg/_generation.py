"""One generation of a group: its processes, its rendezvous, its hold on the pool's devices."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from asyncwg import distributed
from asyncwg._driver.gang import Gang
from asyncwg._driver.guardian import guardian
from asyncwg._driver.launch import Spec, encode_init, plan_launch
from asyncwg._inline import InlineGang
from asyncwg._job import Job
from asyncwg._sender import Repeater, Sender
from asyncwg.errors import GroupClosedError, WorkerGroupError, WorkerStartError
from asyncwg.resource_pool import ResourcePool


class Generation:
    """Made by `start`; a restart makes another one. Belongs to the loop it was started in.

    Attributes:
        gang: its processes.
        sender: the way to them.
        port: where its ranks meet for ``torch.distributed``.
    """

    def __init__(
        self, gang: Gang, pool: ResourcePool, held: str, store: distributed.Store | None
    ) -> None:
        self._pool = pool
        self._held = held
        self._store = store
        self.port = 0 if store is None else store.port
        self.gang = gang
        self.sender: Sender | None = None

    @classmethod
    async def start(
        cls, loop: asyncio.AbstractEventLoop, spec: Spec, pool: ResourcePool, timeout: float | None
    ) -> Generation:
        """Start all ranks and wait until they are ready.

        Raises:
            UsageError: the class can't be pickled.
            ResourceError: the pool's devices are taken.
            WorkerStartError: what each failed rank raised.

        However it ends but well, nothing is left of it.
        """
        if spec.executor == "inline":
            fake: Any = InlineGang(loop, spec)
            await fake.start(timeout)
            return cls(fake, pool, "", None)
        init = encode_init(spec)
        session = uuid.uuid4().hex
        held = f"{spec.name} ({session[:6]})"
        devices = pool.acquire(held)
        store: distributed.Store | None = None
        try:
            store = distributed.Store(loop)
            keeper = guardian()
            launch = plan_launch(spec, session, devices, store.port, keeper, init)
            gang = Gang(loop, launch, keeper)
            await gang.start(timeout)
        except BaseException:
            pool.release(held)
            if store is not None:
                store.close()
            raise
        return cls(gang, pool, held, store)

    def open(
        self, loop: asyncio.AbstractEventLoop, group: Any, repeater: Repeater, *, has_async: bool
    ) -> Sender:
        """Take calls from now on, through what is returned."""
        self.sender = Sender(loop, self.gang, group, repeater, has_async=has_async)
        return self.sender

    async def settle(
        self, sender: Sender, loads: Sequence[Job], on_break: Callable[[Exception], None]
    ) -> None:
        """Have the ranks take back their saved state; from then on ``on_break`` is told of a break.

        Args:
            sender: from `open`.
            loads: the calls of ``load_state``, one after another; none where there is no state.
            on_break: called with what has broken the group.

        Raises:
            WorkerStartError: what each failed rank raised, or what has broken the group since its
                ranks were ready.

        However it ends but well, nothing is left of the generation.
        """
        what = ""
        try:
            for load in loads:
                what = f"{load.method.label} failed: "
                await sender.submit(load)
            what, self.gang.on_break = "", on_break
            if self.gang.broken is not None:
                raise self.gang.broken
        except BaseException as error:
            await self.stop(0, "could not start")
            if not isinstance(error, Exception):
                raise
            told = error.exceptions if isinstance(error, WorkerGroupError) else [error]
            raise WorkerStartError(f"{what}the group could not start", told) from None

    async def stop(self, grace: float, why: str) -> list[Exception]:
        """End it within ``grace`` seconds; return what ``close()`` raised. Cancelling it kills at once."""
        self._fail_waiting(why)
        try:
            return await self.gang.stop(grace)
        finally:
            self.release()

    def _fail_waiting(self, why: str) -> None:
        def unsent(job: Job) -> Exception:
            return GroupClosedError(f"{job.method.label} had not been sent when the group {why}")

        if self.sender is not None:
            self.sender.fail_waiting(unsent)

    def release(self) -> None:
        """Give back the devices and the port."""
        self._pool.release(self._held)
        if self._store is not None:
            self._store.close()

    def let_go(self, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
        """Return what ends it when its user has dropped the group without shutting it down."""

        def end() -> None:
            self._fail_waiting("was dropped by its user")
            self.gang.abandon_all()
            self.release()

        def tell_loop() -> None:
            if not loop.is_closed():  # else its sockets go with it, and the guardian does the rest
                loop.call_soon_threadsafe(end)

        return tell_loop
