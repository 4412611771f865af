"""All ranks of one generation of a group as one fate: their calls, their failures, their end.

::

    wg.step(batch) ──▶ Calls.send ──frame──▶ Rank 0..n-1 ──lane──▶ worker
                       Calls: pending table                          │
              Call ◀─ settle ◀── _receive ◀──RESULT / ERROR─────────┘
                          ▲
       WorkerDiedError ───┴── _exited ◀── Processes (pidfd, exit code)

Guaranteed here:

- When a rank's process ends, every pending call fails with an error of its own, and the survivors are
  ended too (E-4).
- After ``stop`` or ``kill`` no process of the generation exists (E-6).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncwg._driver.arena import arena
from asyncwg._driver.calls import Calls
from asyncwg._driver.guardian import Guardian, interpreter_flags
from asyncwg._driver.launch import Launch
from asyncwg._driver.pending import Outcome, Pending
from asyncwg._driver.postmortem import explain, oom_kills
from asyncwg._driver.process import Processes
from asyncwg._driver.rank import COMPUTE, Rank, RankState
from asyncwg._driver.transfers import Transfers
from asyncwg._driver.watch import Watch
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import BESIDE, ITEMS, Buffer, Kind, pack, unpack
from asyncwg.errors import (
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    UsageError,
    WorkerDiedError,
    WorkerGroupError,
    WorkerStartError,
)
from asyncwg.mesh import learn_meshes

_RESULT: Final = int(Kind.RESULT)
_POLITE_SHARE: Final = 0.75
"""Share of the grace for ``close()``; the rest is for what SIGTERM sets off."""


@dataclass(slots=True)
class _Stopping:
    """What a stop has heard so far."""

    answered: set[int]
    errors: list[Exception]
    changed: asyncio.Event


class _Starting:
    """Outcome of the call that builds the objects."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()

    def settle(self, results: list[Any] | None, error: Exception | None) -> None:
        if self.done.done():
            return
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


