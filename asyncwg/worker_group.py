"""``WorkerGroup``: the processes of one class, driven from one event loop; ``ClassWithInitArgs``."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Self, TypeVar

from asyncwg import distributed
from asyncwg._driver.gang import Gang
from asyncwg._driver.launch import Spec
from asyncwg._driver.stacks import HangReport, Stacks
from asyncwg._generation import Generation
from asyncwg._restart import RestartPolicy, Supervisor
from asyncwg._sender import CallOptions, Job, Quick, Sender, Target, nearest
from asyncwg._surface import WINDOW_BYTES, WINDOW_CALLS, Surface, View
from asyncwg.call import Call
from asyncwg.decorator import (
    Method,
    MethodOptions,
    PerRank,
    kind_of,
    methods_of,
    resolve_mode,
    unregistered_hint,
)
from asyncwg.errors import (
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    UsageError,
    WorkerGroupError,
)
from asyncwg.mesh import check_mesh
from asyncwg.resource_pool import ResourcePool

__all__ = ["ClassWithInitArgs", "RestartPolicy", "WorkerGroup"]

T = TypeVar("T")

_log: Final = logging.getLogger("asyncwg")

RESERVED: Final = frozenset(
    [
        "any",
        "map",
        "ready",
        "share",
        "link",
        "trace",
        "metrics",
        "check_health",
        "attach",
        "from_detached",
        "detach",
        "union",
        "barrier",
        "logs",
        "debug",
        "worker_names",
        "workers",
        "resource_pool",
        "spawn",
        "fuse",
        "stacks",
        "restart",
        "dp_size",
        "state",
        "alive",
        "name",
        "pids",
        "start",
        "shutdown",
        "master_address",
        "master_port",
        "start_worker_aliveness_check",
    ]
)
"""Names that are the group's, now or later."""
_START_METHODS: Final = (None, "forkserver", "spawn")


class ClassWithInitArgs(Generic[T]):
    """A class and the arguments to build it with, in every rank. Calling it builds the object here.

    A group that uses it does not change it.

    Args:
        cls: the worker's class, usually a subclass of `Worker`.
        *args: for its ``__init__``.
        **kwargs: likewise.
    """

    def __init__(self, cls: type[T], *args: Any, **kwargs: Any) -> None:
        if not isinstance(cls, type):
            raise UsageError(f"ClassWithInitArgs takes a class first, not {cls!r}")
        self.cls = cls
        self.args = args
        self.kwargs = kwargs
        self.fused_worker_used = False

    def __call__(self) -> T:
        """Build the object."""
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"ClassWithInitArgs({self.cls.__qualname__})"


