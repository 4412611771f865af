"""All ranks of one generation of a group as one fate: their calls, their failures, their end.

::

    wg.step(batch) ──▶ Gang.call ──frame──▶ Rank 0..n-1 ──lane──▶ worker
                          │ Pending                                  │
    Call's future ◀─ finish ◀── _receive ◀──RESULT / ERROR──────────┘
                          ▲
       WorkerDiedError ───┴── _exited ◀── Processes (pidfd, exit code)

Guaranteed here:

- A call is handed to all its ranks in one step, in the order of ``call`` (O-1).
- ``finish`` of every call is called exactly once (O-5, O-6): when all its ranks have answered, when
  a rank has failed and the others have not answered within ``error_grace`` (E-3), when the group
  breaks (E-4), or when it is abandoned (E-5).
- After ``stop`` or ``kill`` no process of the generation exists (E-6).

The pending table is changed in this file only.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from asyncwg._driver.guardian import Guardian, interpreter_flags
from asyncwg._driver.output import Output
from asyncwg._driver.postmortem import explain, oom_kills
from asyncwg._driver.process import Processes
from asyncwg._driver.rank import COMPUTE, Rank, RankState
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import NONE, Buffer, Kind, pack, unpack
from asyncwg._wire.launch import BootRecord
from asyncwg.errors import (
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerGroupError,
    WorkerStartError,
)

Finish = Callable[[list[Any] | None, Exception | None], None]
"""Takes ``(results by position, None)`` or ``(None, error)``."""

_POLITE_SHARE: Final = 0.75
"""Share of the grace for ``close()``; the rest is for what SIGTERM sets off."""


class Pending:
    """One call that some rank has not answered yet."""

    __slots__ = (
        "call_id", "errors", "finish", "label", "lane", "left", "on_error", "positions",
        "ranks", "results", "single", "timer", "votes", "watch",
    )  # fmt: skip

    def __init__(
        self,
        call_id: int,
        label: str,
        ranks: Sequence[int],
        lane: int,
        finish: Finish | None,
        *,
        single: bool,
        on_error: str,
    ) -> None:
        self.call_id = call_id
        self.label = label
        self.ranks = ranks
        self.lane = lane
        self.finish = finish
        self.single = single
        self.on_error = on_error
        self.left: set[int] = set(ranks)
        self.results: dict[int, Any] = {}
        self.errors: list[Exception] = []
        self.votes: dict[int, bool] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.watch: Callable[[], None] | None = None

    def landed(self) -> list[tuple[int, Any]]:
        """Return rank and value, or exception, of those that have answered, in that order."""
        failed = [(getattr(error, "rank", -1), error) for error in self.errors]
        return [*self.results.items(), *failed]


class Launch(NamedTuple):
    """What a generation is made from."""

    name: str
    """The group's, for messages."""
    session: str
    """Unique; the mark of its processes."""
    records: Sequence[BootRecord]
    output: Output
    init: codec.Encoded
    """``(cls, args, kwargs, method names, concurrency limits)``."""
    has_async: bool
    fresh: bool
    """Whether each rank is a fresh interpreter instead of a fork of the guardian."""
    preload: Sequence[str]
    preload_explicit: bool
    error_grace: float
    label: str
    """Name of the worker's class."""


@dataclass(slots=True)
class _Stopping:
    """What a stop has heard so far."""

    answered: set[int]
    errors: list[Exception]
    changed: asyncio.Event


