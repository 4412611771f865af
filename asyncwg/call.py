"""``Call``: one call to some ranks, on its way. An awaitable that `asyncio` takes everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, TypeVar, final

from asyncwg._wire import codec
from asyncwg.errors import GroupClosedError

__all__ = ["Call"]

T = TypeVar("T")


class Progress(Protocol):
    """What is known of a call that has been sent."""

    watch: Callable[[], None] | None
    """Called whenever a rank has answered."""

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks it went to."""
        ...

    def landed(self) -> list[tuple[int, Any]]:
        """Return rank and value, or exception, of those that have answered, in that order."""
        ...


class Owner(Protocol):
    """Who carries a call out."""

    def abandon(self, progress: Any, /) -> None:
        """Take note that nobody waits for the result any more."""
        ...

    async def released(self, progress: Any, /) -> None:
        """Wait until no rank reads what was sent by reference."""
        ...


Collect = Callable[[list[Any]], Any]
"""Makes the results, by position, the result of the call."""


@final
class Call(asyncio.Future[T], Coroutine[Any, Any, T]):
    """What a method of a group returns: the call is under way, and awaiting it gives its result.

    Await it any number of times, from any number of tasks. It works in ``await``,
    ``asyncio.gather``, ``wait_for``, ``timeout``, ``as_completed``, ``create_task`` and
    ``TaskGroup.create_task``. (`asyncio.wait` refuses what could be a coroutine: give it
    ``asyncio.create_task(call)``.) Cancelling an awaiter cancels the call for everyone, as with a
    task; ``asyncio.shield`` waits without owning it. A call that fails and that nobody looks at is
    reported like an asyncio task's exception.

    Awaiting it raises:

    - on a call to one rank, what the method raised; on a call to several, a `WorkerGroupError` with
      what each failed rank raised;
    - `WorkerDiedError` when a rank's process ended, `GroupBrokenError` when the group broke for
      another reason, `GroupClosedError` when it was shut down meanwhile;
    - `CallTimeoutError` when the call's deadline passed;
    - `DispatchError`, with ``.results``, when the results can't be joined.

    Groups make calls; there is no other way to get one. It is a future of the group's loop.
    """

    # What most calls never need stands on the class: making a call costs less so.
    _progress: Progress | None = None
    _collect: Collect | None = None
    _owner: Owner | None = None
    _iterators: dict[Any, Generator[Any, None, T]] | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, label: str) -> None:
        super().__init__(loop=loop)
        self._label = label

    def attach(self, progress: Progress | None, collect: Collect | None, owner: Owner) -> None:
        """Take note of who carries it out. For the group that made it.

        Args:
            progress: what is known of it; None until it is on its way.
            collect: what to make of the results; None until it is on its way.
            owner: who is told that nobody waits for it any more.
        """
        self._progress = progress
        self._collect = collect
        self._owner = owner

    def settle(self, results: list[Any] | None, error: Exception | None) -> None:
        """End it. For the group that made it."""
        if self.done():
            return
        if results is None or self._collect is None:
            assert error is not None
            self.set_exception(error)
            if isinstance(error, GroupClosedError):
                self._log_traceback = False  # whoever closed the group does not wait for it
            return
        try:
            value = self._collect(results)
        except Exception as failed:  # noqa: BLE001  # the user's collect_fn, or what does not join
            self.set_exception(failed)
        else:
            self.set_result(value)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the call for everyone who awaits it; False if it has ended.

        Returns at once. A call that no rank has started is dropped on all; otherwise every rank
        runs it and the result is thrown away: ``async def`` bodies are cancelled, ``def`` bodies
        can ask ``asyncwg.current_call().cancelled``.
        """
        # Overridden instead of a done callback, which costs a handle of the loop per call.
        if not super().cancel(msg):
            return False
        self.abandon()
        return True

    def abandon(self) -> None:
        """Tell the group that nobody waits for the result any more."""
        if self._owner is not None:
            self._owner.abandon(self._progress)

    async def released(self) -> None:
        """Wait until what was sent by reference may be written again: no rank reads it any more.

        That is for tensors made with `asyncwg.share` or `asyncwg.shared_empty`; for a call without
        one it waits for the result. A rank that keeps the tensor keeps the caller waiting.
        """
        if self._progress is None:
            await asyncio.gather(self, return_exceptions=True)
        if self._progress is not None and self._owner is not None:
            await self._owner.released(self._progress)

    async def results(self) -> list[Any]:
        """Wait for all ranks and return what each gave, by rank, not joined.

        An exception stands in the place of a rank that failed; what ends the whole call (a death, a
        deadline) stands in the place of every rank that had not answered.
        """
        try:
            await asyncio.shield(self)
        except Exception as error:  # noqa: BLE001  # each rank's own stands in its place
            return self._outcomes(error)
        return self._outcomes(None)

    async def as_completed(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield ``(rank, value)`` as the ranks answer, not joined.

        An exception stands in the place of the value of a rank that failed. Ranks are numbered as
        in the whole group, also on a view.
        """
        landed: asyncio.Queue[None] = asyncio.Queue()
        self.add_done_callback(lambda _future: landed.put_nowait(None))
        told: set[int] = set()
        while True:
            progress = self._progress
            if progress is not None:
                progress.watch = lambda: landed.put_nowait(None)
                for rank, value in progress.landed():
                    if rank not in told:
                        told.add(rank)
                        yield rank, value
                if len(told) == len(progress.ranks):
                    return
            if self.done():
                break
            await landed.get()
        if self.cancelled():
            raise asyncio.CancelledError
        error = self.exception()
        if progress is None and error is not None:
            raise error
        ranks = () if progress is None else progress.ranks
        for rank, value in zip(ranks, await self.results(), strict=True):
            if rank not in told:
                yield rank, value

    def _outcomes(self, error: Exception | None) -> list[Any]:
        if self._progress is None:
            if error is not None:
                raise error
            return []
        landed = dict(self._progress.landed())
        return [landed.get(rank, error) for rank in self._progress.ranks]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Stand for its value among the arguments of another call; nothing else can be done with it."""
        if codec.placeholders.calls is None:
            raise codec.UnresolvedError(self)
        codec.placeholders.calls.append(self)
        return codec.take, (len(codec.placeholders.calls) - 1,)

    def send(self, value: Any) -> Any:
        """Advance it for the running task: what makes ``create_task(call)`` work, several times too."""
        try:
            return self._iterator().send(value)
        except BaseException:
            self._forget()
            raise

    def throw(self, typ: Any, val: Any = None, tb: Any = None) -> Any:
        """Raise in the running task's wait for it."""
        try:
            if val is None and tb is None:
                return self._iterator().throw(typ)
            return self._iterator().throw(typ, val, tb)
        except BaseException:
            self._forget()
            raise

    def close(self) -> None:
        """Stop the running task's wait for it; the call itself goes on."""
        iterator = self._forget()
        if iterator is not None:
            iterator.close()

    def _forget(self) -> Generator[Any, None, T] | None:
        return self._iterators.pop(_current_task(), None) if self._iterators else None

    def _iterator(self) -> Generator[Any, None, T]:
        if self._iterators is None:
            self._iterators = {}
        task = _current_task()
        iterator = self._iterators.get(task)
        if iterator is None:
            iterator = self._iterators[task] = super().__await__()
        return iterator

    def __repr__(self) -> str:
        """Method and state."""
        if not self.done():
            state = "pending"
        elif self.cancelled():
            state = "cancelled"
        else:
            error = self._exception  # asking exception() would count as having looked
            state = "done" if error is None else f"failed: {type(error).__name__}"
        return f"<Call {self._label} {state}>"


def _current_task() -> Any:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
