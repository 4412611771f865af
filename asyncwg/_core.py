"""The inside of a group: its methods, its generation, and the state that follows from it.

`WorkerGroup` and its views are what users see; they have as few names of their own as can be, because every
name there is one that no registered method can have.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from asyncwg._catalog import Catalog
from asyncwg._driver.gang import Gang
from asyncwg._driver.launch import Spec
from asyncwg._driver.stacks import HangReport
from asyncwg._generation import Generation
from asyncwg._job import CallOptions, Job, Quick, Target
from asyncwg._restart import RestartPolicy, Supervisor
from asyncwg._sender import Sender
from asyncwg._stream import Feed, Stream
from asyncwg.call import Call
from asyncwg.decorator import PerRank
from asyncwg.errors import (
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    UsageError,
    WorkerDiedError,
    WorkerGroupError,
    WorkerStartError,
)
from asyncwg.resource_pool import ResourcePool

_log: Final = logging.getLogger("asyncwg")

WINDOW_CALLS: Final = 64
"""Unanswered calls of a rank beyond which ``ready`` waits: enough to keep a rank busy with calls of
20 us while a producer does something else for a millisecond."""
WINDOW_BYTES: Final = 4 << 20
"""Bytes that wait for one rank beyond which ``ready`` waits; larger values go another way."""


class Host(Protocol):
    """Lets other programs call a group; see `asyncwg._attach.host`."""

    async def claim(self) -> None:
        """Take the group's name, before any process exists.

        Raises:
            UsageError: it is taken, or there is no safe place for it.
        """
        ...

    def changed(self, cause: Exception | None = None) -> None:
        """Take note that the group has started, or has broken for ``cause``."""
        ...

    async def close(self, errors: Sequence[Exception] = ()) -> None:
        """The group has ended: tell everybody, and give the name back. May be called twice.

        Args:
            errors: what ``close()`` of the ranks raised.
        """
        ...

    def ticket(self) -> Any:
        """Return what another process needs to attach."""
        ...


class Core:
    """What a group is made of. Belongs to the event loop that starts it.

    Args:
        spec: what each rank builds, and how it is started.
        pool: where it runs.
        catalogs: what its class and each of its roles can be asked for.
        options: options of its calls.
        start_timeout: seconds until a start fails.
        hang_after: seconds after which a call is reported; None for never.
        on_hang: told of such calls.
        policy: when it is started again by itself.
    """

    own: bool = True
    """Whether this program runs it, and orders the calls of all."""

    def __init__(
        self,
        spec: Spec,
        pool: ResourcePool,
        catalogs: Mapping[str | None, Catalog],
        options: CallOptions,
        *,
        start_timeout: float | None,
        hang_after: float | None,
        on_hang: Callable[[HangReport], None] | None,
        policy: RestartPolicy | None,
    ) -> None:
        self.spec: Final = spec
        self.cls: Final = spec.cls
        self.name: Final = spec.name
        self.pool: Final = pool
        self.catalogs: Final = catalogs
        self.catalog: Final = catalogs[None]
        """Of the class itself."""
        self.options: Final = options
        self.everyone: Final = Target(tuple(range(pool.world_size)), False)
        self.supervisor: Final = Supervisor(self, spec.name, policy)
        self._start_timeout = start_timeout
        self._hang_after = hang_after
        self._on_hang = on_hang
        self._generation: Generation | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "new"
        self._facade: weakref.ref[Any] | None = None
        self._finalizer: Any = None
        self._coming: asyncio.Task[None] | None = None
        """What starts it, while it is being started."""
        self._failed: Exception | None = None
        """Why it could not be started again, where that will be tried again."""
        self._stopped: asyncio.Future[None] | None = None
        """Done when nothing is left of it; None while nobody has shut it down."""
        self.host: Host | None = None
        """Lets other programs attach, where they may."""

    @property
    def state(self) -> str:
        """``"new"``, ``"starting"``, ``"running"``, ``"broken"`` or ``"closed"``."""
        if self._state == "running" and self.gang is not None and self.gang.broken is not None:
            return "broken"
        return self._state

    @property
    def facade(self) -> Any:
        """What users hold; None when they have dropped it."""
        return None if self._facade is None else self._facade()

    @property
    def gang(self) -> Gang | None:
        """The processes; None while there are none."""
        return None if self._generation is None else self._generation.gang

    @property
    def port(self) -> int:
        """Where the ranks meet for ``torch.distributed``; 0 while they don't run."""
        return 0 if self._generation is None else self._generation.port

    @property
    def sender(self) -> Sender | None:
        """The way to the ranks; None while there is none."""
        return None if self._generation is None else self._generation.sender

    async def ready(self, ranks: Sequence[int]) -> None:
        """Wait until each rank has room for another call."""
        await self.running().calls.ready(ranks, WINDOW_CALLS, WINDOW_BYTES)
        self.running()

    def submit(self, job: Job) -> Call[Any]:
        """Send a call. For proxies.

        The call of a generator method comes as a `Stream` instead.
        """
        sender = self.sender_for_call()
        if not job.method.is_stream:
            return sender.submit(job)
        feed = Feed()
        call = sender.submit(job._replace(feed=feed))
        stream: Any = Stream(call, feed, job.method.label)
        return stream  # type: ignore[no-any-return]

    def sender_for_call(self) -> Sender:
        """Return the way to the ranks for one more call, or say why there is none; see `running`."""
        sender = self._usable_sender()
        if self.supervisor.policy is not None:
            self.supervisor.count_call()
        return sender

    def _usable_sender(self) -> Sender:
        generation = self._generation
        try:
            usable = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            usable = False
        if not usable or generation is None or not generation.gang.usable:
            self.running()  # says what is wrong
        sender = None if generation is None else generation.sender
        if sender is None:
            raise InternalError(f"{self!r} can't take a call")
        return sender

    def submit_quick(self, quick: Quick) -> Call[Any]:
        """Send a call without arguments. For proxies."""
        generation = self._generation
        if (
            generation is None
            or generation.sender is None
            or not generation.gang.usable
            or self.supervisor.policy is not None
            or asyncio.get_running_loop() is not self._loop
        ):
            return self.submit(quick.job)
        return generation.sender.submit_quick(quick)

    def running(self) -> Gang:
        """Return the processes if they take calls.

        Raises:
            GroupClosedError: the group was not started, or was shut down.
            GroupBrokenError: it broke.
            UsageError: this is another loop than the group's.
        """
        gang = self.gang
        if gang is None or self._state != "running":
            if self._state == "closed":
                raise GroupClosedError(f"group {self.name!r} was shut down")
            if self._state == "starting":
                raise GroupBrokenError(f"group {self.name!r} is being started: await that first")
            if self._state == "broken":
                raise GroupBrokenError(
                    f"group {self.name!r} could not be started again, and will be tried again: "
                    f"{self._failed}"
                ) from self._failed
            raise GroupClosedError(
                f"group {self.name!r} has not been started: use 'async with' or await WorkerGroup.start(...)"
            )
        self._check_loop()
        gang.check()
        return gang

    def _check_loop(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is not self._loop:
            raise UsageError(
                f"group {self.name!r} belongs to the event loop that started it, and this is another thread "
                "or loop: use asyncwg.blocking for code without one"
            )

    async def start(self, facade: Any) -> None:
        """Start the group for the first time; ``facade`` is the `WorkerGroup`."""
        if self._state != "new":
            raise UsageError(f"group {self.name!r} was started before: make a new one")
        self._loop = asyncio.get_running_loop()
        check_selector(self._loop)
        self._state = "starting"
        self._facade = weakref.ref(facade)
        try:
            if self.host is not None:
                await self.host.claim()
            await self._come_up()
        except BaseException:
            self._state = "closed"
            if self.host is not None:
                await self.host.close()
            raise

    async def leave(self, grace: float = 5.0) -> None:
        """Its ``async with`` is left, or its user has dropped it: end it, if it is this program's own."""
        await self.stop(grace)

    async def detach(self) -> None:
        """Let go of a group that goes on without this program; see `WorkerGroup.detach`."""
        raise UsageError(
            f"group {self.name!r} is this program's own: shut it down, or start it with detached=True"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled, as a part of what is no group, such as a proxy.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"a part of group {self.name!r} can't be pickled: pickle the group itself, started with "
            "attachable=True or detached=True"
        )

    def ticket(self) -> Any:
        """Return what another process needs to call this group.

        Raises:
            UsageError: it can't be called by others.
        """
        if self.host is None:
            raise UsageError(
                f"group {self.name!r} belongs to this program and can't be pickled: start it with "
                "attachable=True or detached=True to let workers and other programs call it"
            )
        return self.host.ticket()

    async def stop(self, grace: float) -> None:
        """Shut it down; see `WorkerGroup.shutdown`."""
        if self._loop is None:
            self._state = "closed"  # it was never started
            return
        if self._stopped is not None and self._stopped.done():
            return
        self._check_loop()
        if self._stopped is not None:
            await asyncio.shield(self._stopped)
            return
        self._state = "closed"
        self._stopped = self._loop.create_future()
        self.supervisor.close()
        errors: list[Exception] = []
        try:
            await self._end_coming_up()
            generation, self._generation = self._generation, None
            if generation is None:
                return
            self._finalizer.detach()
            errors = await generation.stop(grace, "was shut down")
        finally:
            self._stopped.set_result(None)
            if self.host is not None:
                await self.host.close(errors)
        if errors:
            raise WorkerGroupError(f"{self.cls.__name__}.close failed in {self.name!r}", errors)

    def disown(self) -> None:
        """Let the caller call `leave`, when its user has dropped it. In any thread."""
        if self._finalizer is not None:
            self._finalizer.detach()

    async def restart(self, grace: float = 5.0, *, last: bool = True) -> None:
        """Start it again; see `WorkerGroup.restart`. ``last`` is for a start that closes it if it fails."""
        generation = self._generation
        if self._state != "broken" and (generation is None or self._state != "running"):
            self.running()
            return
        self._check_loop()
        self._state = "starting"
        self._generation = None
        if generation is not None:
            self._finalizer.detach()
        await self._come_up(generation, grace, last=last)

    async def _come_up(
        self, old: Generation | None = None, grace: float = 0.0, *, last: bool = True
    ) -> None:
        """Start a generation, in a task of its own, so that `stop` can end that too (E-6)."""
        coming = self._bring_up(old, grace)
        task = self._coming = asyncio.get_running_loop().create_task(coming)
        closed = GroupClosedError(f"group {self.name!r} was shut down while it was being started")
        try:
            await task
        except BaseException as error:
            if not last and self._stopped is None and isinstance(error, WorkerStartError):
                self._state, self._failed = "broken", error
                raise
            self._state = "closed"
            if old is not None and not old.gang.closed:  # it was cancelled before it could begin
                await old.stop(0, "was started again")
            self.supervisor.give_up(error if isinstance(error, Exception) else closed)
            if self.host is not None:
                self.host.changed(error if isinstance(error, Exception) else closed)
            caller = asyncio.current_task()
            if self._stopped is not None and not (caller is not None and caller.cancelling()):
                raise closed from None
            raise
        finally:
            self._coming = None
        self.supervisor.up_again()

    async def _bring_up(self, old: Generation | None, grace: float) -> None:
        states: list[Any] | None = None
        if old is not None:
            await old.stop(grace, "was started again")
            saved = self.supervisor.saved
            if saved.exists and self._having("load_state"):
                states = await saved.get()
        await self._start_generation(states)

    async def _end_coming_up(self) -> None:
        """Cancel a start that is under way, and wait until nothing is left of it, cancelled or not."""
        task = self._coming
        if task is None:
            return
        task.cancel()
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def save(self) -> None:
        """Keep what the ranks' ``save_state()`` returns; see `WorkerGroup.save`."""
        catalogs = self._having("save_state") or [self.catalog]  # which says that it has none
        jobs = [
            each.job_for(self.everyone, "save_state", (), {}, self.options) for each in catalogs
        ]
        # Not by `submit`: a save is no call after so many of which to save. All of them in one step: no
        # other call comes between the states of two roles.
        sender = self._usable_sender()
        calls = [sender.submit(job) for job in jobs]
        by_role = await asyncio.gather(*calls)
        roles = [each.role for each in catalogs]
        states = [dict(zip(roles, values, strict=True)) for values in zip(*by_role, strict=True)]
        await self.supervisor.saved.put(states)

    def _having(self, method: str) -> list[Catalog]:
        """Return the roles, and the class itself, that have ``method``."""
        return [
            each for each in self.catalogs.values() if callable(getattr(each.cls, method, None))
        ]

    async def _start_generation(self, states: list[Any] | None) -> None:
        loop, facade = self._loop, None if self._facade is None else self._facade()
        if loop is None or facade is None:
            raise GroupClosedError(f"group {self.name!r} was dropped by its user")
        generation = await Generation.start(loop, self.spec, self.pool, self._start_timeout)
        sender = generation.open(loop, facade, self.supervisor, has_async=self.spec.has_async)
        loads = [] if states is None else self._loads(states)
        # Before anybody else's calls: nobody sees a rank without its state.
        await generation.settle(sender, loads, functools.partial(self._broke, sender))
        gang = generation.gang
        if self._hang_after is None:
            gang.watch.tell_with(self._tell_hang)
        else:
            gang.watch.start(self._hang_after, self._tell_hang)
        self._generation = generation
        self._state = "running"
        self._finalizer = weakref.finalize(facade, generation.let_go(loop))
        self._finalizer.atexit = False
        if self.host is not None:
            self.host.changed()

    def _loads(self, states: list[Any]) -> list[Job]:
        """Return the calls that give each rank the states that it has saved, role by role."""
        options = replace(self.options, timeout=self._start_timeout)
        return [
            each.job_for(
                self.everyone,
                "load_state",
                (PerRank([state[each.role] for state in states]),),
                {},
                options,
            )
            for each in self._having("load_state")
            if all(each.role in state for state in states)
        ]

    def _broke(self, sender: Sender, cause: Exception) -> None:
        def unsent(job: Job) -> Exception:
            label = job.method.label
            if isinstance(cause, WorkerDiedError):
                died = WorkerDiedError(
                    cause.rank,
                    cause.pid,
                    cause.exit_code,
                    signal_name=cause.signal_name,
                    stderr_tail=cause.stderr_tail,
                    crash_stack=cause.crash_stack,
                    oom_killed=cause.oom_killed,
                    method=label,
                    stderr_note=cause.stderr_note,
                    guardian_pid=cause.guardian_pid,
                )
                died.add_note(f"{label} had not been sent: it waited for the calls it was given")
                return died
            error = GroupBrokenError(f"{label} had not been sent when group {self.name!r} broke")
            error.__cause__ = cause
            return error

        sender.fail_waiting(unsent)
        self.supervisor.broke(cause)
        if self.host is not None:
            self.host.changed(cause)

    def _tell_hang(self, report: HangReport) -> None:
        _log.warning("%s", report)
        if self._on_hang is not None:
            self._on_hang(report)


def check_selector(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse a loop that can't watch descriptors, before any process exists."""
    read, write = os.pipe()
    try:
        loop.add_reader(read, lambda: None)
        loop.remove_reader(read)
    except NotImplementedError:
        raise UsageError(
            f"asyncwg needs an event loop with add_reader, and {type(loop).__name__} has none: use "
            "asyncio's selector loop or uvloop"
        ) from None
    finally:
        os.close(read)
        os.close(write)