class Gang:
    """One generation of a group. Belongs to the event loop that made it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, launch: Launch, guardian: Guardian) -> None:
        self._loop = loop
        self._launch = launch
        self._next_id = 0
        self._pending: dict[int, Pending] = {}
        self._broken: Exception | None = None
        self._stopping: _Stopping | None = None
        self.closed = False
        self.meshes: dict[str, list[tuple[int, bool] | None]] = {}
        self._oom_before = oom_kills()
        self._ranks = [
            Rank(loop, index, self._receive, self._lost, has_async=launch.has_async)
            for index in range(len(launch.records))
        ]
        sock = guardian.open_session(
            launch.session, launch.preload, explicit=launch.preload_explicit
        )
        self._processes = Processes(
            loop, guardian, sock, launch.session, self._exited, self._start_failed
        )

    @property
    def broken(self) -> Exception | None:
        """What broke it, or None."""
        return self._broken

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; 0 for one that was never started."""
        return [self._processes.pids.get(rank.index, 0) for rank in self._ranks]

    @property
    def alive(self) -> bool:
        """Whether every process lives and nothing has broken."""
        return (
            self._broken is None
            and not self.closed
            and all(self._processes.alive(rank.index) for rank in self._ranks)
        )

    @property
    def in_flight(self) -> list[int]:
        """Unanswered calls by rank."""
        counts = [0] * len(self._ranks)
        for pending in self._pending.values():
            for rank in pending.left:
                counts[rank] += 1
        return counts

    async def start(self, timeout: float | None) -> None:
        """Start all ranks and wait until every ``__init__`` and ``setup`` has returned.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            WorkerStartError: with what each failed rank raised. No process is left.

        Cancelling it leaves no process either.
        """
        done: asyncio.Future[None] = self._loop.create_future()

        def finish(_results: list[Any] | None, error: Exception | None) -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(None)

        pending = self._register(
            f"{self._launch.label}.__init__",
            range(len(self._ranks)),
            COMPUTE,
            finish,
            single=False,
            on_error="abort",
        )
        frame = pack(
            Kind.INIT, pending.call_id, self._launch.init.stream, self._launch.init.buffers
        )
        try:
            await self._launch_all(frame)
            async with asyncio.timeout(timeout):
                await done
        except TimeoutError:
            silent = sorted(pending.left)
            late = [self._late(rank, timeout) for rank in silent]
            await self.kill()
            raise self._start_error([*pending.errors, *late]) from None
        except (WorkerGroupError, WorkerDiedError, UsageError) as error:
            await self.kill()
            many = list(error.exceptions) if isinstance(error, WorkerGroupError) else [error]
            raise self._start_error(many) from None
        except BaseException:
            with contextlib.suppress(asyncio.CancelledError):
                await self.kill()
            raise

    async def _launch_all(self, frame: list[Buffer]) -> None:
        flags = interpreter_flags()
        for rank, record in zip(self._ranks, self._launch.records, strict=True):
            stdout, stderr = self._launch.output.descriptors(rank.index)
            try:
                await self._processes.start(
                    rank.index,
                    rank.give_descriptors(record, stdout, stderr),
                    fresh=self._launch.fresh,
                    flags=flags,
                )
            finally:
                rank.release()
            rank.send(COMPUTE, frame)
        self._launch.output.start()

    def _late(self, rank: int, timeout: float | None) -> Exception:
        error = CallTimeoutError(
            f"rank {rank} of {self._launch.name!r} was not ready after {timeout} s: "
            f"{self._launch.label}.__init__ or setup() has not returned"
        )
        error.rank = rank  # type: ignore[attr-defined]  # as on every error of a rank
        return error

    def _start_error(self, errors: Sequence[Exception]) -> WorkerStartError:
        ranks = ", ".join(str(getattr(error, "rank", "?")) for error in errors)
        return WorkerStartError(
            f"{self._launch.label} could not start in group {self._launch.name!r} (rank {ranks})",
            errors or [InternalError("no rank told why")],
        )

    def next_id(self) -> int:
        """Return the number of the next call; calls are sent in the order of their numbers."""
        self._next_id += 1
        return self._next_id

    def check(self) -> None:
        """Raise if no call can be taken.

        Raises:
            GroupBrokenError: it broke; the cause says how.
            GroupClosedError: it was shut down.
        """
        if self._broken is not None:
            raise GroupBrokenError(
                f"group {self._launch.name!r} broke and takes no calls until it is started again: "
                f"{type(self._broken).__name__}: {str(self._broken).splitlines()[0]}"
            ) from self._broken
        if self.closed or self._stopping is not None:
            raise GroupClosedError(f"group {self._launch.name!r} was shut down")

    def call(
        self,
        call_id: int,
        label: str,
        ranks: Sequence[int],
        lane: int,
        frames: Sequence[Sequence[Buffer]],
        finish: Finish,
        *,
        single: bool,
        on_error: str,
    ) -> Pending:
        """Hand a call to all its ranks, now.

        Args:
            call_id: from ``next_id``, in the frames.
            label: ``Class.method``.
            ranks: the ranks, in order.
            lane: `COMPUTE` or `ASYNC`.
            frames: one frame per position, or one for all.
            finish: told the outcome, once.
            single: whether an error comes alone instead of in a `WorkerGroupError`.
            on_error: ``"abort"`` or ``"wait"``.
        """
        pending = Pending(call_id, label, ranks, lane, finish, single=single, on_error=on_error)
        self._pending[call_id] = pending
        if len(frames) == 1:
            frame = frames[0]
            for rank in ranks:
                self._ranks[rank].lanes[lane].send(frame)
        else:
            for rank, frame in zip(ranks, frames, strict=True):
                self._ranks[rank].lanes[lane].send(frame)
        return pending

    def _register(
        self,
        label: str,
        ranks: Sequence[int],
        lane: int,
        finish: Finish,
        *,
        single: bool,
        on_error: str,
    ) -> Pending:
        pending = Pending(
            self.next_id(), label, ranks, lane, finish, single=single, on_error=on_error
        )
        self._pending[pending.call_id] = pending
        return pending

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for a call any more: drop it on all its ranks, or on none (E-5).

        Returns at once. Each rank is asked to hold the call; if no rank has started it, all drop
        it, otherwise all run it and its result is thrown away.
        """
        pending.finish = None
        if pending.timer is not None:
            pending.timer.cancel()
            pending.timer = None
        if pending.call_id not in self._pending or pending.votes is not None:
            return
        # A rank that has answered has started it.
        pending.votes = {rank: False for rank in pending.ranks if rank not in pending.left}
        for rank in list(pending.left):
            self._ranks[rank].control.send(pack(Kind.HOLD, pending.call_id, aux=pending.lane))

    def _vote(self, rank: int, call_id: int, lane: int, *, held: bool) -> None:
        pending = self._pending.get(call_id)
        if pending is None or pending.votes is None:
            # It has ended otherwise meanwhile; a rank that holds it must not wait for ever.
            self._ranks[rank].control.send(pack(Kind.RESUME, call_id, aux=lane))
            return
        pending.votes[rank] = held
        if len(pending.votes) < len(pending.ranks):
            return
        if all(pending.votes.values()):
            for each in pending.ranks:
                self._ranks[each].control.send(pack(Kind.DROP, call_id, aux=pending.lane))
            del self._pending[call_id]
            return
        for each in list(pending.left):
            control = self._ranks[each].control
            if pending.votes[each]:
                control.send(pack(Kind.RESUME, call_id, aux=pending.lane))
            control.send(pack(Kind.CANCEL, call_id, aux=pending.lane))

    def _receive(
        self, rank: int, call_id: int, kind: int, flags: int, aux: int, n_buffers: int,
        body: memoryview,
    ) -> None:  # fmt: skip
        if kind == Kind.RESULT:
            pending = self._pending.get(call_id)
            if pending is None or rank not in pending.left:
                return  # a late reply (O-6)
            if pending.finish is None or flags & NONE:
                pending.results[rank] = None
            else:
                try:
                    pending.results[rank] = codec.decode(*unpack(body, n_buffers))
                except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  # a user's unpickling
                    self._failed(pending, rank, self._unreadable(pending, rank, error))
                    return
            pending.left.discard(rank)
            if not pending.left:
                self._complete(pending)
            elif pending.watch is not None:
                pending.watch()
            return
        self._receive_rare(rank, call_id, kind, aux, n_buffers, body)

    def _receive_rare(
        self, rank: int, call_id: int, kind: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        if kind == Kind.ERROR:
            failure: failures.Failure = codec.decode(*unpack(body, n_buffers))
            self._error(rank, call_id, failure)
        elif kind == Kind.READY:
            self._ranks[rank].state = RankState.READY
            pending = self._pending.get(call_id)
            if pending is not None:
                pending.left.discard(rank)
                if not pending.left:
                    self._complete(pending)
        elif kind == Kind.MESHES:
            self._learn_meshes(rank, codec.decode(*unpack(body, n_buffers)))
        elif kind == Kind.STOPPED:
            self._stopped(rank)
        elif kind in (Kind.HELD, Kind.STARTED):
            self._vote(rank, call_id, aux, held=kind == Kind.HELD)
        elif kind != Kind.PONG:
            raise InternalError(f"rank {rank} sent a frame of kind {kind}")

    def _error(self, rank: int, call_id: int, failure: failures.Failure) -> None:
        if self._stopping is not None and call_id == 0:
            where = f"{self._launch.label}.close, rank {rank}"
            self._stopping.errors.append(failures.restore(failure, rank=rank, where=where))
            self._stopped(rank)
            return
        pending = self._pending.get(call_id)
        if pending is None or rank not in pending.left:
            return
        where = f"{pending.label}, rank {rank}, call {call_id}"
        self._failed(pending, rank, failures.restore(failure, rank=rank, where=where))

    def _unreadable(self, pending: Pending, rank: int, error: BaseException) -> Exception:
        told = WorkerError(
            type(error).__qualname__,
            f"the result of {pending.label} on rank {rank} can't be unpickled in the controller: "
            f"{error}",
            rank=rank,
        )
        told.__cause__ = error
        return told

    def _failed(self, pending: Pending, rank: int, error: Exception) -> None:
        pending.errors.append(error)
        pending.left.discard(rank)
        if pending.watch is not None:
            pending.watch()
        if not pending.left:
            self._complete(pending)
        elif len(pending.errors) == 1:
            pending.timer = self._loop.call_later(
                self._launch.error_grace, self._grace_over, pending
            )

    def _complete(self, pending: Pending) -> None:
        del self._pending[pending.call_id]
        if pending.timer is not None:
            pending.timer.cancel()
        finish = pending.finish
        if finish is None:
            return
        if pending.errors:
            finish(None, self._combine(pending))
        else:
            results = pending.results
            finish([results.get(rank) for rank in pending.ranks], None)

    def _combine(self, pending: Pending) -> Exception:
        if pending.single:
            return pending.errors[0]
        ranks = ", ".join(str(getattr(error, "rank", "?")) for error in pending.errors)
        return WorkerGroupError(
            f"{pending.label} failed on {len(pending.errors)} of {len(pending.ranks)} ranks "
            f"(rank {ranks})",
            pending.errors,
        )

    def _grace_over(self, pending: Pending) -> None:
        """The others have not answered: they may sit in a collective that nobody joins (E-3)."""
        pending.timer = None
        finish, pending.finish = pending.finish, None
        error = self._combine(pending)
        silent = ", ".join(str(rank) for rank in sorted(pending.left))
        error.add_note(
            f"rank {silent} had not answered {self._launch.error_grace} s after the first failure"
        )
        if pending.on_error == "abort":
            error.add_note("the group was broken off (on_error='abort'): its processes are ended")
            self._break(error)
        if finish is not None:
            finish(None, error)

    def _lost(self, rank: int, error: BaseException | None) -> None:
        """A stream ended. If the process has not, it has lost its mind or its descriptor: end it."""
        if error is not None and self._processes.alive(rank):
            self._break(InternalError(f"rank {rank} sent what is no frame: {error}"))
        self._processes.signal(rank, signal.SIGKILL)

    def _start_failed(self, rank: int | None, why: str) -> None:
        where = "a process" if rank is None else f"the process of rank {rank}"
        error = UsageError(f"{where} of group {self._launch.name!r} could not be started: {why}")
        self._break(error)

    def _exited(self, index: int, code: int | None) -> None:
        rank = self._ranks[index]
        rank.drain()
        expected = self.closed or self._broken is not None or rank.state is RankState.STOPPED
        rank.close()
        if expected:
            return
        self._launch_died(index, code)

    def _launch_died(self, index: int, code: int | None) -> None:
        waiting = [p for p in self._pending.values() if index in p.left]

        def explained(pending: Pending | None) -> WorkerDiedError:
            return explain(
                rank=index,
                pid=self._processes.pids.get(index, 0),
                exit_code=code,
                output=self._launch.output,
                oom_before=self._oom_before,
                method=None if pending is None else pending.label,
                call_id=None if pending is None else pending.call_id,
            )

        running = waiting[0] if waiting else None
        if self._stopping is not None:
            self._stopping.errors.append(explained(None))
            self._stopped(index)
            return
        self._break(explained(running), explained)

    def _break(
        self, cause: Exception, explained: Callable[[Pending], Exception] | None = None
    ) -> None:
        """End the group: every pending call fails now, every process is killed (E-4)."""
        if self._broken is not None or self.closed:
            return
        self._broken = cause
        for rank in self._ranks:
            self._processes.signal(rank.index, signal.SIGKILL)
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if each.timer is not None:
                each.timer.cancel()
            finish, each.finish = each.finish, None
            if finish is None:
                continue
            finish(None, self._broken_call(each, cause, explained))

    def _broken_call(
        self, pending: Pending, cause: Exception, explained: Callable[[Pending], Exception] | None
    ) -> Exception:
        if pending.errors:
            # What the ranks raised before the end came is the better news.
            told = [*pending.errors, *([explained(pending)] if explained is not None else [])]
            pending.errors = told
            return self._combine(pending)
        if explained is not None:
            return explained(pending)
        if isinstance(cause, UsageError | InternalError):
            return cause
        error = GroupBrokenError(
            f"{pending.label} was cut off: group {self._launch.name!r} broke meanwhile"
        )
        error.__cause__ = cause
        return error

    def _learn_meshes(self, rank: int, told: Mapping[str, Mapping[str, Any]]) -> None:
        collects = told["collect_dp_rank"]
        for mesh, dp_rank in told["dispatch_dp_rank"].items():
            table = self.meshes.setdefault(mesh, [None] * len(self._ranks))
            table[rank] = (dp_rank, bool(collects[mesh]))

    def _stopped(self, rank: int) -> None:
        if self._ranks[rank].state is not RankState.DEAD:
            self._ranks[rank].state = RankState.STOPPED
        if self._stopping is not None:
            self._stopping.answered.add(rank)
            self._stopping.changed.set()

    async def stop(self, grace: float) -> list[Exception]:
        """Stop politely within ``grace`` seconds, then otherwise; return what ``close()`` raised.

        Calls in flight fail with `GroupClosedError`. Cancelling it kills at once; either way no
        process is left.
        """
        if self.closed:
            return []
        if self._broken is not None:
            await self.kill()
            return []
        stopping = self._stopping = _Stopping(set(), [], asyncio.Event())
        self._fail_pending()
        deadline = self._loop.time() + grace
        try:
            for rank in self._ranks:
                rank.control.send(pack(Kind.STOP, 0))
                rank.send(COMPUTE, pack(Kind.STOP, 0))
            polite = self._loop.time() + grace * _POLITE_SHARE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(polite):
                    while len(stopping.answered) < len(self._ranks):
                        stopping.changed.clear()
                        await stopping.changed.wait()
            # Rank 0 leaves last: what the others still want of it is there.
            for ranks in ([r.index for r in self._ranks[1:]], [0]):
                for index in ranks:
                    self._ranks[index].control.send(pack(Kind.EXIT, 0))
                left = max(0.0, polite - self._loop.time())
                if not await self._processes.wait_exits(ranks, left):
                    break
            everyone = [rank.index for rank in self._ranks]
            for index in everyone:
                self._processes.signal(index, signal.SIGTERM)
            await self._processes.wait_exits(everyone, max(0.0, deadline - self._loop.time()))
        finally:
            await self.kill()
        return stopping.errors

    def _fail_pending(self) -> None:
        pending, self._pending = self._pending, {}
        for each in pending.values():
            if each.timer is not None:
                each.timer.cancel()
            if each.finish is not None:
                error = GroupClosedError(
                    f"{each.label} had not answered when group {self._launch.name!r} was shut down"
                )
                each.finish(None, error)

    async def kill(self) -> None:
        """Kill every process and wait until none is left. Cancelling it only defers the cancellation."""
        self.closed = True
        self._fail_pending()
        ending = self._loop.create_task(self._processes.end())
        cancelled: asyncio.CancelledError | None = None
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError as error:
                cancelled = error
        for rank in self._ranks:
            rank.close()
        self._processes.close()
        self._launch.output.close()
        if cancelled is not None:
            raise cancelled

    def abandon_all(self) -> None:
        """Let go of everything without an event loop: the guardian kills what is left."""
        self.closed = True
        for rank in self._ranks:
            rank.close()
        self._processes.close()
        self._launch.output.close()