class WorkerGroup(Surface):
    """The ranks of one class, one process each, and their registered methods as awaitables.

    ``async with WorkerGroup(pool, cls_with_init) as wg`` starts and stops it. ``await
    wg.method(...)`` calls a method on its ranks as its ``@register`` says. It belongs to the event
    loop that started it.

    Args:
        resource_pool: how many ranks, and their devices.
        cls_with_init: what each rank builds.
        name: for messages, output and ``WG_PREFIX``; the class's name if not given.
        worker_env: variables for the workers. One that a library may read when it is loaded makes
            each worker a fresh interpreter, which starts slower.
        start_method: ``"forkserver"`` (fork the guardian), ``"spawn"`` (a fresh interpreter), or
            None to choose.
        start_timeout: seconds until a start fails; None for no limit.
        preload: modules to import before forking; None for torch, and tensordict if the controller
            uses it.
        output: ``"prefix"`` for whole lines with name and rank, ``"inherit"``, or a folder for a
            file per rank.
        error_grace: seconds that a call waits for the other ranks after the first has failed.
        on_error: what comes then: ``"abort"`` breaks the group off, ``"wait"`` leaves the others
            running.
        hang_after: seconds after which a call that still runs is reported, once, to the log ``asyncwg``
            with the stacks of all ranks; None for never.
        on_hang: called with each `HangReport` too.
        restart: start it again by itself when it breaks; see `RestartPolicy`.
        executor: ``"process"``, or ``"inline"`` for all ranks in this process, one after another: for
            tests and pdb, without process groups and without an environment of their own.
        arena_limit: bytes of large values in shared memory beyond which calls wait for room; None for half
            of the machine's memory.
        arena_timeout: seconds until a call that waits for room fails with `ResourceError`.

    Raises:
        TypeError: an option that does not exist.
        UsageError: a value that can't be right, or a method whose name is the group's own.
    """

    def __init__(
        self,
        resource_pool: ResourcePool,
        cls_with_init: ClassWithInitArgs[Any],
        *,
        name: str | None = None,
        worker_env: Mapping[str, str] | None = None,
        start_method: str | None = None,
        start_timeout: float | None = None,
        preload: Sequence[str] | None = None,
        output: str | os.PathLike[str] = "prefix",
        error_grace: float = 0.5,
        on_error: str = "abort",
        hang_after: float | None = 60.0,
        on_hang: Callable[[HangReport], None] | None = None,
        restart: RestartPolicy | None = None,
        executor: str = "process",
        arena_limit: int | None = None,
        arena_timeout: float = 30.0,
        **unknown: Any,
    ) -> None:
        _check_options(
            unknown, resource_pool, cls_with_init, start_method, executor, error_grace, hang_after
        )
        self.resource_pool: Final = resource_pool
        self.cls: Final[type] = cls_with_init.cls
        self._name = _check_name(self.cls.__name__ if name is None else name)
        self._start_timeout = start_timeout
        self._hang_after = hang_after
        self._on_hang = on_hang
        self.options: Final = CallOptions(on_error=on_error)
        self.methods: Final = methods_of(self.cls)
        self.modes: Final = {key: resolve_mode(m.options.mode) for key, m in self.methods.items()}
        self.numbers: Final = {
            method: i for i, method in enumerate(sorted({m.name for m in self.methods.values()}))
        }
        self.has_async: Final = _has_async(self.cls)
        self._refuse_reserved()
        limits = {m.name: m.options.max_concurrency for m in self.methods.values()}
        self._spec = Spec(
            name=self._name,
            cls=self.cls,
            args=cls_with_init.args,
            kwargs=dict(cls_with_init.kwargs),
            names=list(self.numbers),
            limits={name: limit for name, limit in limits.items() if limit is not None},
            to_device=[m.name for m in self.methods.values() if m.options.to_device],
            has_async=self.has_async,
            local_ranks=resource_pool.local_rank_list(),
            local_world_sizes=resource_pool.local_world_size_list(),
            worker_env=distributed.check_worker_env(worker_env),
            start_method=start_method,
            preload=None if preload is None else list(preload),
            output=output,
            error_grace=error_grace,
            executor=executor,
            arena_limit=arena_limit,
            arena_timeout=arena_timeout,
        )
        self._everyone = Target(tuple(range(resource_pool.world_size)), False)
        self._generation: Generation | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = "new"
        self._finalizer: Any = None
        self.supervisor: Final = Supervisor(self, self._name, restart)

    @property
    def group(self) -> WorkerGroup:  # type: ignore[override]  # a group is its own surface
        """Itself; a view has the group it is of."""
        return self

    @property
    def target(self) -> Target:  # type: ignore[override]  # follows the pool
        """All ranks."""
        return self._everyone

    @property
    def name(self) -> str:
        """The group's name."""
        return self._name

    @property
    def state(self) -> str:
        """``"new"``, ``"starting"``, ``"running"``, ``"broken"`` or ``"closed"``."""
        if self._state == "running" and self._gang is not None and self._gang.broken is not None:
            return "broken"
        return self._state

    @property
    def alive(self) -> bool:
        """Whether it runs and every process of it lives."""
        return self._state == "running" and self._gang is not None and self._gang.alive

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty before the start."""
        return [] if self._gang is None else self._gang.pids

    @property
    def worker_names(self) -> list[str]:
        """``name:rank``, by rank."""
        return [f"{self._name}:{rank}" for rank in self.target.ranks]

    @property
    def workers(self) -> list[View]:
        """One view per rank."""
        return [self[rank] for rank in self.target.ranks]

    @property
    def master_address(self) -> str:
        """Where the group's store for ``torch.distributed`` listens: loopback."""
        return distributed.MASTER_ADDRESS

    @property
    def master_port(self) -> int:
        """The store's port; 0 while the group does not run."""
        return 0 if self._generation is None else self._generation.port

    def dp_size(self, mesh: str) -> int:
        """Return the number of data-parallel ranks of a mesh that the workers have registered.

        Raises:
            DispatchError: the mesh is not registered on every rank, or has gaps or two collectors.
        """
        gang = self._running()
        table = gang.meshes.get(mesh, [None] * self.world_size)
        return check_mesh(mesh, table).dp_size

    async def stacks(self, timeout: float = 2.0) -> Stacks:
        """Return the Python stacks of all ranks; ``str()`` of them is a report, equal ones folded.

        Answers while ranks are stuck, also in C code that holds the GIL. Changes nothing.

        Args:
            timeout: seconds that a rank has to answer.
        """
        return await self._running().watch.stacks(timeout=timeout)

    async def check_health(self, timeout: float = 5.0) -> list[float | None]:
        """Return, by rank, the seconds in which its control lane answers; None where it does not.

        A rank that runs a method answers as soon as the GIL is free; one that does not is stuck in C
        code, or stopped. Deaths need no check: they are seen at once.

        Raises:
            GroupBrokenError: the group is broken.
        """
        return await self._running().watch.ping(timeout)

    def start_worker_aliveness_check(
        self,
        every_n_seconds: float = 1.0,
        on_death: Callable[[Exception], None] | None = None,
    ) -> None:
        """Have ``on_death`` called with what broke the group, once, when it breaks.

        Kept for programs written for verl. A death is always seen at once, so ``every_n_seconds`` says
        nothing here; and the controller is never signalled.
        """
        self._running()
        self.supervisor.on_death = on_death

    def __getattr__(self, name: str) -> Any:
        methods = self.__dict__.get("methods", {})
        if name in methods:
            proxy = self.proxy(name)
            self.__dict__[name] = proxy
            return proxy
        raise AttributeError(
            self.no_method(name) if methods else f"WorkerGroup has no attribute {name!r}"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.methods})

    def __repr__(self) -> str:
        return (
            f"<WorkerGroup {self._name!r} of {self.world_size} x {self.cls.__name__}, {self.state}>"
        )

    def no_method(self, name: str) -> str:
        """Say why ``name`` is not here, and what may have been meant."""
        return unregistered_hint(self.cls, name, self.methods)

    def adhoc(self, name: str, label: str, function: Callable[..., Any]) -> Method:
        """Return the record of a method that is not registered."""
        return Method(name, label, MethodOptions(), kind_of(function), function)

    @classmethod
    async def start(
        cls, resource_pool: ResourcePool, cls_with_init: ClassWithInitArgs[Any], **options: Any
    ) -> Self:
        """Build a group and start it; the same arguments as the class.

        Raises:
            WorkerStartError: what each failed rank raised. No process is left, also when this is
                cancelled.
            ResourceError: the pool's devices are taken.
        """
        group = cls(resource_pool, cls_with_init, **options)
        await group._start()
        return group

    async def __aenter__(self) -> Self:
        """Start it; see `start`."""
        await self._start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        """Shut it down; what ``close()`` raised does not hide an exception that is under way."""
        try:
            await self.shutdown()
        except WorkerGroupError as closing:
            if error is None:
                raise
            error.add_note(f"and then: {closing}")

    async def shutdown(self, grace: float = 5.0) -> None:
        """End every process, politely if they let it.

        Calls in flight fail with `GroupClosedError`. ``close()`` runs on every rank; then SIGTERM,
        then SIGKILL. Afterwards no process of the group, nor a child of one, exists. Shutting down
        twice does nothing.

        Args:
            grace: seconds until what is left is killed.

        Raises:
            WorkerGroupError: what ``close()`` raised, when everything has ended.

        Cancelling it kills at once.
        """
        generation, self._state = self._generation, "closed"
        if generation is None:
            return
        self._check_loop()
        self._generation = None
        self._finalizer.detach()
        self.supervisor.close()
        errors = await generation.stop(grace, "was shut down")
        if errors:
            raise WorkerGroupError(f"{self.cls.__name__}.close failed in {self._name!r}", errors)

    async def restart(self, grace: float = 5.0) -> None:
        """End the processes and start new ones in their place: a new generation of the same group.

        ``__init__`` and ``setup`` run again with the same arguments, then ``load_state(state)`` where
        the class has it and something was saved (`save`). Calls in flight fail; replies of the old
        generation reach nobody.

        Args:
            grace: seconds for the old processes, if they still run.

        Raises:
            WorkerStartError: the new processes could not start. The group is closed.

        Cancelling it leaves no process, and the group closed.
        """
        generation = self._generation
        if generation is None or self._state not in ("running", "starting"):
            self._running()
            return
        self._check_loop()
        self._state = "starting"
        self._generation = None
        self._finalizer.detach()
        try:
            await generation.stop(grace, "was started again")
        except BaseException:
            self._state = "closed"
            raise
        saved = self.supervisor.saved
        known = saved.exists and hasattr(self.cls, "load_state")
        await self._start_generation(await saved.get() if known else None)

    async def save(self) -> None:
        """Keep what each rank's ``save_state()`` returns, for ``load_state`` after a restart.

        It is kept as `RestartPolicy` says, all ranks' states or none.

        Raises:
            AttributeError: the class has no ``save_state``.
        """
        await self.supervisor.saved.put(await self.execute_all("save_state"))

    async def until_ready(self, ranks: Sequence[int]) -> None:
        """Wait until each rank has room; see `Surface.ready`."""
        await self._running().calls.ready(ranks, WINDOW_CALLS, WINDOW_BYTES)
        self._running()

    def submit(self, job: Job) -> Call[Any]:
        """Send a call. For proxies."""
        generation = self._generation
        try:
            usable = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            usable = False
        if not usable or generation is None or not generation.gang.usable:
            self._running()  # says what is wrong
        sender = None if generation is None else generation.sender
        if sender is None:
            raise InternalError(f"{self!r} can't take a call")
        if self.supervisor.policy is not None:
            self.supervisor.count_call()
        return sender.submit(job)

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

    @property
    def sender(self) -> Sender | None:
        """The way to the ranks; None while there is none."""
        return None if self._generation is None else self._generation.sender

    @property
    def _gang(self) -> Gang | None:
        return None if self._generation is None else self._generation.gang

    def _running(self) -> Gang:
        gang = self._gang
        if gang is None or self._state != "running":
            if self._state == "closed":
                raise GroupClosedError(f"group {self._name!r} was shut down")
            if self._state == "starting":
                raise GroupBrokenError(f"group {self._name!r} is being started: await that first")
            raise GroupClosedError(
                f"group {self._name!r} has not been started: use 'async with' or await WorkerGroup.start(...)"
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
                f"group {self._name!r} belongs to the event loop that started it, and this is another thread "
                "or loop: use asyncwg.blocking for code without one"
            )

    async def _start(self) -> None:
        if self._state != "new":
            raise UsageError(f"group {self._name!r} was started before: make a new one")
        self._loop = asyncio.get_running_loop()
        _check_selector(self._loop)
        self._state = "starting"
        await self._start_generation()

    async def _start_generation(self, states: list[Any] | None = None) -> None:
        loop = self._loop
        assert loop is not None
        try:
            generation = await Generation.start(
                loop, self._spec, self.resource_pool, self._start_timeout
            )
            sender = generation.open(loop, self, has_async=self.has_async)
            if states is not None:
                # Before anybody else's calls: nobody sees a rank without its state.
                job = self.job_for(self.target, "load_state", (PerRank(states),), {})
                try:
                    await sender.submit(job)
                except BaseException:
                    await generation.stop(0, "could not load its state")
                    raise
        except BaseException:
            self._state = "closed"
            raise
        gang = generation.gang
        gang.on_break = self.supervisor.broke
        if self._hang_after is None:
            gang.watch.tell_with(self._tell_hang)
        else:
            gang.watch.start(self._hang_after, self._tell_hang)
        self._generation = generation
        self._state = "running"
        self._finalizer = weakref.finalize(self, generation.let_go(loop))
        self._finalizer.atexit = False

    def _tell_hang(self, report: HangReport) -> None:
        _log.warning("%s", report)
        if self._on_hang is not None:
            self._on_hang(report)

    def _refuse_reserved(self) -> None:
        for proxy, method in self.methods.items():
            if proxy in RESERVED or hasattr(WorkerGroup, proxy):
                raise UsageError(
                    f"{method.label} has a name that WorkerGroup.{proxy} has already: give the proxy "
                    f"another one with @register(..., name={'worker_' + proxy!r})"
                )


