"""The two lanes of a worker that run calls. `asyncwg._worker.control` has the third.

- `ComputeLane`: ``def`` methods, one at a time, in the main thread, with blocking reads.
- `AsyncLane`: ``async def`` methods, concurrently, on an event loop in a thread of its own. Torch's
  grad mode is per thread, and signal handlers run in the main thread only.
"""

from __future__ import annotations

import asyncio
import collections
import inspect
import queue
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Final

from asyncwg._transport.aio import SocketChannel
from asyncwg._transport.blocking import BlockingChannel
from asyncwg._wire.frames import BESIDE, NONE, Buffer, Kind, pack
from asyncwg._wire.shipment import Shipment
from asyncwg._wire.sole import sole
from asyncwg._wire.sources import version_of
from asyncwg._worker import context
from asyncwg._worker.answers import Answers
from asyncwg._worker.blocks import Blocks, Grant
from asyncwg._worker.context import CurrentCall
from asyncwg._worker.credits import LoopCredits, ThreadCredits
from asyncwg._worker.gate import Gate
from asyncwg._worker.service import Request, Service

_STOP: Final = int(Kind.STOP)


class _ExpiredError(Exception):
    """The deadline of a call has passed, by this process's clock."""


class ComputeLane:
    """Runs ``def`` methods. Everything here happens in the main thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.channel = BlockingChannel(sock)
        self.gate = Gate()
        self.stopping = False
        self._service: Service | None = None
        self._blocks: Blocks | None = None
        self._thread = threading.get_ident()
        self._stop_id: int | None = None
        self._answers = Answers(self.channel.send)

    def wait_for(self, kind: Kind) -> tuple[memoryview, int, int]:
        """Read until a frame of ``kind`` comes; return its body, number of buffers and call id."""
        found: list[tuple[memoryview, int, int]] = []

        def deliver(
            call_id: int, got: int, _f: int, _a: int, n_buffers: int, body: memoryview
        ) -> None:
            if got == kind:
                found.append((body if n_buffers else memoryview(bytes(body)), n_buffers, call_id))

        while not found:
            if not self.channel.read(deliver):
                raise SystemExit(0)
        return found[0]

    def serve(self, service: Service) -> int:
        """Run calls until STOP, and return its call id."""
        self._service = service
        self._blocks = service.blocks
        try:
            while self._stop_id is None:
                if not self.channel.read(self._deliver):
                    raise SystemExit(0)
        except ConnectionError:  # nobody takes the answer any more: no news for stderr
            raise SystemExit(0) from None
        self._answers.wait()
        return self._stop_id

    def _deliver(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        if kind == _STOP:
            self._stop_id = call_id
        elif not self.stopping and self._stop_id is None:
            blocks = self._blocks
            assert blocks is not None
            blocks.answering = self._thread
            reply = self._run(call_id, kind, flags, aux, n_buffers, body)
            blocks.answering = None
            if reply is None and self._answers.under_way:
                blocks.wake()  # the answer has gone ahead of what was let go since
                return
            # Here the arguments are gone: what they stood in is told with the answer.
            gone = blocks.let_go()
            if gone is not None:
                reply = [*gone, *reply] if reply is not None else gone
            if reply is not None:
                self._send(reply)

    def _send(self, pieces: Sequence[Buffer]) -> None:
        """Send a frame behind the answer that is under way."""
        if self._answers.under_way:
            self._answers.wait()
        self.channel.send(pieces)

    def _run(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> list[Buffer] | None:
        service = self._service
        assert service is not None
        try:
            call, function, args, kwargs, is_stream, _ = service.request(
                call_id, kind, flags, aux, n_buffers, body
            )
        except BaseException as error:  # noqa: BLE001  # a user's unpickling: its error is the answer
            return service.failure(call_id, error)
        if is_stream:
            call.credits = ThreadCredits()
        if not self.gate.enter(call):
            return None
        token = context.running.set(call)
        try:
            value = function(*args, **kwargs)
            if is_stream:
                del args, kwargs  # the generator has them, and may let them go
                self._give(service, call, value)
                value = None
            elif value is not None and inspect.iscoroutine(value):
                value = asyncio.run(value)
        except BaseException as error:  # noqa: BLE001  # border: a user's exception becomes the answer
            return service.failure(call_id, error, skip_frames=2 if is_stream else 1)
        finally:
            context.running.reset(token)
            self.gate.leave(call)
        try:
            reply = service.result(call_id, value)
        except BaseException as error:  # noqa: BLE001  # border: a user's reducers run here
            return service.unsendable(call_id, call.method, value, error)
        meshes = service.meshes()
        if meshes is not None:
            self._send(meshes)
        if not isinstance(reply, Shipment):
            return reply
        del value, function
        args, kwargs = (), {}  # who has the value now is somebody else
        if self.channel.more:
            self._answers.wait()
            alone = sole(reply.sources)
            if alone is not None:
                self._hand_over(service, call_id, reply._replace(sources=alone))
                return None
        return self._place(service, call_id, reply)

    def _hand_over(self, service: Service, call_id: int, large: Shipment) -> None:
        """Have a large value that nobody else can write to answered beside the next call."""
        blocks = service.blocks
        versions = [version_of(source) for source in large.sources]

        def finish(grant: Grant) -> list[Buffer]:
            try:
                return blocks.place(call_id, large, versions, grant)
            except Exception as error:  # noqa: BLE001  # no room
                return service.failure(call_id, error)

        offer = blocks.offer(call_id, large, self._answers.begin(finish), 0, flags=BESIDE)
        # Nobody but this thread sends before the offer is answered.
        self.channel.send([*(blocks.let_go() or ()), *offer])

    def _give(self, service: Service, call: CurrentCall, items: Iterator[Any]) -> None:
        """Send what a generator yields, as fast as it is read."""
        wants, blocks = call.credits, service.blocks
        assert isinstance(wants, ThreadCredits)
        try:
            while True:
                blocks.answering = None  # nothing is sent while this waits
                wanted = wants.take()
                blocks.answering = self._thread
                if wanted is None:
                    return
                try:
                    item = next(items)
                except StopIteration:
                    return
                if not wanted:
                    continue
                reply = service.item(call, item)
                if isinstance(reply, Shipment):
                    reply = self._placed(service, call.id, reply, Kind.ITEM)
                del item
                self._send([*(blocks.let_go() or ()), *reply])
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def _place(self, service: Service, call_id: int, large: Shipment) -> list[Buffer]:
        try:
            return self._placed(service, call_id, large, Kind.RESULT)
        except Exception as error:  # noqa: BLE001  # no room, or the tensors can't be read
            return service.failure(call_id, error)

    def _placed(self, service: Service, call_id: int, large: Shipment, kind: Kind) -> list[Buffer]:
        """Wait for a place for a large value and write it there, before anything can change it."""
        answer: queue.SimpleQueue[Grant] = queue.SimpleQueue()
        # An ``async def`` method may run meanwhile, and write to what both know.
        versions = [version_of(source) for source in large.sources]
        self._send(service.blocks.offer(call_id, large, answer.put, 0))
        return service.blocks.place(call_id, large, versions, answer.get(), kind)


class AsyncLane:
    """Runs ``async def`` methods as tasks, started in the order of their calls."""

    def __init__(self, sock: socket.socket, limits: Mapping[int, int]) -> None:
        self.gate = Gate(self._unpark)
        self._sock = sock
        self._limits = {number: asyncio.Semaphore(limit) for number, limit in limits.items()}
        self._service: Service | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._begun: set[int] = set()
        """Calls whose task has taken its first step. One that is cancelled before would never answer."""
        self._parked: collections.deque[Request] = collections.deque()
        self._loop = context.loop = _new_loop()
        self._thread = threading.Thread(target=self._main, name="asyncwg-async", daemon=True)
        self._channel: SocketChannel | None = None
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run ``coroutine`` on the lane's loop and wait for it, from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def serve(self, service: Service) -> None:
        """Start to take calls."""
        self._service = service
        self._loop.call_soon_threadsafe(self._open)

    def stop(self) -> None:
        """Cancel what runs and wait until it has ended."""
        self.run(self._cancel_all())

    def cancel(self, call_id: int) -> None:
        """Cancel the task of a call, from any thread; a call that has not started never will."""
        self._loop.call_soon_threadsafe(self._cancel, call_id)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _open(self) -> None:
        self._channel = SocketChannel(self._loop, self._sock, self._deliver, lambda _error: None)

    def _deliver(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> None:
        service = self._service
        assert service is not None
        try:
            request = service.request(call_id, kind, flags, aux, n_buffers, body)
        except BaseException as error:  # noqa: BLE001  # a user's unpickling: its error is the answer
            self._send(service.failure(call_id, error))
            return
        if self._parked or not self._start(request):
            self._parked.append(request)

    def _start(self, request: Request) -> bool:
        if request.is_stream and request.call.credits is None:
            request.call.credits = LoopCredits(self._loop)
        entered = self.gate.try_enter(request.call)
        if entered:
            task = self._loop.create_task(self._serve(request))
            self._tasks[request.call.id] = task
        return entered is not None

    def _unpark(self) -> None:
        self._loop.call_soon_threadsafe(self._retry)

    def _retry(self) -> None:
        while self._parked and self._start(self._parked[0]):
            self._parked.popleft()

    async def _serve(self, request: Request) -> None:
        service = self._service
        assert service is not None
        call = request.call
        context.running.set(call)
        self._begun.add(call.id)
        try:
            self._send(await self._answer(service, request))
        finally:
            self.gate.leave(call)
            self._tasks.pop(call.id, None)
            self._begun.discard(call.id)

    async def _answer(self, service: Service, request: Request) -> list[Buffer]:
        call = request.call
        try:
            if call.cancelled:  # before it could start
                raise asyncio.CancelledError
            limit = self._limits.get(request.number)
            if limit is None:
                value = await self._bounded(service, request)
            else:
                async with limit:
                    value = await self._bounded(service, request)
        except _ExpiredError:
            return pack(Kind.EXPIRED, call.id)
        except BaseException as error:  # noqa: BLE001  # border: a user's exception becomes the answer
            ended = (
                request.is_stream and call.cancelled and isinstance(error, asyncio.CancelledError)
            )
            if not ended:  # a generator that was closed before it could begin has not failed
                return service.failure(call.id, error, skip_frames=3 if request.is_stream else 2)
            value = None
        try:
            reply = service.result(call.id, value)
        except BaseException as error:  # noqa: BLE001  # border: a user's reducers run here
            return service.unsendable(call.id, call.method, value, error)
        meshes = service.meshes()
        if meshes is not None:
            self._send(meshes)
        if not isinstance(reply, Shipment):
            return reply
        try:
            return await self._placed(service, call.id, reply, Kind.RESULT)
        except Exception as error:  # noqa: BLE001  # no room, or the tensors can't be read
            return service.failure(call.id, error)

    async def _give(self, service: Service, request: Request) -> None:
        """Send what a generator yields, as fast as it is read."""
        call = request.call
        wants = call.credits
        assert isinstance(wants, LoopCredits)
        items = request.function(*request.args, **request.kwargs)
        try:
            while await wants.take():
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
                reply = service.item(call, item)
                if isinstance(reply, Shipment):
                    reply = await self._placed(service, call.id, reply, Kind.ITEM)
                del item
                self._send(reply)
        except asyncio.CancelledError:
            if not call.cancelled:
                raise
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    async def _placed(
        self, service: Service, call_id: int, large: Shipment, kind: Kind
    ) -> list[Buffer]:
        """Wait for a place for a large value and write it there."""
        granted: asyncio.Future[Grant] = self._loop.create_future()

        def take(grant: Grant) -> None:
            if granted.done():
                service.blocks.give_back(grant)
            else:
                granted.set_result(grant)

        def answer(grant: Grant) -> None:
            self._loop.call_soon_threadsafe(take, grant)

        # Others run while the answer is awaited: what they may change unseen is copied now (O-7).
        steady = large.steady()
        versions = [version_of(source) for source in steady.sources]
        self._send(service.blocks.offer(call_id, steady, answer, 1))
        try:
            grant = await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # it came in the same turn of the loop
                service.blocks.give_back(granted.result())
            if kind != Kind.RESULT:
                raise
            # The caller has gone, but the controller still counts the answer.
            return pack(kind, call_id, flags=NONE)
        return service.blocks.place(call_id, steady, versions, grant, kind)

    async def _bounded(self, service: Service, request: Request) -> Any:
        remaining = request.call.remaining
        if remaining is None:
            return await self._body(service, request)
        limit = asyncio.timeout(remaining)
        try:
            async with limit:
                return await self._body(service, request)
        except TimeoutError as error:
            if limit.expired():
                raise _ExpiredError from error
            raise

    def _body(self, service: Service, request: Request) -> Coroutine[Any, Any, Any]:
        if request.is_stream:
            return self._give(service, request)
        body: Coroutine[Any, Any, Any] = request.function(*request.args, **request.kwargs)
        return body

    def _send(self, pieces: list[Buffer]) -> None:
        assert self._channel is not None
        self._channel.send(pieces)

    def _cancel(self, call_id: int) -> None:
        task = self._tasks.get(call_id)
        # What has not begun sees then that it was cancelled.
        if task is not None and call_id in self._begun:
            task.cancel()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    try:
        import uvloop  # import here: optional

        factory = uvloop.new_event_loop
    except ImportError:
        pass
    return factory()