class Gang:
    """One generation of a group. Belongs to the event loop that made it."""

    has_arena = True
    """Whether large values go through the arena."""

    def __init__(self, loop: asyncio.AbstractEventLoop, launch: Launch, guardian: Guardian) -> None:
        self._loop = loop
        self._launch = launch
        self._terminating = False
        """Whether what still runs is being ended the hard way."""
        self.usable = False
        """Whether calls may be sent: it has started, and has not broken or ended."""
        self._broken: Exception | None = None
        self._stopping: _Stopping | None = None
        self.on_break: Callable[[Exception], None] | None = None
        """Called, in the loop's next turn, with what has broken the group."""
        self.closed = False
        self.meshes: dict[str | None, dict[str, list[tuple[int, bool] | None]]] = {}
        """By role (None for the worker itself) and the mesh's name."""
        self.on_meshes: Callable[[], None] | None = None
        """Called when ranks have registered meshes."""
        self._oom_before = oom_kills()
        self._ranks = [
            Rank(loop, index, self._receive, self._lost, has_async=launch.has_async)
            for index in range(len(launch.records))
        ]
        self.transfers = Transfers(
            loop, self._ranks, launch.session, launch.arena_limit, launch.arena_timeout
        )
        self.calls = Calls(
            loop,
            self._ranks,
            launch.error_grace,
            self._overdue,
            self.transfers.receive,
            self.transfers.readers_gone,
        )
        sock = guardian.open_session(
            launch.session, launch.preload, explicit=launch.preload_explicit
        )
        self._processes = Processes(
            loop, guardian, sock, launch.session, self._exited, self._start_failed
        )
        self.watch = Watch(loop, self._ranks, self.calls, self._processes, launch.name)

    @property
    def session(self) -> str:
        """The mark of its processes, unique."""
        return self._launch.session

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

    async def start(self, timeout: float | None) -> None:
        """Start all ranks and wait until every ``__init__`` and ``setup`` has returned.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            WorkerStartError: with what each failed rank raised. No process is left.

        Cancelling it leaves no process either.
        """
        starting = _Starting(self._loop)
        everyone = range(len(self._ranks))
        label = f"{self._launch.label}.__init__"
        pending = self.calls.register(
            self.calls.next_id(), label, everyone, COMPUTE, starting, single=False, on_error="abort"
        )
        frame = pack(
            Kind.INIT, pending.call_id, self._launch.init.stream, self._launch.init.buffers
        )
        try:
            await self._launch_all(frame)
            async with asyncio.timeout(timeout):
                await starting.done
                # A rank may have answered before the guardian came to tell who it is.
                await self._processes.known(len(self._ranks))
            if self._broken is not None:  # since the last of them was ready
                raise self._broken
            self.usable = True
        except TimeoutError:
            late = [self._late(rank, timeout) for rank in pending.silent]
            await self.kill()
            raise self._start_error([*(pending.errors or {}).values(), *late]) from None
        except (WorkerGroupError, WorkerDiedError, UsageError, InternalError) as error:
            await self.kill()
            many = list(error.exceptions) if isinstance(error, WorkerGroupError) else [error]
            raise self._start_error(many) from None
        except BaseException:
            starting.done.cancel()  # nobody waits for it any more
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
                    rank.give_descriptors(record, stdout, stderr, arena().fd),
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

    def check(self) -> None:
        """Raise if no call can be taken.

        Raises:
            GroupBrokenError: it broke; the cause says how.
            GroupClosedError: it was shut down.
        """
        if self._broken is not None:
            raise GroupBrokenError(
                f"group {self._launch.name!r} broke and takes no calls until it is started again: "
                f"{type(self._broken).__name__}: {failures.text_of(self._broken).partition(chr(10))[0]}"
            ) from self._broken
        if self.closed or self._stopping is not None:
            raise GroupClosedError(f"group {self._launch.name!r} was shut down")

    def _receive(
        self, rank: int, call_id: int, kind: int, flags: int, aux: int, n_buffers: int,
        body: memoryview,
    ) -> None:  # fmt: skip
        if kind == _RESULT:
            self.calls.result(rank, call_id, flags, n_buffers, body)
        else:
            self._receive_rare(rank, call_id, kind, flags, aux, n_buffers, body)

    def _receive_rare(
        self, rank: int, call_id: int, kind: int, flags: int, aux: int, n_buffers: int,
        body: memoryview,
    ) -> None:  # fmt: skip
        if kind == Kind.ITEM:
            self.calls.item(rank, call_id, flags, n_buffers, body)
        elif kind == Kind.ERROR:
            failure: failures.Failure = codec.decode(*unpack(body, n_buffers))
            self._error(rank, call_id, failure)
        elif kind == Kind.READY:
            self._ranks[rank].state = RankState.READY
            self.calls.answered(rank, call_id)
        elif kind == Kind.OFFER:
            if flags & BESIDE:
                self.calls.returned(rank, call_id)
            self.transfers.offered(rank, call_id, self.calls.get(call_id), body)
        elif kind == Kind.RELEASE:
            self.transfers.released(rank, body)
        elif kind == Kind.MESHES:
            told = codec.decode(*unpack(body, n_buffers))
            learn_meshes(self.meshes, told, rank, len(self._ranks))
            if self.on_meshes is not None:
                self.on_meshes()
        elif kind == Kind.STOPPED:
            self._stopped(rank)
        elif kind in (Kind.HELD, Kind.STARTED):
            begun = ITEMS.unpack(body)[0] if body else 0
            self.calls.vote(rank, call_id, aux, held=kind == Kind.HELD, begun=begun)
        elif kind == Kind.EXPIRED:
            self.calls.expired(rank, call_id)
        elif kind == Kind.PONG:
            self.watch.pong(call_id, bytes(body))
        else:
            raise InternalError(f"rank {rank} sent a frame of kind {kind}")

    def _error(self, rank: int, call_id: int, failure: failures.Failure) -> None:
        if self._stopping is not None and call_id == 0:
            where = f"{self._launch.label}.close, rank {rank}"
            self._stopping.errors.append(failures.restore(failure, rank=rank, where=where))
            self._stopped(rank)
            return
        self.calls.error(rank, call_id, failure)

    def _overdue(self, pending: Pending, outcome: Outcome | None, error: Exception) -> None:
        """A call's other ranks have not answered in time: say where they are, then break off (E-3)."""

        def told() -> None:
            if pending.on_error == "abort":
                error.add_note(
                    "the group was broken off (on_error='abort'): its processes are ended"
                )
                self._break(error)
            if outcome is not None:
                outcome.settle(None, error)

        self.watch.explain(pending, error, told)

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
        expected = (
            self.closed
            or self._terminating
            or self._broken is not None
            or rank.state is RankState.STOPPED
        )
        rank.close()
        self.transfers.lost(index)
        if expected:
            return
        self._launch_died(index, code)

    def _launch_died(self, index: int, code: int | None) -> None:
        running = self.calls.running_on(index)

        def explained(pending: Pending | None) -> WorkerDiedError:
            return explain(
                rank=index,
                pid=self._processes.pids.get(index, 0),
                exit_code=code,
                output=self._launch.output,
                oom_before=self._oom_before,
                method=None if pending is None else pending.label,
                call_id=None if pending is None else pending.call_id,
                guardian_pid=self._processes.guardian_gone,
            )

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
        self.usable = False
        if self.on_break is not None:
            self._loop.call_soon(self.on_break, cause)
        for rank in self._ranks:
            self._processes.signal(rank.index, signal.SIGKILL)
        self.calls.fail_all(lambda pending: self._broken_call(pending, cause, explained))

    def _broken_call(
        self, pending: Pending, cause: Exception, explained: Callable[[Pending], Exception] | None
    ) -> Exception:
        if explained is not None:
            died = explained(pending)
            for rank, error in (pending.errors or {}).items():
                # Often the death's own echo, from a collective whose peer has gone.
                told = failures.text_of(error)
                died.add_note(f"rank {rank} had raised {type(error).__name__}: {told}")
            return died
        if pending.errors:
            return pending.combined()
        if isinstance(cause, UsageError | InternalError):
            return cause
        error = GroupBrokenError(
            f"{pending.label} was cut off: group {self._launch.name!r} broke meanwhile"
        )
        error.__cause__ = cause
        return error

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
        self.usable = False
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
            self._terminating = True
            for index in everyone:
                self._processes.signal(index, signal.SIGTERM)
            await self._processes.wait_exits(everyone, max(0.0, deadline - self._loop.time()))
        finally:
            await self.kill()
        return stopping.errors

    def _fail_pending(self) -> None:
        self.calls.fail_all(
            lambda pending: GroupClosedError(
                f"{pending.label} had not answered when group {self._launch.name!r} was shut down"
            )
        )

    async def kill(self) -> None:
        """Kill every process and wait until none is left. Cancelling it only defers the cancellation."""
        self.closed = True
        self.usable = False
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
        await self.watch.close()
        self._processes.close()
        self.transfers.close()
        self._launch.output.close()
        if cancelled is not None:
            raise cancelled

    def abandon_all(self) -> None:
        """Let go of everything without waiting: the guardian kills what is left."""
        self.closed = True
        self.usable = False
        self._fail_pending()  # a call may live longer than its group
        self.watch.stop()
        for rank in self._ranks:
            rank.close()
        self._processes.close()
        self.transfers.close()
        self._launch.output.close()
