"""``WorkerGroup``: the processes of one class, driven from one event loop; ``ClassWithInitArgs``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

from asyncwg import distributed
from asyncwg._attach.handle import attach as attach_to
from asyncwg._attach.handle import make_core
from asyncwg._attach.host import Host
from asyncwg._attach.spawn import detached_core
from asyncwg._attach.travel import TravellingCore
from asyncwg._catalog import catalogs_of, roles_of
from asyncwg._core import Core
from asyncwg._driver.launch import Spec
from asyncwg._driver.stacks import HangReport, Stacks
from asyncwg._job import CallOptions, nearest
from asyncwg._restart import RestartPolicy
from asyncwg._roles import Roles
from asyncwg._surface import RankView, Surface
from asyncwg._union import Union
from asyncwg.decorator import Method
from asyncwg.errors import UsageError, WorkerGroupError
from asyncwg.mesh import check_mesh
from asyncwg.resource_pool import ResourcePool

__all__ = ["ClassWithInitArgs", "RestartPolicy", "WorkerGroup"]

T = TypeVar("T")
Group = TypeVar("Group", bound="WorkerGroup")


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


class WorkerGroup(Roles):
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
        start_timeout: seconds until a start fails; None for no limit. ``load_state`` has as many of its
            own.
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
        detached: start it in a process of its own, which outlives this program. Leaving ``async with`` and
            `detach` only let go of it; `shutdown`, of any handle, ends it, and so does
            ``python -m asyncwg stop NAME``. Other programs call it with `attach`. What it prints is in
            a file beside its socket, unless ``output`` says ``"inherit"`` or names a folder.
        attachable: let other programs, and workers that get it as an argument, call it while this program
            runs it.

    Raises:
        TypeError: an option that does not exist.
        UsageError: a value that can't be right, or a method whose name is the group's own.
    """

    _taken: ClassVar[frozenset[str]] = RESERVED

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
        detached: bool = False,
        attachable: bool = False,
        **unknown: Any,
    ) -> None:
        _check_options(
            unknown, resource_pool, cls_with_init, start_method, executor, error_grace, hang_after
        )
        cls = cls_with_init.cls
        catalogs, methods = catalogs_of(cls)
        for catalog in catalogs.values():
            _refuse_reserved(catalog.methods)
        limits = {number: m.options.max_concurrency for number, m in enumerate(methods)}
        spec = Spec(
            name=_check_name(cls.__name__ if name is None else name),
            cls=cls,
            args=cls_with_init.args,
            kwargs=dict(cls_with_init.kwargs),
            roles=roles_of(cls),
            addresses=[method.address for method in methods],
            limits={number: limit for number, limit in limits.items() if limit is not None},
            to_device=[number for number, m in enumerate(methods) if m.options.to_device],
            has_async=any(catalog.has_async for catalog in catalogs.values()),
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
        if executor == "inline" and (detached or attachable):
            raise UsageError(
                "executor='inline' runs in this process alone: detached and attachable groups need processes"
            )
        calls = CallOptions(on_error=on_error)
        core: Core
        if detached:
            core = detached_core(
                spec,
                resource_pool,
                catalogs,
                calls,
                start_timeout=start_timeout,
                hang_after=hang_after,
                on_hang=on_hang,
                restart=restart,
            )
        else:
            core = Core(
                spec,
                resource_pool,
                catalogs,
                calls,
                start_timeout=start_timeout,
                hang_after=hang_after,
                on_hang=on_hang,
                policy=restart,
            )
            if attachable:
                core.host = Host(core)
        super().__init__(core, core.everyone, core.catalog)

    @property
    def resource_pool(self) -> ResourcePool:
        """Where it runs."""
        return self._core.pool

    @property
    def name(self) -> str:
        """The group's name; ``group.role`` for the group of one role."""
        role = self._catalog.role
        return self._core.name if role is None else f"{self._core.name}.{role}"

    @property
    def state(self) -> str:
        """``"new"``, ``"starting"``, ``"running"``, ``"broken"`` or ``"closed"``."""
        return self._core.state

    @property
    def alive(self) -> bool:
        """Whether it runs and every process of it lives."""
        gang = self._core.gang
        return self._core.state == "running" and gang is not None and gang.alive

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while it does not run."""
        return [] if self._core.gang is None else self._core.gang.pids

    @property
    def worker_names(self) -> list[str]:
        """``name:rank``, by rank."""
        return [f"{self._core.name}:{rank}" for rank in self._target.ranks]

    @property
    def workers(self) -> list[RankView]:
        """One view per rank."""
        return [self[rank] for rank in self._target.ranks]

    @property
    def master_address(self) -> str:
        """Where the group's store for ``torch.distributed`` listens: loopback."""
        return distributed.MASTER_ADDRESS

    @property
    def master_port(self) -> int:
        """The store's port; 0 while the group does not run."""
        return self._core.port

    def dp_size(self, mesh: str) -> int:
        """Return the number of data-parallel ranks of a mesh that the workers have registered.

        Raises:
            DispatchError: the mesh is not registered on every rank, or has gaps or two collectors.
        """
        meshes = self._core.running().meshes.get(self._catalog.role, {})
        return check_mesh(mesh, meshes.get(mesh, [None] * self.world_size)).dp_size

    async def stacks(self, timeout: float = 2.0) -> Stacks:
        """Return the Python stacks of all ranks; ``str()`` of them is a report, equal ones folded.

        Answers while ranks are stuck, also in C code that holds the GIL. Changes nothing.

        Args:
            timeout: seconds that a rank has to answer.
        """
        return await self._core.running().watch.stacks(timeout=timeout)

    async def check_health(self, timeout: float = 5.0) -> list[float | None]:
        """Return, by rank, the seconds in which its control lane answers; None where it does not.

        A rank that runs a method answers as soon as the GIL is free; one that does not is stuck in C
        code, or stopped. Deaths need no check: they are seen at once.

        Raises:
            GroupBrokenError: the group is broken.
        """
        return await self._core.running().watch.ping(timeout)

    def start_worker_aliveness_check(
        self,
        every_n_seconds: float = 1.0,
        on_death: Callable[[Exception], None] | None = None,
    ) -> None:
        """Have ``on_death`` called with what broke the group, once, when it breaks.

        Kept for programs written for verl. A death is always seen at once, so ``every_n_seconds`` says
        nothing here; and the controller is never signalled.
        """
        self._core.running()
        self._core.supervisor.on_death = on_death

    def __repr__(self) -> str:
        return (
            f"<WorkerGroup {self.name!r} of {self.world_size} x {self._catalog.cls.__name__}, "
            f"{self.state}>"
        )

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
        await group.__aenter__()
        return group

    @staticmethod
    def union(*members: Surface) -> Union:
        """Return groups, or views of groups, to be called as one; see `Union`.

        Raises:
            UsageError: less than two, no groups, or a rank twice.
        """
        return Union(members)

    async def __aenter__(self) -> Self:
        """Start it; see `start`."""
        await self._core.start(self if self._parent is None else self._parent)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        """Shut it down, or let go of it where it belongs to no program.

        What ``close()`` raised does not hide an exception that is under way.
        """
        try:
            await self._core.leave()
        except WorkerGroupError as closing:
            if error is None:
                raise
            error.add_note(f"and then: {closing}")

    async def shutdown(self, grace: float = 5.0) -> None:
        """End every process, politely if they let it.

        Calls in flight fail with `GroupClosedError`. ``close()`` runs on every rank; then SIGTERM,
        then SIGKILL. Afterwards no process of the group, nor a child of one, exists. Shutting down
        twice does nothing.

        A group that several programs share ends for all of them; `detach` only lets go.

        Args:
            grace: seconds until what is left is killed.

        Raises:
            WorkerGroupError: what ``close()`` raised, when everything has ended.

        Cancelling it kills at once.
        """
        await self._core.stop(grace)

    @classmethod
    async def attach(
        cls,
        name: str,
        cls_with_init: ClassWithInitArgs[Any] | None = None,
        *,
        timeout: float | None = 30.0,
    ) -> Self:
        """Return a handle on a group that another program hosts; ``async with`` it to let go at the end.

        It has the same proxies, views and options as the group has for its creator, and the host orders the
        calls of all programs. Only the same user can attach.

        Args:
            name: of a group that was started with ``detached=True`` or ``attachable=True``.
            cls_with_init: the worker's class in this program; None to take it from the host. Its arguments
                say nothing here.
            timeout: seconds that the host has to answer; it waits for a group that is being started.

        Raises:
            UsageError: there is no such group, or its class can't be imported here.
            CallTimeoutError: the host has not answered.
        """
        known = None if cls_with_init is None else cls_with_init.cls
        core, gang = await attach_to(_check_name(name), known, timeout)
        group = _around(cls, core)
        core.adopt(group, gang)
        return group

    @classmethod
    async def from_detached(
        cls,
        name: str | None = None,
        *,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: ClassWithInitArgs[Any] | None = None,
        timeout: float | None = 30.0,
    ) -> Self:
        """Attach to a group by verl's arguments; see `attach`.

        Args:
            name: of the group.
            name_prefix: the same.
            worker_names: all names of one group, as `worker_names` gives them.
            worker_handles: refused: a view, ``wg[a:b]``, stands for some ranks.
            ray_cls_with_init: the worker's class in this program.
            timeout: as for `attach`.
        """
        if worker_handles is not None:
            raise UsageError(
                "asyncwg has no handles of single workers: attach by name, and take a view such as wg[0:2]"
            )
        groups = {each.rpartition(":")[0] for each in worker_names or ()}
        names = {each for each in (name, name_prefix, *groups) if each is not None}
        if len(names) != 1:
            raise UsageError(
                f"from_detached() takes the name of one group, and got {sorted(names)}"
            )
        group = await cls.attach(names.pop(), ray_cls_with_init, timeout=timeout)
        if worker_names is not None and list(worker_names) != group.worker_names:
            await group.detach()
            raise UsageError(
                f"worker_names {list(worker_names)} are not all ranks of a group in order, which are "
                f"{group.worker_names}: attach by name, and take a view"
            )
        return group

    async def detach(self) -> None:
        """Let go of a group that goes on without this program. Calls in flight are given up.

        Raises:
            UsageError: the group is this program's own, and would have nobody.
        """
        await self._core.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Arrive in another process as a handle that attaches when it is first used there.

        Raises:
            UsageError: the group is neither detached nor attachable.
        """
        if self._parent is not None:
            return _role_of, (self._parent, self._catalog.role)
        return _arrive, (type(self), self._core.ticket())

    async def restart(self, grace: float = 5.0) -> None:
        """End the processes and start new ones in their place: a new generation of the same group.

        ``__init__`` and ``setup`` run again with the same arguments, then ``load_state(state)`` where
        the class has it and something was saved (`save`). Calls in flight fail; replies of the old
        generation reach nobody.

        Args:
            grace: seconds for the old processes, if they still run.

        Raises:
            WorkerStartError: the new processes could not start, or not load their state. No process is
                left, and the group is closed.

        Cancelling it leaves no process, and the group closed.
        """
        await self._core.restart(grace)

    async def save(self) -> None:
        """Keep what each rank's ``save_state()`` returns, for ``load_state`` after a restart.

        It is kept as `RestartPolicy` says, all ranks' states or none.

        Raises:
            AttributeError: the class has no ``save_state``.
        """
        await self._core.save()


def _around(cls: type[Group], core: Core) -> Group:
    """Return a group that is made of ``core``."""
    group = cls.__new__(cls)
    super(WorkerGroup, group).__init__(core, core.everyone, core.catalog)
    return group


def _role_of(parent: WorkerGroup, role: str) -> WorkerGroup:
    return parent.spawn([role])[role]


def _arrive(cls: type[WorkerGroup], ticket: Any) -> WorkerGroup:
    core: Any = make_core(TravellingCore, ticket)
    group = _around(cls, core)
    core.arrive(group)
    return group


def _refuse_reserved(methods: Mapping[str, Method]) -> None:
    for proxy, method in methods.items():
        if proxy in RESERVED or hasattr(WorkerGroup, proxy):
            raise UsageError(
                f"{method.label} has a name that WorkerGroup.{proxy} has already: give the proxy "
                f"another one with @register(..., name={'worker_' + proxy!r})"
            )


def _check_name(name: str) -> str:
    if not isinstance(name, str) or not name or any(c in name for c in "/\0\n"):
        raise UsageError(f"a group's name is a line of text without '/', not {name!r}")
    return name


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
