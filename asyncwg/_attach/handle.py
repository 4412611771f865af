"""Handles on groups that another program hosts: what `Core` is for a group of one's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final

from asyncwg._attach import wire
from asyncwg._attach.client import RemoteGang
from asyncwg._attach.connect import TIMEOUT, open_gang
from asyncwg._attach.watched import Watched
from asyncwg._attach.wire import Info, Ticket
from asyncwg._catalog import Catalog
from asyncwg._core import Core, check_selector
from asyncwg._driver.launch import Spec
from asyncwg._job import CallOptions, Job, Quick
from asyncwg._sender import Sender
from asyncwg._wire.frames import NO_METHOD
from asyncwg._wire.launch import SESSION_VARIABLE
from asyncwg._worker import context
from asyncwg.call import Call
from asyncwg.errors import (
    GroupBrokenError,
    GroupClosedError,
    UsageError,
    WorkerGroupError,
)
from asyncwg.resource_pool import ResourcePool

_EXIT_WAIT: Final = 10.0
"""Seconds beyond the grace that the process of a host has to end."""


class _Link:
    """Stands for a generation: the way to the host, and the sender that uses it."""

    def __init__(self, gang: Any, sender: Sender) -> None:
        self.gang = gang
        self.sender = sender

    @property
    def port(self) -> int:
        state = self.gang.state
        return 0 if state is None else int(state.port)


class AttachedCore(Core):
    """A group that another program hosts, for one event loop.

    Args:
        ticket: which group, and what it offers.
        spec: as for `Core`.
        pool: likewise.
        catalogs: likewise.
        options: likewise.
    """

    own = False

    def __init__(
        self,
        ticket: Ticket,
        spec: Spec,
        pool: ResourcePool,
        catalogs: Mapping[str | None, Catalog],
        options: CallOptions,
    ) -> None:
        super().__init__(
            spec,
            pool,
            catalogs,
            options,
            start_timeout=None,
            hang_after=None,
            on_hang=None,
            policy=None,
        )
        self._ticket = ticket
        self._keeper: AsyncGenerator[None, None] | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def remote(self) -> RemoteGang | None:
        """The way to the host."""
        gang: Any = self.gang
        return gang  # type: ignore[no-any-return]

    @property
    def state(self) -> str:
        """``"new"``, ``"starting"``, ``"running"``, ``"broken"`` or ``"closed"``."""
        gang = self.remote
        told = None if gang is None or gang.closed or gang.broken is not None else gang.state
        if told is not None and self._state == "running":
            return told.state
        return super().state

    def ticket(self) -> Ticket:
        """Return what another process needs to attach."""
        gang = self.remote
        session = self._ticket.session if gang is None else gang.session
        return self._ticket._replace(session=session)

    def submit(self, job: Job) -> Call[Any]:
        """Send a call. For proxies."""
        if context.place is not None:
            self._refuse_to_wait_for_itself(job)
        return super().submit(job)

    def submit_quick(self, quick: Quick) -> Call[Any]:
        """Send a call without arguments. For proxies."""
        if context.place is not None:
            self._refuse_to_wait_for_itself(quick.job)
        return super().submit_quick(quick)

    def adopt(self, facade: Any, gang: RemoteGang) -> None:
        """Take calls through ``gang``, for ``facade``, in the running loop."""
        loop = self._loop = asyncio.get_running_loop()
        self._facade = weakref.ref(facade)
        local: Any = gang
        sender = Sender(loop, local, facade, self.supervisor, has_async=self.spec.has_async)
        link: Any = _Link(gang, sender)
        gang.on_break = lambda cause: self._broke(sender, cause)
        gang.on_end = lambda: self._ended(sender)
        gang.watch.tell_with(self._tell_hang)
        self._generation = link
        self._state = "running"
        self._finalizer = weakref.finalize(facade, _let_go(loop, gang))
        self._finalizer.atexit = False
        # A loop that ends closes its generators: this one closes the way to the host.
        self._keeper = self._until_the_loop_ends(gang)
        with contextlib.suppress(StopIteration):
            self._keeper.__anext__().send(None)

    def begin(self, facade: Any) -> None:
        """Take calls at once, and send them when there is a way to the host."""
        info = self._ticket.info
        loop = asyncio.get_running_loop()
        check_selector(loop)
        gang = RemoteGang(loop, self.name, self.pool.world_size, info.meshes)
        self.adopt(facade, gang)
        sender = self.sender
        assert sender is not None
        opened: asyncio.Future[None] = loop.create_future()
        job = self.catalog.job_of(self.everyone, _attaching, (), {}, self.options)
        sender.hold_back(job, opened)
        self._opening = loop.create_task(self._open(gang, opened))

    async def opened(self) -> None:
        """Wait until there is a way to the host, or none."""
        if self._opening is not None:
            await asyncio.shield(self._opening)

    async def start(self, facade: Any) -> None:
        """Do nothing: a handle is attached when one gets it, and ``async with`` only lets go of it."""
        del facade
        self.running()

    async def leave(self, grace: float = 5.0) -> None:
        """Its ``async with`` is left: let go."""
        del grace
        await self.detach()

    async def detach(self) -> None:
        """Let go of the group, which goes on."""
        gang = self.remote
        if gang is not None and not gang.closed:
            self._check_loop()
            gang.close()
        self._state = "closed"

    async def stop(self, grace: float) -> None:
        """End the group; see `WorkerGroup.shutdown`."""
        gang = self.remote
        if gang is None or gang.closed or self._state != "running":
            self._state = "closed"
            return
        self._check_loop()
        await self.opened()
        state = gang.state
        errors: WorkerGroupError | None = None
        with Watched(0 if state is None or not state.own_process else state.pid) as host:
            try:
                await gang.ask("shutdown", grace)
            except WorkerGroupError as error:
                errors = error
            except (GroupClosedError, GroupBrokenError):
                pass  # it has ended meanwhile
            except asyncio.CancelledError:
                host.kill()
                raise
            finally:
                gang.close(GroupClosedError(f"group {self.name!r} was shut down"))
                self._state = "closed"
            await host.ended(grace + _EXIT_WAIT)
        if errors is not None:
            raise errors

    async def restart(self, grace: float = 5.0, *, last: bool = True) -> None:
        """Have the host start the group again."""
        del last
        await self._ask("restart", grace)

    async def save(self) -> None:
        """Have the host keep what the ranks' ``save_state()`` returns."""
        await self._ask("save", None)

    async def _ask(self, request: str, argument: Any) -> None:
        self._check_loop()
        gang = self.remote
        if gang is None:
            self.running()
            return
        await self.opened()
        await gang.ask(request, argument)

    async def _open(self, gang: RemoteGang, opened: asyncio.Future[None]) -> None:
        ticket = self._ticket
        try:
            await open_gang(gang, ticket.directory, ticket.name, ticket.token, TIMEOUT)
        except Exception as error:  # noqa: BLE001  # told to every call that waits
            gang.fail_to_open(error)
        except BaseException:
            gang.fail_to_open(GroupClosedError(f"attaching to {self.name!r} was cancelled"))
            raise
        finally:
            if not opened.done():
                opened.set_result(None)

    def _ended(self, sender: Sender) -> None:
        gang = self.remote
        if gang is None or gang.broken is None:
            self._state = "closed"

        def unsent(job: Job) -> Exception:
            try:
                sender.check()
            except Exception as error:  # noqa: BLE001  # what would be raised at the call
                error.add_note(f"{job.method.label} had not been sent")
                return error
            return GroupClosedError(
                f"{job.method.label} had not been sent when {self.name!r} ended"
            )

        sender.fail_waiting(unsent)
        if self._finalizer is not None:
            self._finalizer.detach()
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            with contextlib.suppress(StopIteration):
                keeper.aclose().send(None)

    async def _until_the_loop_ends(self, gang: RemoteGang) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._keeper = None
            gang.close()

    def _refuse_to_wait_for_itself(self, job: Job) -> None:
        """Raise if a ``def`` method calls a ``def`` method of its own group: its lane is busy with itself."""
        place = context.place
        gang = self.remote
        session = self._ticket.session if gang is None or not gang.session else gang.session
        if (
            place is not None
            and context.running.get() is not None
            and not job.method.is_async
            and place.rank in job.target.ranks
            and session == os.environ.get(SESSION_VARIABLE)
            # Where ``def`` methods run; ``async def`` ones have a thread of their own.
            and threading.current_thread() is threading.main_thread()
        ):
            raise UsageError(
                f"{job.method.label} is called by a def method of its own group {self.name!r}, on the "
                "same rank, and def methods run one at a time: it would wait for itself. Call the method "
                "directly on self, or make one of the two an async def method"
            )


