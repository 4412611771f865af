"""Starting a broken group again: the policy, the saved state, and calls that may be repeated."""

from __future__ import annotations

import asyncio
import logging
import os
import pathlib
import pickle
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from asyncwg._sender import Sender
from asyncwg._wire import codec, sources
from asyncwg.call import Call
from asyncwg.errors import GroupBrokenError, GroupClosedError, UsageError, WorkerDiedError

if TYPE_CHECKING:
    from asyncwg._core import Core

_log: Final = logging.getLogger("asyncwg")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a group that broke is started again by itself, and what of its state is kept.

    Args:
        max_restarts: how often in all, starts that fail included; 0 for never by itself.
        backoff: seconds before the first restart, twice as many before each further one.
        save_every: save the ranks' state after every so many calls; None for only when the user asks.
        directory: where to keep saved states, one file per rank, replaced as a whole; None for the
            controller's memory.
    """

    max_restarts: int = 3
    backoff: float = 1.0
    save_every: int | None = None
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.backoff < 0:
            raise UsageError("max_restarts and backoff must be 0 or more")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(f"save_every must be at least 1 call, not {self.save_every!r}")

    def delay(self, attempt: int) -> float:
        """Return the seconds before restart number ``attempt``, which counts from 0."""
        return self.backoff * 2.0**attempt


class SavedState:
    """What each rank's ``save_state()`` returned last."""

    def __init__(self, group: str, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else pathlib.Path(directory)
        self._group = group
        self._values: list[Any] | None = None
        self._ranks = 0
        self._turn = asyncio.Lock()

    @property
    def exists(self) -> bool:
        """Whether anything was saved."""
        return self._ranks > 0

    async def put(self, values: list[Any]) -> None:
        """Keep the values of all ranks, in place of what was kept: all of them, or none."""
        if self._directory is None:
            self._values = values
        else:
            async with self._turn:  # the files of two saves must not mix
                await asyncio.to_thread(self._write, self._directory, values)
        self._ranks = len(values)

    async def get(self) -> list[Any]:
        """Return the values by rank."""
        if self._directory is None:
            assert self._values is not None
            return self._values
        return await asyncio.to_thread(self._read, self._directory)

    def _path(self, directory: pathlib.Path, rank: int) -> pathlib.Path:
        return directory / f"{self._group}-{rank}.state"

    def _write(self, directory: pathlib.Path, values: list[Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        written: list[str] = []
        for value in values:
            fd, name = tempfile.mkstemp(dir=directory, prefix=f".{self._group}-")
            written.append(name)
            with open(fd, "wb") as file:
                stream, buffers = codec.encode(value)
                pickle.dump((stream, [bytes(b) for b in sources.inline(buffers)]), file)
                file.flush()
                os.fsync(file.fileno())
        # Every file is complete before the first old one goes.
        for rank, name in enumerate(written):
            os.replace(name, self._path(directory, rank))

    def _read(self, directory: pathlib.Path) -> list[Any]:
        values: list[Any] = []
        for rank in range(self._ranks):
            with self._path(directory, rank).open("rb") as file:
                stream, buffers = pickle.load(file)  # what this process has written
            values.append(codec.decode(stream, [bytearray(buffer) for buffer in buffers]))
        return values


class Supervisor:
    """What a group does about its own end: tells it, starts again, repeats. Belongs to the group's loop.

    Args:
        group: the group.
        name: its name.
        policy: None for a group that stays broken.
    """

    def __init__(self, group: Core, name: str, policy: RestartPolicy | None) -> None:
        self._group = group
        self._name = name
        self.policy: Final = policy
        self.saved: Final = SavedState(name, None if policy is None else policy.directory)
        self.on_death: Callable[[Exception], None] | None = None
        """Told what has broken the group."""
        self._restarts = 0
        self._calls = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._repeats: list[tuple[Call[Any], Callable[[Sender], None]]] = []

    @property
    def busy(self) -> bool:
        """Whether it starts the group again, or saves its state."""
        return bool(self._tasks)

    def broke(self, cause: Exception) -> None:
        """Take note that the group has broken."""
        if self.on_death is not None:
            self.on_death(cause)
        if self.policy is not None and self._restarts < self.policy.max_restarts:
            self._spawn(self._restart(self.policy))

    def repeat(self, call: Call[Any], error: Exception, again: Callable[[Sender], None]) -> bool:
        """Keep a call that failed because the group broke; ``again`` sends it after the restart.

        Returns False where it is not to be repeated.
        """
        if self.policy is None or self._restarts >= self.policy.max_restarts:
            return False
        if not isinstance(error, WorkerDiedError | GroupBrokenError):
            return False
        self._repeats.append((call, again))
        return True

    def count_call(self) -> None:
        """Save the state if it is time to."""
        if self.policy is None or self.policy.save_every is None:
            return
        self._calls += 1
        if self._calls >= self.policy.save_every:
            self._calls = 0
            self._spawn(self._save())

    def close(self) -> None:
        """The group is shut down: start nothing again."""
        for task in self._tasks:
            task.cancel()
        self.give_up(GroupClosedError(f"group {self._name!r} was shut down"))

    async def _restart(self, policy: RestartPolicy) -> None:
        while self._restarts < policy.max_restarts:
            delay = policy.delay(self._restarts)
            self._restarts += 1
            _log.warning("group %r broke and is started again in %g s", self._name, delay)
            await asyncio.sleep(delay)  # the backoff: whatever broke it may need time to pass
            if self._group.state != "broken":
                return  # its user was faster
            try:
                await self._group.restart(last=self._restarts >= policy.max_restarts)
            except Exception as error:  # noqa: BLE001  # told to whoever waits, and to the log
                _log.error("group %r could not be started again: %s", self._name, error)
                if self._group.state != "broken":
                    return  # that is for good
            else:
                return

    def up_again(self) -> None:
        """The group has been started: send again what waits for that."""
        repeats, self._repeats = self._repeats, []
        for call, again in repeats:
            sender = self._group.sender
            if sender is not None and not call.done():
                again(sender)

    async def _save(self) -> None:
        try:
            await self._group.save()
        except Exception as error:  # noqa: BLE001  # nobody waits for it: the log is told
            _log.warning("the state of group %r could not be saved: %s", self._name, error)

    def give_up(self, error: Exception) -> None:
        """The group will not be started again: fail what waits for that."""
        repeats, self._repeats = self._repeats, []
        for call, _ in repeats:
            call.settle(None, error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
