"""``WorkerGroup`` for code without an event loop: the same proxies, as plain functions.

::

    from asyncwg.blocking import WorkerGroup

    with WorkerGroup(pool, ClassWithInitArgs(Trainer, lr=3e-4)) as wg:
        for batch in batches:
            out = wg.train_step(batch)              # the value
        saved = wg.save_to("step-7")                # registered with blocking=False: a handle
        scores = wg.score(batch)
        saved.get()

For scripts, notebooks (also while a loop of their own runs) and trainers written for verl. All groups of a
program are driven by one loop in a thread of its own, so any thread may use them; calls reach all ranks in
one order, that in which they were made. A plain call returns what awaiting the same call of
`asyncwg.WorkerGroup` would give, and raises the same.

Functions that the loop calls run in its thread and can't make blocking calls: those of custom dispatch modes
(which get the `asyncwg.WorkerGroup` behind the group), ``on_hang``, ``on_death``, and inline ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, overload

from asyncwg import worker_group
from asyncwg._driver.stacks import Stacks
from asyncwg._handle import Handle
from asyncwg._hold import Hold
from asyncwg._plain import RankView, Surface, Union
from asyncwg.errors import UsageError, WorkerGroupError
from asyncwg.resource_pool import ResourcePool
from asyncwg.worker_group import ClassWithInitArgs

__all__ = ["Handle", "WorkerGroup"]

P = ParamSpec("P")
G = TypeVar("G", bound="WorkerGroup")

_OWN_NAMES: Final = (
    "execute_all_async",
    "execute_all_sync",
    "execute_rank_zero_async",
    "execute_rank_zero_sync",
)
"""Names of these groups that `asyncwg.WorkerGroup` leaves to its methods."""


def _like(
    model: Callable[P, Any],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Give an ``__init__`` the parameters of the class ``model``."""

    def dress(function: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        dressed: Any = function
        dressed.__signature__ = inspect.signature(model.__init__)
        return dressed  # type: ignore[no-any-return]  # it is the function

    return dress


class _Start:
    """``WorkerGroup.start(pool, cls)`` makes a group and starts it; ``wg.start()`` starts that group."""

    @overload
    def __get__(self, group: None, owner: type[G]) -> Callable[..., G]: ...
    @overload
    def __get__(self, group: G, owner: type[G]) -> Callable[[], G]: ...
    def __get__(self, group: Any, owner: Any) -> Any:
        if group is not None:
            return group.__enter__

        @functools.wraps(owner.__init__)
        def start(*args: Any, **kwargs: Any) -> Any:
            return owner(*args, **kwargs).__enter__()

        return start


class WorkerGroup(Surface):
    """The ranks of one class, one process each, and their registered methods as plain functions.

    ``with WorkerGroup(pool, cls_with_init) as wg`` starts and stops it; ``wg.start()``, or
    ``WorkerGroup.start(pool, cls_with_init)``, and ``wg.shutdown()`` are the long form. A group that its
    program drops is ended without a word; one that still runs when the program ends is shut down then.

    A method that is registered with ``blocking=True``, as is the default, gives its value; one with
    ``blocking=False`` a `Handle`. Any thread may use the group. Ctrl-C while a call is waited for cancels the
    call on all ranks or on none, and leaves the group usable.

    Args, errors: as for `asyncwg.WorkerGroup`. ``on_hang`` is called in the loop's thread.
    """

    @_like(worker_group.WorkerGroup)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        inner = worker_group.WorkerGroup(*args, **kwargs)
        self._stand_on(Hold(inner), inner)

    def _stand_on(self, hold: Hold, inner: worker_group.WorkerGroup) -> None:
        for name in set(_OWN_NAMES) & set(dir(inner)):
            raise UsageError(
                f"{name!r} is a function of every blocking group: give the proxy another name with "
                f"@register(..., name={'worker_' + name!r})"
            )
        super().__init__(hold, inner)
        self._group = inner

    @classmethod
    def _around(cls, hold: Hold, inner: worker_group.WorkerGroup) -> Self:
        group = cls.__new__(cls)
        group._stand_on(hold, inner)  # noqa: SLF001  # one of us
        return group

    start = _Start()

    @classmethod
    def attach(
        cls,
        name: str,
        cls_with_init: ClassWithInitArgs[Any] | None = None,
        *,
        timeout: float | None = 30.0,
    ) -> Self:
        """Return a handle on a group that another program hosts; see `asyncwg.WorkerGroup.attach`.

        ``with WorkerGroup.attach("actor") as wg`` lets go of it at the end; the group goes on.
        """
        attach = worker_group.WorkerGroup.attach
        hold = Hold.attached(lambda: attach(name, cls_with_init, timeout=timeout))
        return cls._around(hold, hold.root)

    @classmethod
    def from_detached(cls, name: str | None = None, **options: Any) -> Self:
        """Attach to a group by verl's arguments; see `asyncwg.WorkerGroup.from_detached`."""
        attach = worker_group.WorkerGroup.from_detached
        hold = Hold.attached(lambda: attach(name, **options))
        return cls._around(hold, hold.root)

    def detach(self) -> None:
        """Let go of a group that goes on without this program; see `asyncwg.WorkerGroup.detach`."""
        self._hold.detach()

    @staticmethod
    def union(*members: Surface) -> Union:
        """Return groups, or views of groups, to be called as one; see `asyncwg.WorkerGroup.union`.

        Raises:
            UsageError: less than two, no blocking groups, or a rank twice.
        """
        for member in members:
            if not isinstance(member, Surface):
                raise UsageError(
                    f"a union is made of blocking groups and their views, not {member!r}"
                )
        return Union(members)

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, Self]:
        """Return a group for each role of a colocated class; see `asyncwg.WorkerGroup.spawn`.

        They share the processes: one that is shut down is shut down for all.

        Args:
            prefix_set: the roles; None for all.

        Raises:
            UsageError: there is no such role.
        """
        roles = self._group.spawn(prefix_set)
        return {role: self._around(self._hold, inner) for role, inner in roles.items()}

    def fuse(self, prefix_set: Iterable[str] | None = None) -> None:
        """Put the groups that `spawn` returns on this one: ``wg.actor``; see `asyncwg.WorkerGroup.fuse`.

        Args:
            prefix_set: the roles; None for all.

        Raises:
            UsageError: there is no such role, or its name can't be an attribute here. Nothing is changed.
        """
        names = self._group.spawn(prefix_set)
        for role in names:
            if hasattr(type(self), role):
                raise UsageError(
                    f"role {role!r} can't be an attribute of {self!r}: it has one of that name. Use "
                    f"spawn([{role!r}])[{role!r}], or call the role something else"
                )
        self._group.fuse(names)

    def __getattr__(self, name: str) -> Any:
        group = self.__dict__.get("_group")
        found = None if group is None else getattr(group, name)
        if isinstance(found, worker_group.WorkerGroup):  # a role that was put here by `fuse`
            return self._around(self._hold, found)
        return super().__getattr__(name)

    def __enter__(self) -> Self:
        """Start it, unless it runs.

        Raises:
            WorkerStartError: what each failed rank raised. No process is left, also when this is
                interrupted.
            ResourceError: the pool's devices are taken.
            UsageError: it was started before, and shut down.
        """
        if self.state != "running":
            self._hold.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        """Shut it down, or let go of it where it goes on without this program.

        What ``close()`` raised does not hide an exception that is under way.
        """
        try:
            self._hold.leave(5.0)
        except WorkerGroupError as closing:
            if error is None:
                raise
            error.add_note(f"and then: {closing}")

    def shutdown(self, grace: float = 5.0) -> None:
        """End every process, politely if they let it; see `asyncwg.WorkerGroup.shutdown`.

        Args:
            grace: seconds until what is left is killed.

        Raises:
            WorkerGroupError: what ``close()`` raised, when everything has ended.

        Ctrl-C meanwhile kills at once.
        """
        self._hold.shutdown(grace)

    def restart(self, grace: float = 5.0) -> None:
        """End the processes and start new ones in their place; see `asyncwg.WorkerGroup.restart`."""
        self._hold.running().run(lambda: self._group.restart(grace))

    def save(self) -> None:
        """Keep what each rank's ``save_state()`` returns, for ``load_state`` after a restart."""
        self._hold.running().run(self._group.save)

    def stacks(self, timeout: float = 2.0) -> Stacks:
        """Return the Python stacks of all ranks; see `asyncwg.WorkerGroup.stacks`."""
        return self._hold.running().run(lambda: self._group.stacks(timeout))

    def check_health(self, timeout: float = 5.0) -> list[float | None]:
        """Return, by rank, the seconds in which its control lane answers; None where it does not."""
        return self._hold.running().run(lambda: self._group.check_health(timeout))

    def dp_size(self, mesh: str) -> int:
        """Return the number of data-parallel ranks of a mesh; see `asyncwg.WorkerGroup.dp_size`."""
        size: int = self._hold.running().ask(lambda: self._group.dp_size(mesh), taken=True)
        return size

    def start_worker_aliveness_check(
        self,
        every_n_seconds: float = 1.0,
        on_death: Callable[[Exception], None] | None = None,
    ) -> None:
        """Have ``on_death`` called, in the loop's thread, with what broke the group, when it breaks."""
        check = self._group.start_worker_aliveness_check
        self._hold.running().ask(lambda: check(every_n_seconds, on_death), taken=True)

    @property
    def resource_pool(self) -> ResourcePool:
        """Where it runs."""
        return self._group.resource_pool

    @property
    def name(self) -> str:
        """The group's name."""
        return self._group.name

    @property
    def state(self) -> str:
        """``"new"``, ``"starting"``, ``"running"``, ``"broken"`` or ``"closed"``."""
        return self._group.state

    @property
    def alive(self) -> bool:
        """Whether it runs and every process of it lives."""
        return self._group.alive

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while it does not run."""
        return self._group.pids

    @property
    def worker_names(self) -> list[str]:
        """``name:rank``, by rank."""
        return self._group.worker_names

    @property
    def workers(self) -> list[RankView]:
        """One view per rank."""
        return [self[rank] for rank in range(self.world_size)]

    @property
    def master_address(self) -> str:
        """Where the group's store for ``torch.distributed`` listens: loopback."""
        return self._group.master_address

    @property
    def master_port(self) -> int:
        """The store's port; 0 while the group does not run."""
        return self._group.master_port
