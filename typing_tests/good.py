"""What must pass mypy and pyright, both strict, without a word of excuse.

Nothing here runs: it is read by the type checkers of ``make check``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_type, cast

from asyncwg import (
    Call,
    DataProto,
    Dispatch,
    Execute,
    PerRank,
    Worker,
    WorkerGroup,
    blocking,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)


def give(_group: object, *args: Any, **kwargs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    return args, kwargs


def take(_group: object, outputs: list[Any]) -> int:
    return len(outputs)


OWN_MODE = register_dispatch_mode("own", give, take)


class Trainer(Worker):
    """One method of each kind."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @register()
    def plain(self, x: int, *, scale: float = 1.0) -> float:
        """Return ``x``, scaled."""
        return x * scale

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, timeout=5.0, name="load_all")
    def load(self, path: str) -> None: ...

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def head(self) -> str:
        return "head"

    @register(Dispatch.DP_COMPUTE)
    def by_item(self, x: int) -> str:
        return str(x)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, uneven="pad")
    def train_step(self, batch: DataProto, epoch: int = 0) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    async def score(self, batch: DataProto) -> dict[str, float]:
        return {}

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"), blocking=False)
    def update(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def save(self, path: str) -> int:
        return 0

    @register(Dispatch.ONE_TO_ALL, Execute.ANY, blocking=False)
    async def generate(self, prompt: str) -> str:
        return prompt

    @register(dispatch_mode={"dispatch_fn": give, "collect_fn": take})
    def with_functions(self, x: int) -> str:
        return ""

    @register(dispatch_mode=OWN_MODE, execute_mode=Execute.ALL, blocking=True)
    def with_own_mode(self, x: int) -> str:
        return ""

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def between_ranks(self, x: int) -> int:
        return x

    @register()
    def takes_containers(
        self, rows: list[int | str], weights: dict[str, float] | None = None
    ) -> None: ...

    @register()
    def takes_options(self, /, backend: str = "gloo", **options: Any) -> int:
        """Take what has no name here: mypy asks for the ``/``, since one could be called "self"."""
        return 0

    @register()
    def takes_all(self, *args: Any, **kwargs: Any) -> int:
        return 0

    @register()
    def takes_anything(self, value: Any, more: dict[str, Any]) -> int:
        return 0

    @register()
    def takes_a_function(self, function: Callable[[int], int]) -> int:
        return function(1)

    @register()
    def anything(self, value: Any) -> Any:
        return value

    async def on_the_object(self, batch: DataProto) -> None:
        """Called on the object, each is the method as it was written."""
        assert_type(self.plain(1, scale=2.0), float)
        assert_type(self.head(), str)
        assert_type(self.by_item(1), str)
        assert_type(self.train_step(batch, epoch=1), DataProto)
        assert_type(await self.score(batch), dict[str, float])
        assert_type(self.save("x"), int)
        assert_type(await self.generate("x"), str)
        assert_type(self.with_functions(1), str)
        assert_type(self.with_own_mode(1), str)
        assert_type(self.between_ranks(1), int)
        assert_type(self.anything(1), Any)
        assert_type(self.takes_all(1, rank=0), int)
        assert_type(self.takes_anything(1, {}), int)
        assert_type(self.takes_options("gloo", rank=0), int)


class Better(Trainer):
    """An override is registered again, may take more and give less."""

    @register()
    def plain(self, x: int | str, *, scale: float = 1.0, offset: int = 0) -> float:
        assert_type(super().plain(1), float)
        return Trainer.plain(self, 1, scale=scale)


async def on_a_group(wg: WorkerGroup, batch: DataProto) -> None:
    assert_type(wg.call(Trainer.plain, 1), Call[list[float]])
    assert_type(await wg.call(Trainer.plain, 1, scale=2.0), list[float])
    assert_type(await wg.call(Trainer.load, path="x"), list[None])
    assert_type(await wg.call(Trainer.head), str)
    assert_type(await wg.call(Trainer.by_item, [1, 2]), list[str])
    assert_type(await wg.call(Trainer.train_step, batch, epoch=1), DataProto)
    assert_type(await wg.call(Trainer.score, batch), list[dict[str, float]])
    assert_type(await wg.call(Trainer.update, batch), DataProto)
    assert_type(await wg.call(Trainer.save, "x"), int)
    assert_type(await wg.call(Trainer.generate, "x"), str)
    assert_type(await wg.call(Trainer.with_functions, 1, "as it likes"), Any)
    assert_type(await wg.call(Trainer.with_own_mode, 1, "as it likes"), Any)
    assert_type(await wg.call(Better.plain, "x", offset=1), list[float])
    assert_type(await wg.call(Worker.execute_func_rank_zero, len, "x"), Any)


async def arguments_are_understood_from_the_method(wg: WorkerGroup) -> None:
    await wg.call(Trainer.takes_containers, [])
    await wg.call(Trainer.takes_containers, [1], {})
    await wg.call(Trainer.takes_containers, [1, "a"], weights={"a": 1})
    assert_type(await wg.call(Trainer.takes_anything, 1, {"a": 1}), list[int])
    assert_type(await wg.call(Trainer.takes_options, "gloo", rank=0), list[int])
    assert_type(await wg.call(Trainer.takes_a_function, lambda x: x + 1), list[int])


async def on_views(wg: WorkerGroup, batch: DataProto) -> None:
    assert_type(await wg[1:3].call(Trainer.plain, 1), list[float])
    assert_type(await wg[0].call(Trainer.plain, 1), float)
    assert_type(await wg.rank(0).call(Trainer.score, batch), dict[str, float])
    assert_type(await wg[0][0:1].call(Trainer.plain, 1), list[float])
    for worker in wg.workers:
        assert_type(await worker.call(Trainer.head), str)


def without_a_loop(wg: blocking.WorkerGroup, batch: DataProto) -> None:
    with wg as entered, blocking.WorkerGroup.start() as started:
        assert_type(entered, blocking.WorkerGroup)
        assert_type(started, blocking.WorkerGroup)
    assert_type(wg.start(), blocking.WorkerGroup)
    assert_type(wg.call(Trainer.plain, 1, scale=2.0), list[float])
    assert_type(wg.call(Trainer.load, path="x"), list[None])
    assert_type(wg.call(Trainer.head), str)
    assert_type(wg.call(Trainer.train_step, batch), DataProto)
    assert_type(wg.call(Trainer.score, batch), list[dict[str, float]])
    assert_type(wg.call(Trainer.update, batch), blocking.Handle[DataProto])
    assert_type(wg.call(Trainer.update, batch).get(timeout=3), DataProto)
    assert_type(wg.call(Trainer.generate, "x").get(), str)
    assert_type(wg.call(Trainer.with_functions, 1, "as it likes"), Any)
    assert_type(wg.call(Trainer.by_item, [1, 2]), list[str])
    assert_type(wg[0].call(Trainer.plain, 1), float)
    assert_type(wg[0].call(Trainer.update, batch), blocking.Handle[DataProto])
    assert_type(wg[0:1].call(Trainer.plain, 1), list[float])
    assert_type([worker.call(Trainer.head) for worker in wg.workers], list[str])


async def values_that_are_on_their_way(
    wg: WorkerGroup, critic: WorkerGroup, prompts: DataProto
) -> None:
    """A call, or `PerRank`, in the place of an argument is told by a cast."""
    generated = wg.call(Trainer.train_step, prompts)
    trained = critic.call(Trainer.train_step, cast("DataProto", generated))
    assert_type(await trained, DataProto)
    await wg.call(Trainer.plain, cast("int", PerRank([1, 2])))
