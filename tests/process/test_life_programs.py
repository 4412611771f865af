"""Whole programs that end in every way, and what is left of them: promises E-6 and E-7."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import uvloop

from asyncwg import WorkerDiedError
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import Fifo, Mortal, alive, group

ROOT: Final = Path(__file__).parents[2]

PROGRAM: Final = """
import asyncio, os, signal, sys, time
import asyncwg
from asyncwg import ClassWithInitArgs, GroupBrokenError, ResourcePool, WorkerDiedError, WorkerGroup, register
from tests.process.workers_life import Parent

stage = sys.argv[1]

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def sleep():
    while True:
        time.sleep(1000)

class Busy(Parent):
    def __init__(self):
        super().__init__()
        if stage == "init" or stage == "rank 0 in init" and self.rank == 0:
            say("here")
            sleep()

    @register()
    def hold(self):
        say("here")
        sleep()

    @register()
    def hold_gil(self):
        say("here")
        "".join(["a" * 1000] * 10).count("b")
        import ctypes
        ctypes.PyDLL(None).pause()

    @register()
    async def hold_async(self):
        say("here")
        await asyncio.Event().wait()

    def close(self):
        if stage == "closing":
            say("here")
            sleep()

async def main():
    if stage == "starting":
        say("here")
    async with WorkerGroup(
        ResourcePool([2], use_gpu=False), ClassWithInitArgs(Busy), output="inherit",
        preload=["torch"] if stage == "child dataloader" else [],
    ) as wg:
        say("pids", *wg.pids)
        if stage.startswith("child "):
            say("pids", *[pid for each in await wg.begin(stage.removeprefix("child ")) for pid in each])
        if stage in ("hold", "hold_async", "hold_gil"):
            await getattr(wg, stage)()
        if stage == "return" or stage == "closing":
            return
        if stage == "exit":
            sys.exit(5)
        if stage == "error":
            raise ValueError("the program's own")
        if stage == "death":
            os.kill(wg.pids[0], signal.SIGKILL)
            try:
                await wg.ping()
            except (WorkerDiedError, GroupBrokenError):
                say("survived")
            return
        if stage == "fork":
            if os.fork() == 0:
                sleep()
        say("here")
        await asyncio.Event().wait()

async def forgetful():
    global kept
    kept = await WorkerGroup.start(
        ResourcePool([2], use_gpu=False), ClassWithInitArgs(Busy), preload=[], output="inherit"
    )
    say("pids", *kept.pids)

if stage == "early":
    say("here")
    sleep()
if stage == "forget":
    asyncwg.run(forgetful())
elif stage == "plain loop":
    asyncio.run(main())
else:
    asyncwg.run(main())
