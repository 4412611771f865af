"""Plays a program against real groups, and keeps the model's books."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any, Final

from asyncwg import (
    Call,
    ClassWithInitArgs,
    GroupBrokenError,
    GroupClosedError,
    PerRank,
    ResourcePool,
    WorkerGroup,
)
from asyncwg._driver.arena import arena
from asyncwg._driver.guardian import guardian
from asyncwg.testing import FaultPlan
from benchmarks.chaos import model
from benchmarks.chaos.model import Life, Outcome, Sent
from benchmarks.chaos.program import ENDLESS, STREAMS, CallOp, GroupOp, KillOp, Op, ranks_of
from benchmarks.chaos.values import Value, equal, item_of, scaled, spoil, total
from benchmarks.chaos.worker import Chaos

BOUND: Final = 20.0
"""Seconds in which everything that is awaited must end."""
MANY: Final = 40
"""Calls under way in a slot beyond which the player waits for them."""
KEPT: Final = 12
"""Results that are kept and looked at again."""
LANES: Final = {
    **dict.fromkeys(
        ("echo_async", "give_async", "fail_async", "forever_async", "tell_async"), "async"
    ),
    "nap_async": "limited",
}
"""Where methods write down that they ran; all others are ``def``."""


class Failure(AssertionError):
    """The model and the groups don't agree."""


