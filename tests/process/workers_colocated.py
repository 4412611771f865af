"""Roles that share processes, for the tests of colocated groups; without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from asyncwg import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from tests.process.workers_life import Fifo
from tests.times import GRACE


def colocated(
    roles: Mapping[str, ClassWithInitArgs[Any]], ranks: int = 2, **options: Any
) -> WorkerGroup:
    """Return a group of all roles on CPUs, not started, without torch."""
    return group_of(create_colocated_worker_cls(roles), ranks, **options)


def group_of(built: ClassWithInitArgs[Any], ranks: int = 2, **options: Any) -> WorkerGroup:
    """The same for what is given."""
    pool = ResourcePool([ranks], use_gpu=False)
    given: dict[str, Any] = {"preload": [], "start_timeout": 60, "error_grace": GRACE, **options}
    return WorkerGroup(pool, built, **given)


class Role(Worker):
    """Has a value, and knows what it could see when."""

    def __init__(self, value: Any = 0) -> None:
        super().__init__()
        self.value = value
        self.seen_in_init = sorted(self.fused_worker_dict)
        self.seen_in_setup: list[str] = []

    def setup(self) -> None:
        self.seen_in_setup = sorted(self.fused_worker_dict)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> Any:
        """Return the value."""
        return self.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: Any) -> Any:
        self.value += amount
        return self.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int, int]:
        return os.getpid(), self.rank, self.world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def value_of(self, role: str) -> Any:
        return self.get_fused_worker_by_name(role).value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self) -> tuple[list[str], list[str]]:
        return self.seen_in_init, self.seen_in_setup

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int | None = None) -> None:
        if rank is None or rank == self.rank:
            raise ValueError(f"value is {self.value}")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tag(self, batch: list[Any]) -> list[Any]:
        return [(row, self.rank, self.value) for row in batch]

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("mesh"))
    def tag_over_mesh(self, batch: list[Any]) -> list[Any]:
        return [(row, self.rank, self.value) for row in batch]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join(self, mesh: str, places: Sequence[tuple[int, bool]]) -> None:
        self._register_dispatch_collect_info(mesh, *places[self.rank])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_for(self, role: str, mesh: str, places: Sequence[tuple[int, bool]]) -> None:
        self.fused_worker_dict[role]._register_dispatch_collect_info(mesh, *places[self.rank])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self, gate: Fifo) -> None:
        gate.take()

    def unregistered(self, word: str) -> tuple[str, Any]:
        return word, self.value


class AsyncRole(Role):
    """A role with methods on the event loop, and hooks there too."""

    def __init__(self, value: Any = 0) -> None:
        super().__init__(value)
        self.running = 0
        self.most_running = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def get_async(self) -> Any:
        return self.value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, max_concurrency=1)
    async def limited(self, gate: Fifo) -> None:
        await self._count(gate)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def crowd(self) -> int:
        return self.most_running

    async def _count(self, gate: Fifo) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await gate.taken()
        self.running -= 1


class Unlimited(AsyncRole):
    """The same name without the limit."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def limited(self, gate: Fifo) -> None:
        await self._count(gate)


class Saving(Role):
    """Its value outlives its process."""

    def save_state(self) -> Any:
        return self.value

    def load_state(self, state: Any) -> None:
        self.value = state


class SavingAsync(Role):
    """The same on the event loop."""

    async def save_state(self) -> Any:
        return self.value

    async def load_state(self, state: Any) -> None:
        self.value = state


class Lived(Worker):
    """Writes down what becomes of it, and fails where it is told to."""

    def __init__(self, name: str, path: str, fails_in: str = "") -> None:
        super().__init__()
        self.name = name
        self.path = path
        self.fails_in = fails_in
        self.tell("init")

    def tell(self, what: str) -> None:
        with open(f"{self.path}-{self.rank}", "a") as file:
            file.write(f"{what} {self.name}\n")
        if what == self.fails_in:
            raise ValueError(f"{what} of {self.name}")

    def setup(self) -> None:
        self.tell("setup")

    def close(self) -> None:
        self.tell("close")


class LivedAsync(Lived):
    """The same with hooks on the event loop."""

    async def setup(self) -> None:  # type: ignore[override]  # a hook is def or async def
        self.tell("setup")

    async def close(self) -> None:  # type: ignore[override]
        self.tell("close")


class Plain:
    """Not a `Worker`."""

    def __init__(self, value: int) -> None:
        self.value = value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def doubled(self) -> int:
        return self.value * 2


class Short(Role):
    """A role called ``a``, whose method could be taken for the method ``get`` of a role ``a_b``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def b_get(self) -> str:
        return "b_get of a"


class Long(Role):
    """A role called ``a_b``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def only_here(self) -> str:
        return "only_here of a_b"


class Hybrid(
    create_colocated_worker_raw_cls(  # type: ignore[misc]  # a class made at run time
        {"actor": ClassWithInitArgs(Role, 10), "critic": ClassWithInitArgs(Role, 20)}
    )
):
    """Combines two roles, from a module that every process can import."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def both(self, amount: int) -> int:
        value: int = self.actor.add(amount) + self.fused_worker_dict["critic"].add(amount)
        return value

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("whole"))
    def tag_all(self, batch: list[Any]) -> list[Any]:
        return [(row, self.rank) for row in batch]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_over(self, mesh_name: str, source: str) -> None:
        """Register a mesh of a role as the group's own."""
        self.set_dispatch_collect(mesh_name, **self.actor.get_dispatch_collect(), source=source)


class Careless(
    create_colocated_worker_raw_cls({"actor": ClassWithInitArgs(Role)})  # type: ignore[misc]
):
    """Forgets its roles."""

    def __init__(self) -> None:
        pass


class Outer(Worker):
    """Has a worker inside."""

    def __init__(
        self, places: Sequence[tuple[int, bool]], others: Sequence[tuple[int, bool]]
    ) -> None:
        super().__init__()
        self.inner = Role("inner")
        self.inner._register_dispatch_collect_info("mesh", *places[self.rank])
        self.inner._register_dispatch_collect_info("other", *others[self.rank])
        self.set_dispatch_collect("actor", **self.inner.get_dispatch_collect(), source="mesh")
        self.set_dispatch_collect("other", **self.inner.get_dispatch_collect())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def tag(self, batch: list[Any]) -> list[Any]:
        return self.inner.tag_over_mesh(batch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("other"))
    def tag_other(self, batch: list[Any]) -> list[Any]:
        return self.inner.tag_over_mesh(batch)
