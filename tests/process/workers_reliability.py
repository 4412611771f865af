"""Workers for the tests of `asyncwg.testing`, the inline executor, stacks and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import time
from typing import Any

import asyncwg
from asyncwg import Dispatch, Execute, Worker, register
from tests.process.workers_life import FOREVER, Fifo


class Recorder(Worker):
    """Keeps what it is told, and may be stuck in many ways."""

    def __init__(self, start: Any = ()) -> None:
        super().__init__()
        self.log: list[Any] = list(start)
        self.is_set_up = False
        self.closed: Fifo | None = None

    def setup(self) -> None:
        self.is_set_up = True

    def close(self) -> None:
        if self.closed is not None:
            self.closed.put()

    @register()
    def note(self, value: Any = None) -> Any:
        self.log.append(value)
        return value

    @register()
    async def note_async(self, value: Any = None) -> Any:
        self.log.append(value)
        return value

    @register()
    def notes(self) -> list[Any]:
        return self.log

    @register()
    def pid(self) -> int:
        return os.getpid()

    @register()
    def place(self) -> tuple[int, int]:
        return self.rank, self.world_size

    @register()
    def fail(self, message: str, rank: int | None = None) -> int:
        if rank in (None, self.rank):
            raise ValueError(message)
        return self.rank

    @register()
    def die(self, rank: int | None = None) -> None:
        if rank in (None, self.rank):
            os._exit(3)

    @register()
    def hold(self, started: Fifo, release: Fifo) -> int:
        started.put()
        release.take()
        return self.rank

    @register()
    def fail_or_hold(self, started: Fifo, release: Fifo) -> int:
        if self.rank == 1:
            started.take()
            raise ValueError("rank 1 went wrong")
        started.put()
        release.take()
        return self.rank

    @register()
    async def wait_async(self, started: Fifo) -> None:
        started.put()
        await asyncio.Event().wait()

    @register()
    def hold_the_gil(self, started: Fifo) -> None:
        """Wait in C with the GIL held: nothing in Python runs in this process any more."""
        never, _kept = os.pipe()
        started.put()
        # Unlike sleep, a read goes on after a signal.
        ctypes.PyDLL(None).read(never, ctypes.create_string_buffer(1), 1)

    @register()
    async def until_cancelled(self, seen: Fifo) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.put()
            raise

    @register()
    def remaining(self) -> float | None:
        return asyncwg.current_call().remaining

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def doubled(self, rows: Any) -> Any:
        return rows * 2

    @register(execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register()
    def tell_close_to(self, fifo: Fifo) -> None:
        self.closed = fifo


class Saving(Worker):
    """Counts, and keeps its count through a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.loaded: Any = None

    def save_state(self) -> dict[str, int]:
        return {"count": self.count, "rank": self.rank}

    def load_state(self, state: dict[str, int]) -> None:
        self.count, self.loaded = state["count"], state["rank"]

    @register()
    def add(self, number: int = 1) -> int:
        self.count += number
        return self.count

    @register()
    def count_and_loaded(self) -> tuple[int, Any]:
        return self.count, self.loaded

    @register(idempotent=True)
    def given(self, value: Any) -> Any:
        """Give it back; as often as you like."""
        return value

    @register()
    def given_once(self, value: Any) -> Any:
        return value

    @register(idempotent=True)
    def die_while_there_is(self, file: str) -> int:
        """Remove a file and die; answer where there is none any more."""
        return self._die_while_there_is(file)

    @register()
    def die_while_there_is_once(self, file: str) -> int:
        return self._die_while_there_is(file)

    def _die_while_there_is(self, file: str) -> int:
        if self.rank == 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
                os._exit(3)
        return self.rank

    @register()
    def die(self) -> None:
        os._exit(3)


class Refusing(Saving):
    """Can't take its state back."""

    def load_state(self, state: dict[str, int]) -> None:
        raise ValueError("this state is not for me")


class Reluctant(Saving):
    """Does not start while there is a file, of which each try takes a byte."""

    def __init__(self, file: str) -> None:
        super().__init__()
        if self.rank == 0 and os.path.exists(file):
            left = os.path.getsize(file) - 1
            os.truncate(file, left)
            if not left:
                os.unlink(file)
            raise ValueError("not yet")


class DyingOnLoad(Saving):
    """Rank 1 dies when it is given its state, and rank 0 is busy with its own for long."""

    def load_state(self, state: dict[str, int]) -> None:
        if self.rank == 1:
            os._exit(3)
        time.sleep(FOREVER)