class Slot:
    """Where one group lives, and after it the next."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.group: WorkerGroup | None = None
        self.life = Life(size)
        self.calls: list[Sent] = []
        self.under_way: dict[int, Call[Any]] = {}
        self.idle = asyncio.Event()
        self.idle.set()


class Player:
    """Plays operations one after another; calls end when they end."""

    def __init__(self, sizes: list[int], *, verbose: bool = False) -> None:
        self.slots = [Slot(number, size) for number, size in enumerate(sizes)]
        self.counts: collections.Counter[str] = collections.Counter()
        self.worst_death = 0.0
        self._verbose = verbose
        self._token = 0
        self._results: collections.deque[tuple[Any, Any, Sent]] = collections.deque(maxlen=KEPT)
        self._last: tuple[Sent, Any, Call[Any]] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._complaints: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._unexpected)

    def _unexpected(self, _loop: object, context: dict[str, Any]) -> None:
        self._complaints.append(f"the loop was told: {context}")

    async def play(self, op: Op) -> None:
        """Do one operation."""
        slot = self.slots[op.slot]
        if slot.group is None:
            await self._start(slot)
        match op:
            case CallOp():
                await self._call(slot, op)
            case KillOp():
                self._kill(slot, op)
            case GroupOp():
                await self._do(slot, op)
        if len(slot.under_way) > MANY:
            await self._settle(slot)
        self._raise_complaints()

    async def end(self) -> None:
        """Shut everything down and see that nothing is left."""
        for slot in self.slots:
            await self._end_life(slot, 5.0)
        for task in list(self._tasks):
            await self._within(task, "a task")
        self._look()
        self._results.clear()
        self._last = None
        gc.collect()
        await self._within(self._until_empty(), "the arena")
        self._raise_complaints()

    async def _until_empty(self) -> None:
        while arena().in_use():
            gc.collect()
            await asyncio.sleep(0.01)

    async def stacks(self) -> str:
        """Say where everybody is."""
        told: list[str] = []
        for slot in self.slots:
            if slot.group is None or slot.group.state != "running":
                told.append(f"slot {slot.number}: {slot.group!r}")
                continue
            told.append(f"slot {slot.number}: {slot.group!r} {slot.group.pids}")
            told.append(str(await slot.group.stacks()))
            told += [f"under way: {sent}" for sent in slot.calls if sent.token in slot.under_way]
            told += [
                f"in the table: {pending.label} {pending.call_id} silent {pending.silent} "
                f"votes {pending.votes} unsent {pending.unsent}"
                for pending in self._pending(slot.group)
            ]
        return "\n".join(told)

    def _pending(self, group: WorkerGroup) -> list[Any]:
        gang: Any = group._core.gang  # noqa: SLF001  # nothing may stay in the table
        return list(gang.calls._pending.values())  # noqa: SLF001

    def _say(self, text: str) -> None:
        if self._verbose:
            print(f"  {text}", flush=True)

    def _raise_complaints(self) -> None:
        if self._complaints:
            raise Failure("\n".join(self._complaints))

    async def _within(self, awaitable: Awaitable[Any], what: str) -> Any:
        if isinstance(awaitable, Call):
            awaitable = _result_of(awaitable)
        task = asyncio.ensure_future(awaitable)
        done, _ = await asyncio.wait({task}, timeout=BOUND)
        if not done:
            raise Failure(f"{what}: not done after {BOUND} s")
        return task.result()

    # -- the life of a group ----------------------------------------------------------------------

    async def _start(self, slot: Slot) -> None:
        pool = ResourcePool([slot.size], use_gpu=False)
        group = WorkerGroup(
            pool,
            ClassWithInitArgs(Chaos),
            name=f"chaos{slot.number}",
            start_timeout=60,
            arena_limit=64 << 20,
        )
        await group.__aenter__()
        slot.group = group
        slot.life = Life(slot.size)
        slot.calls = []
        self.counts["starts"] += 1

    async def _settle(self, slot: Slot) -> None:
        """Wait until every call of a slot has ended, and judge them."""
        await self._within(
            slot.idle.wait(),
            f"slot {slot.number}, {[str(s) for s in slot.calls if s.outcome is None]}",
        )
        for sent in slot.calls:
            problem = model.complaint(sent)
            if problem:
                self._complaints.append(problem)
        self._complaints += model.late_complaints(slot.calls)
        if slot.life.killed:
            first = min(slot.life.killed.values())
            ends = [s.made_at + s.outcome.seconds for s in slot.calls if s.outcome is not None]
            self.worst_death = max(
                [self.worst_death, *(end - first for end in ends if end > first)]
            )

    async def _drain(self, slot: Slot) -> None:
        """Settle, and if the group lives, compare what the ranks have run."""
        await self._settle(slot)
        group = slot.group
        if group is None or group.state != "running" or slot.life.killed:
            await self._recover(slot)
            return
        logs: Any = None
        try:
            logs = await self._within(group.take_logs(), f"the logs of slot {slot.number}")
        except GroupBrokenError:
            await self._recover(slot)  # it was broken off meanwhile
            return
        for lane in ("def", "async", "limited"):
            by_rank = {rank: each[lane] for rank, each in enumerate(logs)}
            self._complaints += model.order_complaints(slot.calls, by_rank, lane)
        slot.calls = []
        await self._within(self._until_answered(group), f"the table of slot {slot.number}")
        gang: Any = group._core.gang  # noqa: SLF001  # what it knows of its ranks
        if any(gang.calls.load):
            self._complaints.append(f"ranks seem to have something to do: {gang.calls.load}")
        self.counts["drained"] += 1

    async def _until_answered(self, group: WorkerGroup) -> None:
        while self._pending(group):  # noqa: ASYNC110  # nobody tells it
            await asyncio.sleep(0.001)

    async def _recover(self, slot: Slot) -> None:
        """A group broke, or is about to: start it again when it is known."""
        group = slot.group
        if group is None:
            return
        if slot.life.killed:
            await self._within(_until_broken(group), f"the death in slot {slot.number}")
        await self._settle(slot)
        if group.state == "broken":
            if not slot.life.killed and not slot.life.broken_off:
                cause: Any = group._core.gang  # noqa: SLF001
                raise Failure(f"slot {slot.number} broke for no reason: {cause.broken!r}")
            self.counts["broken"] += 1
        self._raise_complaints()
        await self._restart(slot, 5.0)

    async def _restart(self, slot: Slot, grace: float) -> None:
        group = slot.group
        assert group is not None
        slot.life.ended = True
        restarting = asyncio.create_task(group.restart(grace))
        await asyncio.sleep(0)
        with contextlib.suppress(GroupBrokenError):
            group.nap(0, 0.0)
            self._complaints.append("a call was taken by a group that is being started")
        await self._within(restarting, f"the restart of slot {slot.number}")
        await self._settle(slot)
        slot.life = Life(slot.size)
        slot.calls = []
        self.counts["restarts"] += 1

    async def _end_life(self, slot: Slot, grace: float, *, drop: bool = False) -> None:
        group, slot.group = slot.group, None
        if group is None:
            return
        slot.life.ended = True
        if drop:
            del group
            gc.collect()
        else:
            with contextlib.suppress(BaseExceptionGroup):  # what died while it was being shut down
                await self._within(group.shutdown(grace), f"the end of slot {slot.number}")
        await self._settle(slot)
        slot.calls = []

    async def _do(self, slot: Slot, op: GroupOp) -> None:
        group = slot.group
        assert group is not None
        self.counts[op.what] += 1
        self._say(str(op))
        match op.what:
            case "drain":
                await self._drain(slot)
            case "restart":
                await self._restart(slot, op.grace)
            case "replace" | "drop":
                del group
                await self._end_life(slot, op.grace, drop=op.what == "drop")
                slot.size = op.size
            case "stacks" | "health":
                try:
                    await self._within(
                        group.stacks() if op.what == "stacks" else group.check_health(), op.what
                    )
                except GroupBrokenError:
                    await self._recover(slot)
            case "look":
                self._look()
            case "forget":
                self._results.clear()
                self._last = None
            case _:
                raise ValueError(op.what)

    def _kill(self, slot: Slot, op: KillOp) -> None:
        group = slot.group
        if group is None or group.state != "running" or op.rank in slot.life.killed:
            return
        self._say(str(op))
        self.counts[f"kill by {op.how}"] += 1
        if op.how in ("leave", "garble"):
            self._make(slot, op.rank, op)
            return
        if op.how == "guardian":
            self._kill_guardian()
            return
        pid = group.pids[op.rank]
        if not pid:
            raise Failure(f"rank {op.rank} of {group!r} has no process: {group.pids}")
        slot.life.killed[op.rank] = time.monotonic() + (0.05 if op.how == "stop" else 0.0)
        if op.how == "stop":
            os.kill(pid, signal.SIGSTOP)
            self._loop.call_later(0.05, _end_process, pid)
        else:
            os.kill(pid, signal.SIGTERM if op.how == "term" else signal.SIGKILL)

    def _kill_guardian(self) -> None:
        for slot in self.slots:
            if slot.group is not None:
                now = time.monotonic()
                slot.life.killed |= dict.fromkeys(range(slot.size), now)
        keeper = guardian()
        keeper.kill()
        while keeper.alive:  # a start that meets it dying fails, and rightly so
            time.sleep(0.001)

    def _make(self, slot: Slot, rank: int, op: KillOp) -> None:
        group = slot.group
        assert group is not None
        self._token += 1
        token = self._token
        sent = Sent(token, op.how, slot.life, (rank,), time.monotonic(), single=True)
        # It happens when its turn comes, at once or after all that is before it.
        slot.life.killed[rank] = time.monotonic() + BOUND
        if op.how == "leave":
            sent.does, sent.failing = "die", (rank,)
            self._follow(slot, sent, lambda: group[rank].leave(token, [rank]), None, op)
        else:
            slot.life.garbled = True
            # Until it has ended: it may be sent later, behind a call that waits for another's value.
            plan = contextlib.ExitStack()
            plan.enter_context(FaultPlan().corrupt(rank).on(group))
            call = self._follow(slot, sent, lambda: group[rank].nap(token, 0.0), rank, op)
            if call is None:
                plan.close()
            else:
                call.add_done_callback(lambda _call: plan.close())

    # -- calls ------------------------------------------------------------------------------------

    async def _call(self, slot: Slot, op: CallOp) -> None:
        group = slot.group
        assert group is not None
        if group.state != "running":
            await self._recover(slot)
        self._token += 1
        token = self._token
        self.counts["calls"] += 1
        ranks = ranks_of(op.view, slot.size)
        single = isinstance(op.view, int)
        sent = Sent(token, op.method, slot.life, ranks, time.monotonic(), single)
        sent.lane = LANES.get(op.method, "def")
        sent.timeout = op.options.get("timeout")
        surface: Any = group
        if op.view is not None:
            index: Any = op.view if single else slice(*op.view)  # type: ignore[misc]
            surface = group[index]
        proxy = getattr(surface, op.method).options(**op.options)
        args, expected = self._arguments(op, sent, token, ranks, single)
        self._say(f"{token}: {op}")
        make = functools.partial(proxy, *args)
        if op.method in STREAMS:
            sent.stream = True
            make = functools.partial(self._read, sent, proxy, args, op)
        call = self._follow(slot, sent, make, expected, op)
        if call is None:
            await self._recover(slot)
            return
        if op.spoil and op.uses == "value" and not op.per_rank and op.value.kind != "shared":
            # What is shared may not be written to: that is its price.
            sent.spoiled = spoil(args[1]) if len(args) > 1 else False
        if op.cancel is not None:
            self._cancel_later(sent, call, *op.cancel)
        if op.method not in ("fail", "fail_async", *ENDLESS, *STREAMS, "metric"):
            self._last = (sent, expected, call)
        await self._wait(sent, call, op)

    def _arguments(
        self, op: CallOp, sent: Sent, token: int, ranks: tuple[int, ...], single: bool
    ) -> tuple[list[Any], Any]:
        count = len(ranks)

        def by_rank(values: list[Any]) -> Any:
            return values[0] if single else values

        match op.method:
            case "nap" | "nap_async":
                return [token, min(op.seconds, 0.02)], by_rank(list(ranks))
            case "fail" | "fail_async":
                sent.does, sent.failing = "raise", op.failing
                return [token, list(op.failing), op.seconds], None
            case "until_told" | "forever_async":
                sent.does = "never"
                return [token], None
            case "tell" | "tell_async":
                if op.failing:
                    sent.does, sent.failing = "raise", op.failing
                # Large ones as many as the group has room for.
                return [token, op.number, min(op.value.size, 100_000), list(op.failing)], "all"
            case "give" | "give_async":
                size, seed = op.value.size, op.number
                expected = [_Given(size, seed * 8 + rank) for rank in ranks]
                return [token, size, seed], by_rank(expected)
            case "scale":
                return [token, op.value.build(), op.number], _Scaled(op.value, op.number)
            case "metric":
                return [token, op.value.build()], _Sum(op.value, single=single)
            case "each":
                items = [
                    Value(op.value.kind, op.value.size, op.value.seed + n) for n in range(count)
                ]
                return [[token] * count, [item.build() for item in items]], list(items)
            case _:
                pass
        value, expected = self._value(op, sent)
        if op.per_rank:
            value = PerRank([value] * count)
        if op.method in ("own", "keep"):
            own = op.method == "own"
            return [token, value], by_rank([_Total(expected, own=own)] * count)
        if op.method in ("first", "whichever"):
            sent.anywhere = op.method == "whichever"
            if op.method == "first":
                sent.ranks = ranks[:1]
            sent.single = True
            return [token, value], expected
        return [token, value], by_rank([expected] * count)

    def _value(self, op: CallOp, sent: Sent) -> tuple[Any, Any]:
        """Return an argument and what makes an equal one."""
        if op.uses == "value" or op.per_rank or self._last is None:
            return op.value.build(), op.value
        before, expected, call = self._last
        if op.uses == "call" and before.outcome is None:
            sent.needs = before
            return call, expected
        if before.outcome is not None and before.outcome.kind == "right":
            return call.result(), expected
        return op.value.build(), op.value

    def _follow(
        self, slot: Slot, sent: Sent, make: Any, expected: Any, op: Any
    ) -> Call[Any] | None:
        slot.calls.append(sent)
        try:
            call: Call[Any] = make()
        except (GroupBrokenError, GroupClosedError) as error:
            sent.outcome = Outcome("refused", 0.0, error)
            return None
        slot.under_way[sent.token] = call
        slot.idle.clear()
        keep = isinstance(op, CallOp) and op.keep

        def ended(done: Any) -> None:
            sent.outcome = _outcome(done, sent, expected, op)
            self.counts[sent.outcome.kind] += 1
            if sent.outcome.error is not None:
                self.counts[type(sent.outcome.error).__name__] += 1
                notes = "".join(getattr(sent.outcome.error, "__notes__", ()))
                if model.BROKEN_OFF in notes:
                    slot_life.broken_off = True
            elif keep and sent.outcome.kind == "right":
                self._results.append((done.result(), expected, sent))
            del slot.under_way[sent.token]
            if not slot.under_way:
                slot.idle.set()

        slot_life = slot.life
        call.add_done_callback(ended)
        return call

    def _read(self, sent: Sent, proxy: Any, args: list[Any], op: CallOp) -> Any:
        """Begin to read a generator; what is returned stands for the call."""
        stream = proxy(*args)
        begun: list[bool] = []
        reading = self._loop.create_task(_items_of(sent, stream, args[2], op, begun))

        def ended(_task: object) -> None:
            if not begun:  # it was cancelled before its loop, and its traceback holds the stream
                stream.close()
                call = stream._call  # noqa: SLF001  # what it has raised by then, nobody has seen
                if call.done() and not call.cancelled():
                    call.exception()

        reading.add_done_callback(ended)
        return reading

    def _cancel_later(self, sent: Sent, call: Call[Any], kind: str, amount: float) -> None:
        def now() -> None:
            if not call.done():
                sent.cancelled = True
                call.cancel()

        def turn(left: float) -> None:
            if left <= 0:
                now()
            else:
                self._loop.call_soon(turn, left - 1)

        if kind == "turns":
            turn(amount)
        else:
            self._loop.call_later(amount, now)

    async def _wait(self, sent: Sent, call: Call[Any], op: CallOp) -> None:
        match op.wait_by:
            case "callback":
                return
            case "await":
                waiting: Any = _result_of(call)
            case "gather":
                waiting = asyncio.gather(call, return_exceptions=True)
            case "task":
                waiting = asyncio.create_task(call)
            case "results":
                waiting = call.results()
            case "as_completed":
                waiting = _each(call)
            case "wait_for":
                waiting = self._wait_for(sent, call)
            case _:
                raise ValueError(op.wait_by)
        try:
            await self._within(waiting, f"{sent} by {op.wait_by}")
        except Failure:
            raise
        except (Exception, asyncio.CancelledError):  # noqa: BLE001, S110
            pass  # the callback has seen it

    async def _wait_for(self, sent: Sent, call: Call[Any]) -> None:
        try:
            await asyncio.wait_for(_marked(sent, call), 0.005)
        except TimeoutError:
            pass

    def _look(self) -> None:
        """Look at results that were kept, and write to one."""
        for result, expected, sent in self._results:
            if not _is(result, expected):
                self._complaints.append(f"the result of {sent} has changed since")
        if self._results:
            result, _, _ = self._results.popleft()
            spoil(result)


async def _marked(sent: Sent, call: Call[Any]) -> None:
    try:
        await call
    except asyncio.CancelledError:
        sent.cancelled = True
        raise


async def _result_of(call: Call[Any]) -> Any:
    return await call


async def _items_of(sent: Sent, stream: Any, size: int, op: CallOp, begun: list[bool]) -> str:
    """Read items, and say what is wrong with them, or that all have come."""
    begun.append(True)
    counts = dict.fromkeys(sent.ranks, 0)
    async for rank, item in stream:
        if rank not in counts or not equal(item, item_of(rank, counts[rank], size)):
            return f"item {counts.get(rank)} of rank {rank} is {_short(item)}"
        counts[rank] += 1
        if op.seconds:
            await asyncio.sleep(min(op.seconds, 0.005))
        if sum(counts.values()) == op.read:
            sent.cancelled = True
            break
    else:
        return "all" if set(counts.values()) == {op.number} else f"so many items came: {counts}"
    raise asyncio.CancelledError


async def _each(call: Call[Any]) -> None:
    async for _ in call.as_completed():
        pass


async def _until_broken(group: WorkerGroup) -> None:
    while group.state == "running":  # noqa: ASYNC110  # nobody tells it
        await asyncio.sleep(0.001)


def _end_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class _Given:
    """What ``give`` makes."""

    def __init__(self, size: int, number: int) -> None:
        self.size, self.number = size, number

    def build(self) -> Any:
        import torch

        return torch.full((self.size,), self.number, dtype=torch.int64)


class _Scaled:
    def __init__(self, value: Value, factor: int) -> None:
        self.value, self.factor = value, factor

    def build(self) -> Any:
        return scaled(self.value.build(), self.factor)


class _Total:
    """The sum of what was sent, after the worker may have written to it."""

    def __init__(self, value: Any, *, own: bool) -> None:
        self.value, self.own = value, own

    def build(self) -> int:
        made = _made(self.value)
        if self.own:
            spoil(made)
        return total(made)


class _Sum:
    def __init__(self, value: Value, *, single: bool) -> None:
        self.value, self.single = value, single


def _is(result: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return (
            isinstance(result, list)
            and len(result) == len(expected)
            and all(map(_is, result, expected))
        )
    if isinstance(expected, _Sum):
        return bool((result if expected.single else sum(result)) == total(expected.value.build()))
    if hasattr(expected, "build"):
        return equal(result, expected.build())
    return bool(result == expected)


def _outcome(done: Any, sent: Sent, expected: Any, op: Any) -> Outcome:
    seconds = time.monotonic() - sent.made_at
    if done.cancelled():
        return Outcome("cancelled", seconds)
    error = done.exception()
    if error is not None:
        return Outcome("raised", seconds, error)
    result = done.result()
    if sent.does != "return" or _is(result, expected):
        return Outcome("right", seconds)
    return Outcome("wrong", seconds, None, f"{_short(result)} for {op}")


def _made(expected: Any) -> Any:
    if isinstance(expected, list):
        return [_made(each) for each in expected]
    if isinstance(expected, Value) and expected.kind == "inference":
        expected = replace(expected, kind="tensor")  # as it arrives
    return expected.build() if hasattr(expected, "build") else expected


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else text[:300] + "..."
