"""Workers for the tests of order, errors, death, start and life, and the FIFOs they wait on."""

# ruff: noqa: T201  # what workers print is tested

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import asyncwg
from asyncwg import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup, register
from tests.hostile import OneWayError, UnpicklableError, UnprintableError
from tests.times import GRACE, PATIENCE

FOREVER: Final = 1e6
"""Seconds for which a worker is busy where no test waits for its end."""


def group(cls: type, ranks: int = 2, *args: Any, **options: Any) -> WorkerGroup:
    """Return a group of ``cls`` on CPUs, not started, without torch; ``options`` are the group's."""
    pool = ResourcePool([ranks], use_gpu=False)
    given: dict[str, Any] = {"preload": [], "start_timeout": 60, "error_grace": GRACE, **options}
    return WorkerGroup(pool, ClassWithInitArgs(cls, *args), **given)


def alive(pids: Iterable[int]) -> list[int]:
    """Return those of ``pids`` that the kernel knows.

    Zombies count, but for those whose parent is init: nobody else can take them.
    """
    return [pid for pid in pids if _is_known(pid)]


def _is_known(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[:2] != ["Z", "1"]


class Fifo:
    """Permits that processes hand each other by a FIFO: all they share is its path.

    Whoever makes it keeps it open, so that permits wait for their taker; a copy that was pickled
    opens it for each step.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self._kept: int | None = None

    @classmethod
    def make(cls, path: str | Path) -> Fifo:
        """Make the FIFO and keep it open until `close`."""
        os.mkfifo(path)
        fifo = cls(path)
        fifo._kept = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        return fifo

    def close(self) -> None:
        """End it: whoever waits for a permit goes on, and so does whoever would begin to wait.

        The name goes first. A rank that opened it only now, before it takes the permit that it was
        given, would wait for ever for somebody at the other end.
        """
        if self._kept is not None:
            os.unlink(self.path)
            os.close(self._kept)
            self._kept = None

    def put(self, permits: int = 1) -> None:
        """Let ``permits`` takers go on.

        Opened for both directions, so that this never waits for a taker, nor fails where none is left.
        """
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            os.write(fd, b"." * permits)
            os.close(fd)

    def take(self) -> None:
        """Wait for a permit, blocking the thread."""
        with contextlib.suppress(FileNotFoundError):
            # Not to wait for a writer: whoever kept it open may have gone since its name was found.
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.set_blocking(fd, True)
            os.read(fd, 1)
            os.close(fd)

    def take_here(self, permits: int = 1, seconds: float = PATIENCE) -> None:
        """Wait for ``permits`` while the loop of this thread stands still, with its timers.

        So a deadline of the loop can't pass before what was sent has begun elsewhere.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while permits:
                assert select.select([fd], [], [], seconds)[0], "nobody gave a permit"
                with contextlib.suppress(BlockingIOError):
                    permits -= len(os.read(fd, permits))
        finally:
            os.close(fd)

    async def taken(self, permits: int = 1) -> None:
        """Wait for ``permits``, on the running loop."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        loop = asyncio.get_running_loop()
        try:
            while permits:
                try:
                    permits -= len(os.read(fd, permits)) or permits
                except BlockingIOError:
                    readable = asyncio.Event()
                    loop.add_reader(fd, readable.set)
                    try:
                        await readable.wait()
                    finally:
                        loop.remove_reader(fd)
        finally:
            os.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fifo, (self.path,)


class Steps(Worker):
    """Notes the order of what it is told, and waits where a test wants it to."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Any] = []
        self.running = 0
        self.most_running = 0

    @register()
    def echo(self, value: Any = None) -> Any:
        return value

    @register()
    def note(self, value: Any, _ballast: Any = None) -> Any:
        self.log.append(value)
        return value

    @register()
    def notes(self) -> list[Any]:
        return self.log

    @register()
    def hold(self, started: Fifo, release: Fifo, value: Any = None) -> Any:
        """Say that it runs, wait for a permit, and give ``value``."""
        self.log.append(value)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        started.put()
        release.take()
        self.running -= 1
        return value

    @register()
    def where(self) -> tuple[bool, int]:
        """Whether this is the main thread, and how many `hold` have run at once."""
        return threading.current_thread() is threading.main_thread(), self.most_running

    @register(
        dispatch_mode={
            "dispatch_fn": lambda group, *args: (
                tuple([arg] * group.world_size for arg in args),
                {},
            ),
            "collect_fn": lambda _group, outputs: outputs[0],
        }
    )
    def hold_rank_one(self, started: Fifo, release: Fifo) -> int:
        """Answer at once on rank 0, whose result alone is collected, and on a permit on rank 1."""
        if self.rank == 1:
            started.put()
            release.take()
        return self.rank

    @register()
    def rank_and_value(self, value: Any = None, *, extra: Any = None) -> tuple[int, Any, Any]:
        return self.rank, value, extra

    @register(execute_mode=asyncwg.Execute.RANK_ZERO)
    def on_rank_zero(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    @register()
    def pid(self) -> int:
        return os.getpid()

    @register()
    def total(self, values: Mapping[str, list[int]]) -> int:
        return sum(values["a"])

    @register()
    def doubled(self, value: int) -> int:
        """Double it."""
        return 2 * value

    @register()
    def fail(self, message: str, rank: int | None = None) -> int:
        if rank in (None, self.rank):
            raise ValueError(message)
        return self.rank

    def plain(self, value: Any) -> tuple[int, Any]:
        """Not registered."""
        return self.rank, value

    @register()
    def remaining(self) -> float | None:
        return asyncwg.current_call().remaining

    @register()
    def remaining_in_a_nested_call(self) -> float | None:
        """What a call knows that a method makes, to a group of its own."""

        async def nested() -> float | None:
            async with group(Steps, 1) as inner:
                found: float | None = await inner[0].remaining()
                return found

        return asyncio.run(nested())

    @register()
    def until_cancelled(self, started: Fifo, seen: Fifo) -> None:
        """Run until the caller has gone, and say that this was seen."""
        started.put()
        while not asyncwg.current_call().cancelled:
            time.sleep(0.001)
        seen.put()


class AsyncSteps(Steps):
    """The same, with ``async def`` methods beside the others."""

    def __init__(self) -> None:
        super().__init__()
        self.events: dict[str, asyncio.Event] = {}
        self.async_log: list[Any] = []

    @register()
    async def echo_async(self, value: Any = None) -> Any:
        return value

    @register()
    async def note_async(self, value: Any, _ballast: Any = None) -> Any:
        self.async_log.append(value)
        await asyncio.sleep(0)
        return value

    @register()
    async def notes_async(self) -> list[Any]:
        return self.async_log

    @register()
    async def thread_async(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    @register()
    async def wait_for_event(self, name: str, value: Any) -> Any:
        await self.events.setdefault(name, asyncio.Event()).wait()
        return value

    @register()
    async def set_event(self, name: str) -> None:
        self.events.setdefault(name, asyncio.Event()).set()

    @register()
    async def hold_the_loop(self, started: Fifo, release: Fifo) -> None:
        """Let no other ``async def`` method start meanwhile."""
        started.put()
        release.take()

    @register()
    async def wait_until_cancelled(self, started: Fifo, seen: Fifo) -> None:
        started.put()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.put()
            raise


class OddError(Exception):
    """Its ``__init__`` takes other arguments than it hands on: it pickles and does not unpickle."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}:{b}")


class KeywordError(Exception):
    """Takes keywords only."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code={code}")
        self.code = code


class ShoutingError(Exception):
    """Formats its message in ``__init__``: a second run of it would shout twice."""

    def __init__(self, message: str) -> None:
        super().__init__(message.upper() + "!")


class AtHome:
    """Unpickles in the process it was made in, and in no other."""

    def __init__(self, error: type[BaseException] = ValueError) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _at_home, (os.getpid(), self.error)


def _at_home(pid: int, error: type[BaseException]) -> AtHome:
    if os.getpid() != pid:
        raise error("far from home")
    return AtHome(error)


class BaseOnlyError(BaseException):
    """No ``Exception``."""


class ChainedError(Exception):
    """An importable exception of the user's."""


def _raise_chained() -> None:
    try:
        raise ZeroDivisionError("the cause")
    except ZeroDivisionError as cause:
        error = ChainedError("x")
        error.add_note("hint")
        raise error from cause


RAISERS: Final[Mapping[str, Callable[[], Any]]] = {
    "sys.exit": lambda: sys.exit(3),
    "KeyboardInterrupt": lambda: _throw(KeyboardInterrupt()),
    "BaseException": lambda: _throw(BaseOnlyError("base only")),
    "GeneratorExit": lambda: _throw(GeneratorExit()),
    "StopIteration": lambda: _throw(StopIteration(5)),
    "StopAsyncIteration": lambda: _throw(StopAsyncIteration(5)),
    "CancelledError": lambda: _throw(asyncio.CancelledError("not yours")),
    "odd": lambda: _throw(OddError(1, 2)),
    "http": lambda: _throw(urllib.error.HTTPError("u", 404, "nf", {}, None)),  # type: ignore[arg-type]
    "keyword": lambda: _throw(KeywordError(code=3)),
    "shouting": lambda: _throw(ShoutingError("ab")),
    "chained": _raise_chained,
    "unpicklable": lambda: _throw(UnpicklableError()),
    "one way": lambda: _throw(OneWayError("one", "way")),
    "unprintable": lambda: _throw(UnprintableError()),
    "far from home": lambda: _throw(ValueError("kept", AtHome())),
    "far from home, exit": lambda: _throw(ValueError("kept", AtHome(SystemExit))),
}


def _throw(error: BaseException) -> None:
    raise error


class Raiser(Worker):
    """Raises, and gives back, what is hard to bring home."""

    @register()
    def ping(self) -> int:
        return self.rank

    @register()
    def throw(self, name: str) -> None:
        RAISERS[name]()

    @register()
    async def throw_async(self, name: str) -> None:
        RAISERS[name]()

    @register()
    def throw_by_rank(self, first_done: Fifo) -> None:
        """Rank 0 waits for a permit, so that rank 1 is the first to fail."""
        if self.rank == 0:
            first_done.take()
            raise TypeError("from rank zero")
        raise ValueError("from rank one")

    @register()
    def throw_with(self, value: Any) -> None:
        raise ValueError(value)

    @register()
    def echo(self, value: Any) -> Any:
        return value

    @register()
    async def echo_async(self, value: Any) -> Any:
        return value

    @register()
    def make(self, maker: Callable[..., Any], *args: Any) -> Any:
        """Make a result here, so that it meets the pickler of the worker first."""
        return maker(*args)

    @register()
    def lock(self) -> Any:
        return {"inner": [threading.Lock()]}

    @register()
    def fail_or_hold(self, started: Fifo, release: Fifo) -> int:
        """Rank 0 fails when rank 1 has started to wait."""
        if self.rank == 0:
            started.take()
            raise ValueError("bad row 7")
        started.put()
        release.take()
        return self.rank


class Mortal(Worker):
    """Dies in many ways."""

    @register()
    def ping(self, value: Any = None) -> Any:
        return value

    @register()
    def leave(self, code: int) -> None:
        os._exit(code)

    @register()
    def say_and_die(self, words: str) -> None:
        print(words, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    @register()
    def say_a_lot_and_die(self, lines: int) -> None:
        for number in range(lines):
            print(f"line {number}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    @register()
    def crash_in_c(self) -> None:
        ctypes.string_at(0)

    @register()
    def hold(self, started: Fifo, release: Fifo) -> None:
        started.put()
        release.take()

    @register()
    async def hold_async(self, started: Fifo) -> None:
        started.put()
        await asyncio.Event().wait()

    @register()
    def die_after(self, started: Fifo) -> None:
        """Rank 1 dies when rank 0 has started to be busy for long."""
        if self.rank == 1:
            started.take()
            os.kill(os.getpid(), signal.SIGKILL)
        started.put()
        time.sleep(FOREVER)

    @register()
    def die_beside_a_collective(self) -> None:
        """Rank 0 waits in a collective for rank 1, which dies."""
        import torch
        import torch.distributed as dist

        self.init_process_group(timeout=600)
        dist.barrier()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    @register()
    def fail_beside_a_collective(self) -> None:
        """Rank 1 waits in a collective for rank 0, which raises."""
        import torch
        import torch.distributed as dist

        self.init_process_group(timeout=600)
        dist.barrier()
        if self.rank == 0:
            raise ValueError("bad row 7")
        dist.all_reduce(torch.ones(1))

    @register()
    def descriptors(self) -> list[str]:
        """Sockets and pipes that this process has open."""
        found: list[str] = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return [target for target in found if target.startswith(("socket:", "pipe:"))]

    @register()
    def fork(self) -> int:
        """Leave a forked child that holds every descriptor of this process."""
        pid = os.fork()
        if pid == 0:
            time.sleep(FOREVER)
        return pid


def _nap() -> None:
    time.sleep(FOREVER)


class NapData:
    """A data set whose loading processes are busy for long after the first item."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        if index > 1:
            time.sleep(FOREVER)
        return index


class Parent(Worker):
    """Starts processes of its own and does not end them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    @register()
    def ping(self) -> int:
        return self.rank

    @register()
    def begin(self, kind: str) -> list[int]:
        """Start a process of some kind and give its pid."""
        pids: list[int] = getattr(self, f"_{kind}")()
        return pids

    def _subprocess(self) -> list[int]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", f"import time; time.sleep({FOREVER})"]
        )
        self.kept.append(process)
        return [process.pid]

    def _stubborn(self) -> list[int]:
        """One that ignores every signal that can be ignored."""
        code = (
            "import signal, sys, time\n"
            "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(s, signal.SIG_IGN)\n"
            f"print(flush=True); time.sleep({FOREVER})"
        )
        process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        self.kept.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return [process.pid]

    def _daemon(self) -> list[int]:
        """A double-forked daemon: its own session, its parent gone, no environment."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                os.close(write)
                os.execve(
                    sys.executable,
                    ["python", "-S", "-c", f"import time; time.sleep({FOREVER})"],
                    {},
                )
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        pid = int(os.read(read, 20))
        os.close(read)
        return [pid]

    def _multiprocessing(self) -> list[int]:
        process = multiprocessing.get_context("fork").Process(target=_nap)
        process.start()
        self.kept.append(process)
        assert process.pid is not None
        return [process.pid]

    def _dataloader(self) -> list[int]:
        from torch.utils.data import DataLoader

        loader: Any = DataLoader(NapData(), num_workers=2, batch_size=1)  # type: ignore[arg-type]
        batches = iter(loader)
        next(batches)
        self.kept.append(batches)
        return [worker.pid for worker in batches._workers]


class Late(Worker):
    """Builds slowly, badly or not at all."""

    def __init__(self, how: str, rank: int | None = None, fifo: Fifo | None = None) -> None:
        super().__init__()
        self.how = how
        if rank is not None and rank != self.rank:
            return
        match how:
            case "raise":
                raise ValueError("bad cfg 42")
            case "exit":
                sys.exit(3)
            case "die":
                print("last words", file=sys.stderr, flush=True)
                os._exit(7)
            case "block":
                assert fifo is not None
                fifo.put()
                time.sleep(FOREVER)
            case _:
                pass

    def setup(self) -> None:
        if self.how == "raise in setup":
            raise ValueError("bad setup 43")

    @register()
    def ping(self) -> int:
        return self.rank


class LateTwice(Worker):
    """Rank 0 is busy for long in ``__init__`` when rank 1 raises."""

    def __init__(self, started: Fifo) -> None:
        super().__init__()
        if self.rank == 0:
            started.put()
            time.sleep(FOREVER)
        started.take()
        raise ValueError("bad cfg 42")


class Hooks(Worker):
    """Writes down when its hooks run."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.write("init")

    def write(self, what: str) -> None:
        with open(f"{self.folder}/{self.rank}", "a") as file:
            file.write(what + "\n")

    def setup(self) -> None:
        self.write("setup")

    def close(self) -> None:
        self.write("close")

    @register()
    def ping(self) -> int:
        self.write("ping")
        return self.rank


class AsyncHooks(Hooks):
    """The same with ``async def``."""

    async def setup(self) -> None:  # type: ignore[override]  # either is allowed
        await asyncio.sleep(0)
        self.write("setup")

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self.write("close")


class MixedHooks(AsyncHooks):
    """The same, with an ``async def`` method: the hooks then run on its loop."""

    @register()
    async def ping_async(self) -> int:
        return self.rank


class Clinging(Worker):
    """Does not want to go."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "ignores SIGTERM":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if how in ("atexit", "ignores SIGTERM"):
            atexit.register(_nap)
        if how == "__del__":
            self.clinging = _Clinging()
        if how == "thread":
            threading.Thread(target=_nap).start()

    def close(self) -> None:
        if self.how == "close":
            time.sleep(FOREVER)
        if self.how == "close raises":
            raise ValueError(f"close failed on {self.rank}")
        if self.how == "close dies":
            os._exit(9)

    @register()
    def ping(self) -> int:
        return self.rank

    @register()
    def hold(self, started: Fifo) -> None:
        started.put()
        time.sleep(FOREVER)


class LastWords(Worker):
    """Writes down that it leaves; rank 1 when it is allowed to."""

    def __init__(self, file: str, leaving: Fifo, release: Fifo) -> None:
        super().__init__()
        atexit.register(self._leave, file, leaving, release)

    def _leave(self, file: str, leaving: Fifo, release: Fifo) -> None:
        if self.rank == 1:
            leaving.put()
            release.take()
        with open(file, "a") as words:
            words.write(f"{self.rank}\n")


class _Clinging:
    def __del__(self) -> None:
        time.sleep(FOREVER)


class Talker(Worker):
    """Prints."""

    @register()
    def lines(self, count: int, width: int) -> None:
        for number in range(count):
            print(f"{self.rank}-{number}-".ljust(width, "x"))

    @register()
    def pieces(self) -> None:
        """Write a line in pieces, each flushed, and one to stderr."""
        for piece in ("a", "b", "c\n"):
            sys.stdout.write(piece)
            sys.stdout.flush()
        print("to stderr", file=sys.stderr, flush=True)

    @register()
    def unfinished(self) -> None:
        sys.stdout.write("no newline")
        sys.stdout.flush()

    @register()
    def say_and_die(self) -> None:
        print("last words", flush=True)
        os._exit(1)

    @register()
    def bar(self, steps: int) -> None:
        """Print lines while a bar goes on beside them, as tqdm writes it, to 100%."""
        for step in range(steps):
            print(f"{self.rank}-{step}-".ljust(200, "x"), flush=True)
            sys.stderr.write(f"\r{self.rank}: {100 * (step + 1) // steps:3d}%|{'#' * step}")
            sys.stderr.flush()
        sys.stderr.write("\n")

    @register()
    def bar_and_die(self) -> None:
        for step in range(3):
            sys.stderr.write(f"\r{self.rank}: {10 * step}%")
            sys.stderr.flush()
        os._exit(1)

    @register()
    def raw(self, data: bytes) -> None:
        os.write(1, data)