def _has_async(cls: type) -> bool:
    return any(
        kind_of(member) in ("async def", "async generator")
        for name in dir(cls)
        if callable(member := inspect.getattr_static(cls, name, None))
    )


def _check_name(name: str) -> str:
    if not isinstance(name, str) or not name or any(c in name for c in "/\0\n"):
        raise UsageError(f"a group's name is a line of text without '/', not {name!r}")
    return name


def _check_selector(loop: asyncio.AbstractEventLoop) -> None:
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


def _check_options(
    unknown: Mapping[str, Any],
    resource_pool: object,
    cls_with_init: object,
    start_method: str | None,
    executor: str,
    error_grace: float,
    hang_after: float | None,
) -> None:
    if unknown:
        known = [p for p in inspect.signature(WorkerGroup).parameters if p != "unknown"]
        wrong = next(iter(unknown))
        raise TypeError(f"WorkerGroup has no option {wrong!r}{nearest(wrong, known)}")
    if not isinstance(resource_pool, ResourcePool):
        raise UsageError(f"the first argument is a ResourcePool, not {resource_pool!r}")
    if not isinstance(cls_with_init, ClassWithInitArgs):
        raise UsageError(
            f"the second argument is a ClassWithInitArgs, not {cls_with_init!r}: "
            "write ClassWithInitArgs(Trainer, ...)"
        )
    if start_method not in _START_METHODS:
        raise UsageError(
            f"start_method must be 'forkserver', 'spawn' or None, not {start_method!r}: forking the "
            "controller would copy its threads' locks"
        )
    if executor not in ("process", "inline"):
        raise UsageError(f"executor must be 'process' or 'inline', not {executor!r}")
    if error_grace < 0:
        raise UsageError(f"error_grace must be 0 seconds or more, not {error_grace!r}")
    if hang_after is not None and hang_after <= 0:
        raise UsageError(f"hang_after must be more than 0 seconds, not {hang_after!r}")