def make_core(kind: type[AttachedCore], ticket: Ticket, cls: type | None = None) -> AttachedCore:
    """Return the inside of a handle on the group of ``ticket``.

    Args:
        kind: which class.
        ticket: which group, and what it offers.
        cls: this program's own class, where it has one; else the host's.
    """
    info = ticket.info
    cls = info.cls if cls is None else cls
    pool = ResourcePool(info.store, use_gpu=False)
    catalogs = {role: _catalog(info, cls, role) for role in (*info.roles, None)}
    spec = Spec(
        name=ticket.name,
        cls=cls,
        args=(),
        kwargs={},
        roles={},
        addresses=info.addresses,
        limits={},
        to_device=(),
        has_async=info.has_async,
        local_ranks=pool.local_rank_list(),
        local_world_sizes=pool.local_world_size_list(),
        worker_env={},
        start_method=None,
        preload=None,
        output="prefix",
        error_grace=0.0,
        executor="process",
        arena_limit=None,
        arena_timeout=0.0,
    )
    return kind(ticket, spec, pool, catalogs, CallOptions(on_error=info.on_error))


def _catalog(info: Info, cls: type, role: str | None) -> Catalog:
    """Return what one role can be asked for, by the host's numbers and with its modes."""
    roles = list(info.roles)
    place = 0 if role is None else 1 + roles.index(role)
    catalog = Catalog(cls if role is None else info.roles[role], role, NO_METHOD - place)
    catalog.modes.update(info.modes.get(role, {}))
    numbers = {address: number for number, address in enumerate(info.addresses)}
    for proxy, method in list(catalog.methods.items()):
        if method.address in numbers:
            catalog.numbers[proxy] = numbers[method.address]
        else:
            del catalog.methods[proxy]  # of this program's class, and not of the host's
    return catalog


async def attach(
    name: str, cls: type | None, timeout: float | None
) -> tuple[AttachedCore, RemoteGang]:
    """Attach to the group ``name``; see `WorkerGroup.attach`."""
    loop = asyncio.get_running_loop()
    check_selector(loop)
    gang = RemoteGang(loop, name, 0, {})
    directory, packed = await open_gang(gang, None, name, "", timeout)
    state = gang.state
    assert state is not None
    try:
        info = _read_info(packed, name, cls)
        gang.grow(sum(info.store))
        ticket = Ticket(directory, name, state.token, state.session, info)
        return make_core(AttachedCore, ticket, cls), gang
    except BaseException:
        gang.close()
        raise


def _read_info(packed: Any, name: str, cls: type | None) -> Info:
    try:
        return wire.unpack_info(packed, cls)
    except Exception as error:
        raise UsageError(
            f"the class of group {name!r} can't be unpickled in this program: {type(error).__name__}: "
            f"{error}. Make its module importable here, or give attach() this program's own class"
        ) from error


def _let_go(loop: asyncio.AbstractEventLoop, gang: RemoteGang) -> Callable[[], None]:
    def tell_loop() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(gang.close)

    return tell_loop


def _attaching() -> None:
    """Stand for a method."""
