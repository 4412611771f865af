"""The inline executor: all ranks in the controller's own process, for tests and for pdb.

``def`` bodies run when they are called, rank by rank; ``async def`` bodies run as tasks of the
controller's loop. Arguments and results pass through bytes, as they do between processes, so what can't
be pickled fails here too, and nothing is shared by accident. There is no environment contract, no
process group beyond one rank, no death, and no parallelism: methods that meet in a collective would
wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from asyncwg._driver.calls import Calls
from asyncwg._driver.launch import Spec
from asyncwg._driver.pending import Outcome, Pending
from asyncwg._driver.stacks import HangReport, Stacks
from asyncwg._wire import codec
from asyncwg._wire.frames import NONE, Assembler, Buffer, Kind, pack, unpack
from asyncwg._wire.sources import inline
from asyncwg._worker import context
from asyncwg._worker.context import CurrentCall, Place
from asyncwg._worker.credits import LoopCredits
from asyncwg._worker.parts import Objects, blaming, hooks_of, objects_of, raise_together
from asyncwg._worker.service import Request, Service
from asyncwg.decorator import ROLES
from asyncwg.errors import GroupClosedError, WorkerStartError
from asyncwg.mesh import learn_meshes

_ORDINARY: Final = (Kind.CALL, Kind.RUN)


class _Blocks:
    """Stands for the arena, which an inline rank has no use for."""

    def unpack(
        self, body: memoryview, n_buffers: int, _flags: int
    ) -> tuple[memoryview, list[memoryview]]:
        return unpack(body, n_buffers)


class _Lane:
    """Takes frames as a channel does, and serves them on the spot."""

    backlog = 0

    def __init__(self, serve: Callable[[int, int, int, int, int, memoryview], None]) -> None:
        self._assembler = Assembler()
        self._serve = serve

    def send(self, pieces: Sequence[Buffer]) -> None:
        view = memoryview(b"".join(pieces))
        while view:
            room = self._assembler.room()
            count = min(len(room), len(view))
            room[:count] = view[:count]
            view = view[count:]
            self._assembler.advance(count, self._serve)


class InlineRank:
    """One rank: the user's object, and lanes that serve it."""

    def __init__(self, gang: InlineGang, index: int, place: Place) -> None:
        self.index = index
        self._gang = gang
        self._place = place
        self._service: Service | None = None
        self._objects: Objects = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, CurrentCall] = {}
        """Of generators that run."""
        lane = _Lane(self._serve)
        self.lanes = (lane, lane)
        self.control = _Lane(self._take_control)

    async def build(self, spec: Spec) -> None:
        """Build the object from the class's bytes, as a worker does."""
        encoded = codec.encode((spec.args, dict(spec.kwargs), dict(spec.roles)))
        args, kwargs, roles = codec.decode(
            encoded.stream, [bytearray(b) for b in inline(encoded.buffers)]
        )
        with self._here():
            cls: Any = spec.cls
            worker = cls.__new__(cls)
            with contextlib.suppress(AttributeError):  # a class with slots asks its place each time
                vars(worker).update(
                    rank=self._place.rank,
                    world_size=self._place.world_size,
                    local_rank=self._place.local_rank,
                    local_world_size=self._place.local_world_size,
                )
                if roles:
                    vars(worker)[ROLES] = roles  # with arguments that no other rank has
            worker.__init__(*args, **kwargs)
            self._objects = objects_of(worker, list(spec.roles))
            blocks: Any = _Blocks()
            self._service = Service(self._objects, list(spec.addresses), blocks, ())
            for role, hook in hooks_of(self._objects, "setup"):
                with blaming(role, "setup()"):
                    await self._run_hook(hook)
        self._tell_meshes(self._service)

    async def close(self) -> None:
        """Run every ``close()``, also after one has failed."""
        errors: list[BaseException] = []
        for role, hook in hooks_of(self._objects, "close"):
            try:
                with blaming(role, "close()"):
                    await self._run_hook(hook)
            except Exception as error:  # noqa: BLE001  # raised below, when all have closed
                errors.append(error)
        raise_together(errors)

    async def _run_hook(self, hook: Callable[[], Any]) -> None:
        with self._here():
            value = hook()
        if inspect.isawaitable(value):
            await value

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancel what runs, and return it."""
        for task in self._tasks.values():
            task.cancel()
        return list(self._tasks.values())

    @contextlib.contextmanager
    def _here(self) -> Generator[None, None, None]:
        before, context.place = context.place, self._place
        try:
            yield
        finally:
            context.place = before

    def _serve(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        service = self._service
        if service is None or kind not in _ORDINARY:
            return
        try:
            request = service.request(call_id, kind, flags, aux, n_buffers, body)
        except BaseException as error:  # noqa: BLE001  # a user's unpickling: its error is the answer
            self._reply(service.failure(call_id, error))
            return
        if request.is_stream:
            request.call.credits = LoopCredits(self._gang.loop)
            self._calls[call_id] = request.call
            task = self._gang.loop.create_task(self._run_stream(service, request))
            self._tasks[call_id] = task
        elif inspect.iscoroutinefunction(request.function):
            task = self._gang.loop.create_task(self._run_async(service, request))
            self._tasks[call_id] = task
        else:
            self._run(service, request)

    def _run(self, service: Service, request: Request) -> None:
        token = context.running.set(request.call)
        try:
            with self._here():
                value = request.function(*request.args, **request.kwargs)
        except BaseException as error:  # noqa: BLE001  # border: a user's exception becomes the answer
            self._reply(service.failure(request.call.id, error, skip_frames=1))
            return
        finally:
            context.running.reset(token)
        self._answer(service, request, value)

    async def _run_async(self, service: Service, request: Request) -> None:
        context.running.set(request.call)
        try:
            value = await request.function(*request.args, **request.kwargs)
        except BaseException as error:  # noqa: BLE001  # border: a user's exception becomes the answer
            self._reply(service.failure(request.call.id, error, skip_frames=1))
            return
        finally:
            self._tasks.pop(request.call.id, None)
        self._answer(service, request, value)

    async def _run_stream(self, service: Service, request: Request) -> None:
        context.running.set(request.call)
        try:
            await self._give(service, request)
        except BaseException as error:  # noqa: BLE001  # border: a user's exception becomes the answer
            if request.call.cancelled:  # its reader has gone, and closes it so
                self._reply(pack(Kind.RESULT, request.call.id, flags=NONE))
            else:
                self._reply(service.failure(request.call.id, error, skip_frames=2))
        else:
            self._tell_meshes(service)
            self._reply(pack(Kind.RESULT, request.call.id, flags=NONE))
        finally:
            self._tasks.pop(request.call.id, None)
            self._calls.pop(request.call.id, None)

    async def _give(self, service: Service, request: Request) -> None:
        wants: Any = request.call.credits
        with self._here():
            items: Any = request.function(*request.args, **request.kwargs)
        is_async = hasattr(items, "__anext__")
        try:
            while await wants.take():
                try:
                    with self._here():
                        item = await anext(items) if is_async else next(items)
                except (StopIteration, StopAsyncIteration):
                    return
                encoded = service.encoded_item(request.call, item)
                buffers = inline(encoded.buffers)
                self._reply(pack(Kind.ITEM, request.call.id, encoded.stream, buffers))
        finally:
            if is_async:
                await items.aclose()
            else:
                items.close()

    def _answer(self, service: Service, request: Request, value: Any) -> None:
        call = request.call
        try:
            encoded = codec.encode(value)
        except BaseException as error:  # noqa: BLE001  # border: a user's reducers run here
            self._reply(service.unsendable(call.id, call.method, value, error))
            return
        self._tell_meshes(service)
        self._reply(pack(Kind.RESULT, call.id, encoded.stream, inline(encoded.buffers)))

    def _tell_meshes(self, service: Service) -> None:
        meshes = service.meshes()
        if meshes is not None:
            self._reply(meshes)

    def _reply(self, pieces: list[Buffer]) -> None:
        # In the loop's next turn: whoever calls has its call in hand by then, as with processes.
        self._gang.loop.call_soon(self._gang.receive, self.index, pieces)

    def _take_control(
        self, call_id: int, kind: int, _flags: int, aux: int, _n: int, _body: memoryview
    ) -> None:
        call = self._calls.get(call_id)
        if kind == Kind.HOLD:
            self._reply(pack(Kind.STARTED, call_id, aux=aux))
        elif kind == Kind.PULL and call is not None and call.credits is not None:
            call.credits.add()
        elif kind == Kind.CANCEL and call_id in self._tasks:
            if call is not None:
                call.cancel()
            self._tasks[call_id].cancel()


class _Watch:
    """Nobody hangs here unseen: pdb and the user's own debugger look better."""

    def __init__(self, size: int) -> None:
        self._size = size

    async def stacks(self, ranks: Sequence[int] | None = None, timeout: float = 0) -> Stacks:
        del ranks, timeout
        return Stacks(())

    async def ping(self, timeout: float) -> list[float | None]:
        del timeout
        return [0.0] * self._size

    def tell_with(self, tell: Callable[[HangReport], None]) -> None:
        del tell

    def start(self, hang_after: float, tell: Callable[[HangReport], None]) -> None:
        del hang_after, tell

    def report(self, pending: Pending, after: float) -> None:
        del pending, after


