"""What type checkers must refuse: each line that is wrong is excused, and no other is.

`make check` fails where a line is excused that no checker blames, and where one is blamed that is not
excused. Both checkers read ``type: ignore``, so each line below is refused by both.
"""

from __future__ import annotations

from asyncwg import DataProto, Dispatch, Execute, WorkerGroup, blocking, register
from typing_tests.good import Better, Trainer


async def arguments(wg: WorkerGroup, batch: DataProto) -> None:
    wg.call(Trainer.plain, "1")  # type: ignore[arg-type]
    wg.call(Trainer.plain)  # type: ignore[call-arg]
    wg.call(Trainer.plain, 1, 2.0)  # type: ignore[call-arg]
    wg.call(Trainer.plain, 1, scal=2.0)  # type: ignore[call-arg]
    wg.call(Trainer.train_step, [1, 2])  # type: ignore[arg-type]
    wg.call(Trainer.train_step, batch, epoch="1")  # type: ignore[arg-type]
    wg.call(Trainer.score, None)  # type: ignore[arg-type]
    wg.call(Better.plain, b"")  # type: ignore[arg-type]
    wg[0].call(Trainer.plain, "1")  # type: ignore[arg-type]
    wg[0:2].call(Trainer.head, 1)  # type: ignore[call-arg]


async def results(wg: WorkerGroup, batch: DataProto) -> None:
    listed: float = await wg.call(Trainer.plain, 1)  # type: ignore[arg-type]
    single: list[float] = await wg[0].call(Trainer.plain, 1)  # type: ignore[arg-type]
    joined: list[DataProto] = await wg.call(Trainer.train_step, batch)  # type: ignore[arg-type]
    metric: dict[str, float] = await wg.call(Trainer.score, batch)  # type: ignore[arg-type]
    one: list[int] = await wg.call(Trainer.save, "x")  # type: ignore[arg-type]
    not_awaited: list[float] = wg.call(Trainer.plain, 1)  # type: ignore[assignment]
    del listed, single, joined, metric, one, not_awaited


async def methods(wg: WorkerGroup) -> None:
    wg.call(Trainer.on_the_object)  # type: ignore[arg-type]
    wg.call(Trainer.between_ranks, 1)  # type: ignore[arg-type]
    wg.call("plain", 1)  # type: ignore[arg-type]
    wg.call(len, [])  # type: ignore[arg-type]


class Broken(Trainer):
    @register(blocking="no")  # type: ignore[call-overload, untyped-decorator]
    def wrong_blocking(self) -> None: ...

    @register(Execute.ALL)  # type: ignore[call-overload, untyped-decorator]
    def wrong_mode(self) -> None: ...

    @register(uneven="shrink")  # type: ignore[call-overload, untyped-decorator]
    def wrong_uneven(self) -> None: ...

    @register(timeot=3.0)  # type: ignore[call-overload, untyped-decorator]
    def wrong_option(self) -> None: ...

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def head(self) -> int:  # type: ignore[override]
        return 1

    def on_the_object(self, batch: DataProto) -> None:  # type: ignore[override]
        self.plain("1")  # type: ignore[arg-type]
        self.by_item([1, 2])  # type: ignore[arg-type]
        text: int = self.head()
        coroutine: dict[str, float] = self.score(batch)  # type: ignore[assignment]
        del text, coroutine


def without_a_loop(wg: blocking.WorkerGroup, batch: DataProto) -> None:
    wg.call(Trainer.plain, "1")  # type: ignore[arg-type]
    wg.call(Trainer.between_ranks, 1)  # type: ignore[arg-type]
    awaited: DataProto = wg.call(Trainer.update, batch)  # type: ignore[assignment]
    listed: float = wg.call(Trainer.plain, 1)  # type: ignore[assignment]
    single: list[float] = wg[0].call(Trainer.plain, 1)  # type: ignore[arg-type]
    handle: blocking.Handle[DataProto] = wg.call(Trainer.train_step, batch)  # type: ignore[arg-type]
    wg.call(Trainer.update, batch).get("soon")  # type: ignore[arg-type]
    del awaited, listed, single, handle
