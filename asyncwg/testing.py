"""Helpers for tests of programs that drive groups: faults, order, and what is left behind.

To run all ranks inside the test's own process, ask the group for it:
``WorkerGroup(..., executor="inline")``. ``def`` bodies run when they are called, rank by rank, where pdb
and a debugger reach them; ``async def`` bodies run on the test's loop. There are no environment
contract, no process group beyond one rank, and no deaths.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Any, final

from asyncwg._driver.gang import Gang
from asyncwg._testing import leaks
from asyncwg._testing.lanes import Fault, Sabotage
from asyncwg.errors import UsageError
from asyncwg.worker_group import WorkerGroup

__all__ = ["FaultPlan", "Sequencer", "no_leaks"]


@final
@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong between a group and its ranks, and at which call.

    A plan is a value: each method returns a longer one, and one plan serves any number of groups::

        plan = FaultPlan().delay(0, 0.2).kill(1, after=3)
        with plan.on(group):
            ...

    Calls are counted for each rank by itself, from 1, while the block lasts: calls of the group and of
    its views, ``def`` and ``async def``.
    """

    _faults: tuple[Fault, ...] = ()

    def kill(self, rank: int, after: int = 1) -> FaultPlan:
        """End the process of ``rank`` with SIGKILL, so that its ``after``-th call finds it dead."""
        return self._with(Fault(rank, after, "kill"))

    def delay(self, rank: int, seconds: float, after: int = 1) -> FaultPlan:
        """Hold the ``after``-th call to ``rank`` back for so long; later ones wait behind it."""
        if not seconds > 0:
            raise UsageError(f"a delay is more than 0 seconds, not {seconds!r}")
        return self._with(Fault(rank, after, "delay", seconds))

    def drop(self, rank: int, after: int = 1) -> FaultPlan:
        """Lose the ``after``-th call to ``rank``: it never arrives, and nothing tells.

        The kernel does not lose what it was given, so no promise covers this: a deadline, a hang report,
        or the end of the group ends the wait.
        """
        return self._with(Fault(rank, after, "drop"))

    def corrupt(self, rank: int, after: int = 1) -> FaultPlan:
        """Break the next frame that ``rank`` sends when the ``after``-th call to it is made."""
        return self._with(Fault(rank, after, "corrupt"))

    @contextlib.contextmanager
    def on(self, group: WorkerGroup) -> Generator[None, None, None]:
        """Let it happen to ``group``, as it runs now, while the block lasts.

        A group that is started again meanwhile is a new one. What is held back at the end of the
        block goes then.

        Raises:
            UsageError: the group has no such rank, or no processes.
            GroupClosedError: it does not run.
            GroupBrokenError: it broke.
        """
        gang: Any = group._core.running()  # noqa: SLF001  # says what is wrong with one that does not
        if not isinstance(gang, Gang):
            raise UsageError("a fault plan needs processes: the inline executor has none")
        for fault in self._faults:
            if not 0 <= fault.rank < group.world_size:
                raise UsageError(f"{group!r} has no rank {fault.rank}")
        sabotage = Sabotage(asyncio.get_running_loop(), gang, self._faults)
        sabotage.begin()
        try:
            yield
        finally:
            sabotage.end()

    def _with(self, fault: Fault) -> FaultPlan:
        if fault.at < 1:
            raise UsageError(f"calls are counted from 1, so none is number {fault.at!r}")
        return FaultPlan((*self._faults, fault))


@final
class Sequencer:
    """Runs blocks of several tasks in the order of their numbers, without sleeping.

    ::

        turn = Sequencer()

        async def one():
            async with turn(0): ...
            async with turn(2): ...

        async def other():
            async with turn(1): ...

    Each number is used once, from 0. It belongs to one event loop.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._passed: dict[int, asyncio.Event] = {}
        self._broken = False

    @contextlib.asynccontextmanager
    async def __call__(self, position: int) -> AsyncGenerator[None, None]:
        """Wait until the block before ``position`` has ended, then run this one.

        Raises:
            RuntimeError: the number was used before, or one that this waits for will never come,
                because its task was cancelled while it waited.
        """
        if position in self._taken:
            raise RuntimeError(f"position {position} was used before")
        self._taken.add(position)
        if position:
            try:
                if not self._broken:
                    await self._event(position - 1).wait()
            except BaseException:
                self._broken = True
                for event in self._passed.values():
                    event.set()
                raise
            if self._broken:
                raise RuntimeError(f"position {position} can't be reached: the sequence is broken")
        try:
            yield
        finally:
            self._event(position).set()

    def _event(self, position: int) -> asyncio.Event:
        return self._passed.setdefault(position, asyncio.Event())


@final
class no_leaks:  # read as a verb in a with statement
    """Fail a block that leaves a process, a descriptor or shared memory; or a task, as ``async with``.

    ::

        with no_leaks():
            asyncio.run(main())

    The guardian and the arena's descriptors stay, for the controller's life, and are not blamed.

    Args:
        settle: seconds that what is about to go is given.

    Raises:
        AssertionError: something was left; the message names it. Not raised over another exception.
    """

    def __init__(self, settle: float = leaks.SETTLE) -> None:
        self._settle = settle
        self._before: leaks.Snapshot | None = None
        self._tasks: frozenset[asyncio.Task[Any]] = frozenset()

    def __enter__(self) -> None:
        self._before = leaks.Snapshot.take()

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        if error is None and self._before is not None:
            _blame(leaks.leaks_since(self._before, self._settle))

    async def __aenter__(self) -> None:
        self._tasks = frozenset(asyncio.all_tasks())
        self.__enter__()

    async def __aexit__(self, kind: object, error: object, tb: object) -> None:
        if error is not None or self._before is None:
            return
        left = await leaks.pending_tasks(self._settle, self._tasks)
        # In a thread: what is about to go may need the loop for that.
        _blame(left + await asyncio.to_thread(leaks.leaks_since, self._before, self._settle))


def _blame(left: list[str]) -> None:
    if left:
        raise AssertionError("left behind:\n" + "\n".join(f"  {line}" for line in left))