"""


class Program:
    """A running program, and all that was ever started below it."""

    def __init__(self, folder: Path, stage: str) -> None:
        path = folder / "program.py"
        path.write_text(PROGRAM)
        self._mark = f"LIFE_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._errors = folder / "stderr"
        self.pids: list[int] = []
        """What it has named: a process may have thrown its environment away."""
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, path, stage],
                env={**os.environ, name: value, "PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._heard = b""

    def wait_for(self, word: str, times: int = 1) -> None:
        """Read until the program has said ``word`` so often."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while times:
            line, end, rest = self._heard.partition(b"\n")
            if end:
                self._heard = rest
                said, *others = line.decode().split()
                if said == "pids":
                    self.pids += map(int, others)
                times -= said == word
                continue
            ready, _, _ = select.select([self.process.stdout], [], [], deadline - time.monotonic())
            data = os.read(self.process.stdout.fileno(), 4096) if ready else b""
            if not data:
                pytest.fail(f"{word!r} never came; stderr:\n{self.errors}")
            self._heard += data

    def wait(self) -> int:
        """Wait for its end and return its status."""
        return self.process.wait(PATIENCE)

    @property
    def errors(self) -> str:
        """Its stderr so far."""
        return self._errors.read_text()

    def left(self, seconds: float = PATIENCE) -> list[int]:
        """Return what is still there after at most ``seconds``, but the program itself."""
        deadline = time.monotonic() + seconds
        while found := self._now():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(found[0])
                select.select([pidfd], [], [], remaining)
                os.close(pidfd)
        return found

    def _now(self) -> list[int]:
        found = set(alive(self.pids))
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != self.process.pid:
                with contextlib.suppress(OSError):
                    if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                        found.add(int(folder.name))
        return sorted(found)

    def close(self) -> None:
        """End whatever is left, so that a test that fails leaves nothing."""
        for pid in (self.process.pid, *self._now()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start programs, each at a stage; they and all below them are ended after the test."""
    with contextlib.ExitStack() as stack:

        def make(stage: str) -> Program:
            program = Program(tmp_path, stage)
            stack.callback(program.close)
            return program

        yield make


@pytest.mark.parametrize(
    ("stage", "times"),
    [
        ("early", 1),
        ("starting", 1),
        ("rank 0 in init", 1),
        ("init", 2),
        ("idle", 1),
        ("plain loop", 1),
        ("hold", 2),
        ("hold_gil", 2),
        ("hold_async", 2),
        ("closing", 2),
    ],
)
def test_nothing_is_left_of_a_program_that_was_killed(start: Any, stage: str, times: int) -> None:
    """Workers kept the GPU for days: https://github.com/mloda-ai/mloda/issues/1292.

    See also https://github.com/sgl-project/sglang/issues/680 and
    https://github.com/vllm-project/vllm/issues/34643. E-6: whatever it is doing.
    """
    program: Program = start(stage)
    program.wait_for("here", times)
    program.process.kill()
    assert program.wait() == -signal.SIGKILL
    assert program.left() == []


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_left_of_a_program_that_was_killed_at_any_moment_of_its_start(
    start: Any, seed: int
) -> None:
    """E-6."""
    program: Program = start("starting")
    program.wait_for("here")
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.process.wait(random.Random(seed).uniform(0, 0.4))
    program.process.kill()
    program.wait()
    assert program.left() == []


@pytest.mark.parametrize(
    ("kind", "children"),
    [("stubborn", 1), ("daemon", 1), ("multiprocessing", 1), ("dataloader", 2)],
)
def test_no_child_of_a_worker_outlives_a_program_that_was_killed(
    start: Any, kind: str, children: int
) -> None:
    """E-6: the guardian is their subreaper; the loading processes of a DataLoader are busy."""
    program: Program = start(f"child {kind}")
    program.wait_for("here")
    assert len(program.pids) == 2 + 2 * children
    program.process.kill()
    program.wait()
    assert program.left() == []


def test_nothing_is_left_though_a_forked_child_of_the_program_lives_on(start: Any) -> None:
    """E-6: it holds the controller's end of every socket."""
    program: Program = start("fork")
    program.wait_for("here")
    program.process.kill()
    program.wait()
    deadline = time.monotonic() + PATIENCE
    while (left := alive(program.pids)) and time.monotonic() < deadline:
        program.left(0.05)
    assert left == []


def test_nothing_is_left_of_a_program_that_was_terminated(start: Any) -> None:
    """E-6."""
    program: Program = start("hold")
    program.wait_for("here", 2)
    program.process.terminate()
    assert program.wait() == -signal.SIGTERM
    assert program.left() == []


@pytest.mark.parametrize("stage", ["idle", "hold_async", "plain loop", "init"])
def test_an_interrupt_is_the_controllers_alone_and_is_told_once(start: Any, stage: str) -> None:
    """Each worker printed a traceback: https://github.com/zauberzeug/nicegui/pull/6027.

    See also https://github.com/richardsheridan/trio-parallel/pull/35 and
    https://github.com/dask/distributed/pull/1005.
    """
    program: Program = start(stage)
    program.wait_for("here", 2 if stage in ("hold_async", "init") else 1)
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.wait() == -signal.SIGINT
    assert program.left() == []
    assert program.errors.count("KeyboardInterrupt") == 1 + program.errors.count(
        "raise KeyboardInterrupt"
    )
    assert "Process SpawnProcess" not in program.errors


def test_a_second_interrupt_ends_a_shutdown_that_takes_long(start: Any) -> None:
    """https://github.com/zauberzeug/nicegui/pull/6027."""
    program: Program = start("closing")
    program.wait_for("here", 2)
    for _ in range(2):
        os.killpg(program.process.pid, signal.SIGINT)
    assert program.wait() != 0
    assert program.left() == []


@pytest.mark.parametrize(("stage", "status"), [("return", 0), ("exit", 5), ("error", 1)])
def test_nothing_is_left_of_a_program_that_ends_in_its_block(
    start: Any, stage: str, status: int
) -> None:
    """E-6, and its status is its own."""
    program: Program = start(stage)
    assert program.wait() == status
    assert program.left() == []


def test_a_program_that_returns_says_nothing_on_stderr(start: Any) -> None:
    program: Program = start("return")
    assert program.wait() == 0
    assert program.errors == ""


def test_nothing_is_left_of_a_program_that_forgets_its_group(start: Any) -> None:
    """E-6: not even a word."""
    program: Program = start("forget")
    assert program.wait() == 0
    assert program.left() == []
    assert program.errors == ""


def test_the_controller_survives_the_death_of_its_workers(start: Any) -> None:
    """E-7."""
    program: Program = start("death")
    program.wait_for("survived")
    assert program.wait() == 0
    assert program.left() == []


def test_many_calls_a_death_and_a_shutdown_work_under_uvloop(fifo: Callable[[], Fifo]) -> None:
    """It aborted after 9200 messages: https://github.com/MagicStack/uvloop/issues/317 (#64)."""
    started, release = fifo(), fifo()

    async def main() -> None:
        async with group(Mortal, 1) as wg:
            view = wg[0]
            for start in range(0, 20_000, 500):
                numbers = range(start, start + 500)
                calls = asyncio.gather(*(view.ping(number) for number in numbers))
                assert await bounded(calls) == list(numbers)
            pending = view.hold(started, release)
            await bounded(started.taken())
            os.kill(wg.pids[0], signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                await bounded(pending)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