class InlineGang:
    """What `asyncwg._driver.gang.Gang` is for processes. Belongs to the loop that made it."""

    has_arena = False

    def __init__(self, loop: asyncio.AbstractEventLoop, spec: Spec) -> None:
        self.loop = loop
        self._spec = spec
        self.usable = False
        self.closed = False
        self.broken: Exception | None = None
        self.on_break: Callable[[Exception], None] | None = None
        self.meshes: dict[str | None, dict[str, list[tuple[int, bool] | None]]] = {}
        size = len(spec.local_ranks)
        self.watch = _Watch(size)
        self._ranks = [
            InlineRank(
                self,
                rank,
                Place(spec.name, rank, size, spec.local_ranks[rank], spec.local_world_sizes[rank]),
            )
            for rank in range(size)
        ]
        ranks: Any = self._ranks
        self.calls = Calls(loop, ranks, spec.error_grace, self._overdue, _no_arena, _no_readers)

    @property
    def pids(self) -> list[int]:
        """No processes of its own."""
        return []

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return self.usable

    def check(self) -> None:
        """Raise if no call can be taken."""
        if not self.usable:
            raise GroupClosedError(f"group {self._spec.name!r} was shut down")

    async def start(self, timeout: float | None) -> None:
        """Build all objects, one after another; see `Gang.start`."""
        failed: list[Exception] = []
        async with asyncio.timeout(timeout):
            for rank in self._ranks:
                try:
                    await rank.build(self._spec)
                except Exception as error:  # noqa: BLE001  # told with those of the other ranks
                    error.rank = rank.index  # type: ignore[attr-defined]  # as on every error of a rank
                    failed.append(error)
        if failed:
            raise WorkerStartError(f"{self._spec.cls.__name__} could not start inline", failed)
        self.usable = True

    async def stop(self, grace: float) -> list[Exception]:
        """Run ``close()`` on every rank and return what it raised."""
        del grace
        self.usable, self.closed = False, True
        self._fail_pending()
        tasks = [task for rank in self._ranks for task in rank.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
        errors: list[Exception] = []
        for rank in self._ranks:
            try:
                await rank.close()
            except Exception as error:  # noqa: BLE001  # told when all have closed
                errors.append(error)
        return errors

    def abandon_all(self) -> None:
        """Let go of everything without waiting."""
        self.usable, self.closed = False, True
        self._fail_pending()
        for rank in self._ranks:
            rank.cancel()

    def receive(self, rank: int, pieces: Sequence[Buffer]) -> None:
        """Take a frame of a rank."""
        _Lane(lambda *frame: self._take(rank, *frame)).send(pieces)

    def _take(
        self, rank: int, call_id: int, kind: int, flags: int, aux: int, n: int, body: memoryview
    ) -> None:
        if kind == Kind.RESULT:
            self.calls.result(rank, call_id, flags, n, body)
        elif kind == Kind.ITEM:
            self.calls.item(rank, call_id, flags, n, body)
        elif kind == Kind.ERROR:
            self.calls.error(rank, call_id, codec.decode(*unpack(body, n)))
        elif kind == Kind.STARTED:
            self.calls.vote(rank, call_id, aux, held=False)
        elif kind == Kind.MESHES:
            learn_meshes(self.meshes, codec.decode(*unpack(body, n)), rank, len(self._ranks))

    def _overdue(self, pending: Pending, outcome: Outcome | None, error: Exception) -> None:
        del pending
        if outcome is not None:
            outcome.settle(None, error)

    def _fail_pending(self) -> None:
        self.calls.fail_all(
            lambda pending: GroupClosedError(
                f"{pending.label} had not answered when group {self._spec.name!r} was shut down"
            )
        )


def _no_arena(*_: Any) -> tuple[memoryview, list[memoryview]]:
    raise AssertionError("an inline rank has no arena")


async def _no_readers(_blocks: Sequence[Any]) -> None:
    """Nothing is sent by reference."""
