"""Workers and programs for the tests of groups that other programs call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from asyncwg import (
    ClassWithInitArgs,
    Dispatch,
    Execute,
    ResourcePool,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from tests.process.workers_life import Fifo
from tests.times import GRACE, PATIENCE

ROOT: Final = Path(__file__).parents[2]


class Traveller:
    """Writes down, in a file, which process unpickles it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return _arrive, (self.path,)


def _arrive(path: str) -> Traveller:
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return Traveller(path)


def _split_words(_group: Any, words: str) -> Any:
    return ([words.split()], {})


def _joined_words(_group: Any, outputs: list[Any]) -> str:
    return " ".join(outputs)


class Plain(Worker):
    """Runs on two ranks, without torch."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.total = start
        self.seen: list[Any] = []
        self._register_dispatch_collect_info("pair", self.rank, True)

    @register(Dispatch.ONE_TO_ALL)
    def add(self, number: int, *, times: int = 1) -> int:
        """Add to the total, and return it."""
        self.total += number * times
        return self.total

    @register(Dispatch.ONE_TO_ALL)
    def note(self, what: Any) -> None:
        self.seen.append(what)

    @register(Dispatch.ONE_TO_ALL)
    def noted(self) -> list[Any]:
        return self.seen

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ALL_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(Dispatch.RANK_ZERO)
    def zero(self, value: Any) -> Any:
        return self.rank, value

    @register(Dispatch.DP_COMPUTE)
    def each(self, value: Any) -> Any:
        return self.rank, value

    @register(Dispatch.DP_COMPUTE_PROTO)
    def rows(self, values: list[int]) -> list[int]:
        return [10 * value + self.rank for value in values]

    @register(Dispatch.DP_COMPUTE_PROTO, uneven="pad")
    def padded(self, values: list[int]) -> list[int]:
        return [10 * value + self.rank for value in values]

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Any, values: list[int]) -> list[int]:
        return [function(value) for value in values]

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, values: list[int]) -> int:
        return sum(values)

    @register(make_nd_compute_dataproto_dispatch_fn("pair"))
    def meshed(self, values: list[int]) -> list[int]:
        return [10 * value + self.rank for value in values]

    @register({"dispatch_fn": _split_words, "collect_fn": _joined_words})
    def shout(self, word: str) -> str:
        return f"{word.upper()}{self.rank}"

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def first(self) -> int:
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    async def twice(self, number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, ranks: tuple[int, ...] = (0, 1)) -> None:
        if self.rank in ranks:
            raise LookupError(f"no luck on {self.rank}")

    @register(Dispatch.ONE_TO_ALL)
    def late_mesh(self, name: str) -> None:
        self._register_dispatch_collect_info(name, 1 - self.rank, True)

    @register(Dispatch.ONE_TO_ALL)
    def wait_for(self, started: Fifo | None, permit: Fifo) -> str:
        if started is not None:
            started.put()
        permit.take()
        return "waited"

    @register(Dispatch.ONE_TO_ALL)
    async def wait_async(self, started: Fifo) -> None:
        try:
            started.put()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    @register(Dispatch.ONE_TO_ALL)
    def count(self, end: int, fail_at: int = -1) -> Iterator[int]:
        try:
            for number in range(end):
                if number == fail_at and self.rank == 0:
                    raise LookupError("no more")
                yield number
        finally:
            self.seen.append("closed")

    @register(Dispatch.ONE_TO_ALL)
    async def count_async(self, end: int) -> AsyncIterator[bytes]:
        for number in range(end):
            yield bytes([number]) * (1 << 20)

    @register(Dispatch.ONE_TO_ALL)
    def leave(self, code: int) -> None:
        if self.rank == 1:
            os._exit(code)
        signal.pause()

    @register(Dispatch.ONE_TO_ALL)
    def save_state(self) -> int:
        return self.total

    def load_state(self, total: int) -> None:
        self.total = total

    # Calling another group.

    @register(Dispatch.ONE_TO_ALL)
    async def ask(self, other: Any, method: str, *args: Any) -> Any:
        return await getattr(other, method)(*args)

    @register(Dispatch.ONE_TO_ALL)
    def ask_blocking(self, other: Any, method: str, *args: Any) -> Any:
        async def main() -> Any:
            return await getattr(other, method)(*args)

        return asyncio.run(main())

    @register(Dispatch.ONE_TO_ALL)
    def ask_without_loop(self, other: Any) -> Any:
        return other.pid()

    @register(Dispatch.ONE_TO_ALL)
    def keep(self, other: Any) -> None:
        self.other = other

    @register(Dispatch.ONE_TO_ALL)
    async def ask_kept(self, number: int) -> Any:
        return await self.other.add(number)


class Heavy(Plain):
    """Is built with something that only ranks can unpickle, and the host that starts them."""

    def __init__(self, secret: Any) -> None:
        super().__init__(7)
        self.secret = secret

    @register(Dispatch.ONE_TO_ALL)
    def weight(self) -> int:
        return self.total


def own(start: int = 0, ranks: int = 2, **options: Any) -> WorkerGroup:
    """Return a group of `Plain`, not started."""
    pool = ResourcePool([ranks], use_gpu=False)
    given: dict[str, Any] = {"preload": [], "start_timeout": 60, "error_grace": GRACE, **options}
    return WorkerGroup(pool, ClassWithInitArgs(Plain, start), **given)


async def detached(name: str, start: int = 0, **options: Any) -> WorkerGroup:
    """Start a group of `Plain` in a host process."""
    wg = own(start, detached=True, name=name, **options)
    return await wg.__aenter__()


HEAD: Final = """
import asyncio, os, signal, sys
import asyncwg
from asyncwg import *
from tests.process.workers_attach import *
from tests.process.workers_life import Fifo

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


class Program:
    """Another program, in whose text `HEAD` and ``async def main()`` stand."""

    def __init__(self, text: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{HEAD}{text}\nasyncwg.run(main())", *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        self.pid = self._process.pid

    async def line(self) -> str:
        """Wait for the next line that it says."""
        stdout = self._process.stdout
        assert stdout is not None
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        # It writes whole lines in one go.
        loop.add_reader(stdout.fileno(), readable.set)
        try:
            async with asyncio.timeout(PATIENCE):
                await readable.wait()
        finally:
            loop.remove_reader(stdout.fileno())
        return os.read(stdout.fileno(), 65536).decode().strip()

    def kill(self) -> None:
        """End it the hard way, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(PATIENCE)

    def finish(self) -> str:
        """Wait for its good end; return what it has said since."""
        out, _ = self._process.communicate(timeout=PATIENCE)
        assert self._process.returncode == 0
        return out.strip()

    def close(self) -> None:
        """End it, and let go of it."""
        self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m asyncwg``."""
    return subprocess.run(
        [sys.executable, "-m", "asyncwg", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
