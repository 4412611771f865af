"""Ranks that the kernel's out-of-memory killer has ended say so (E-4)."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from asyncwg import WorkerDiedError
from asyncwg._driver import postmortem
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import Mortal, group

ROOT: Final = Path(__file__).parents[2]
LIMIT: Final = 256 << 20
"""Bytes for a controller, its guardian and two ranks; they take a fifth of that."""


@pytest.fixture
def count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Say how often the killer has struck, in a file that is read in place of the kernel's."""
    events = tmp_path / "box" / "memory.events"
    events.parent.mkdir()
    (tmp_path / "own").write_text("0::/box\n")
    monkeypatch.setattr(postmortem, "_OWN", tmp_path / "own")
    monkeypatch.setattr(postmortem, "_CONTROL_GROUPS", tmp_path)

    def struck(times: int) -> None:
        events.write_text(f"max 7\noom {times}\noom_kill {times}\n")

    struck(3)
    return struck


async def test_a_rank_that_was_killed_when_the_killer_struck_is_told_as_its_victim(
    count: Callable[[int], None],
) -> None:
    async with group(Mortal) as wg:
        count(4)
        os.kill(wg.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as caught:
            await bounded(wg[1].ping())
        assert caught.value.oom_killed
        assert "out-of-memory killer" in str(caught.value)


async def test_a_rank_that_was_killed_otherwise_is_not_told_as_its_victim(
    count: Callable[[int], None],
) -> None:
    """The killer had struck before the group was there."""
    async with group(Mortal) as wg:
        with pytest.raises(WorkerDiedError) as caught:
            await bounded(wg[1].say_and_die("by its own hand"))
        assert caught.value.signal_name == "SIGKILL"
        assert not caught.value.oom_killed
        assert "out-of-memory" not in str(caught.value)


async def test_a_rank_that_has_left_by_itself_is_not_told_as_its_victim(
    count: Callable[[int], None],
) -> None:
    """The killer has struck somebody else."""
    async with group(Mortal) as wg:
        count(4)
        with pytest.raises(WorkerDiedError) as caught:
            await bounded(wg[1].leave(7))
        assert not caught.value.oom_killed


@pytest.fixture
def narrow() -> Iterator[Path]:
    """A control group with little memory, where one can be had."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        made = root / f"asyncwg-test-{os.getpid()}"
        try:
            made.mkdir()
        except OSError:
            continue
        try:
            if (made / "cgroup.procs").exists():
                (made / limit).write_text(str(LIMIT))
                yield made
                _wait_until_empty(made)
                return
        except PermissionError:
            continue
        finally:
            with contextlib.suppress(OSError):
                made.rmdir()
    pytest.skip("no control group of our own can be had here")


def _wait_until_empty(group_folder: Path) -> None:
    for pid in (group_folder / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(int(pid))
            select.select([pidfd], [], [], PATIENCE)
            os.close(pidfd)


HUNGRY: Final = """
import asyncio
from asyncwg import WorkerDiedError
from tests.process.workers_life import Mortal, group

def eat(worker):
    return len(b"x" * (1 << 30))

async def main():
    async with group(Mortal) as wg:
        try:
            await wg[1].run(eat)
        except WorkerDiedError as error:
            print(error.rank, error.signal_name, error.oom_killed)
            print(error)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_rank_that_takes_too_much_memory_is_told_as_the_killers_victim(narrow: Path) -> None:
    """The kernel's own killer, in a control group of its own."""
    if not re.search(r"^SwapTotal: +0 kB$", Path("/proc/meminfo").read_text(), re.M):
        pytest.skip("what does not fit is swapped out here")
    done = subprocess.run(
        [
            "sh",
            "-c",
            'echo $$ > "$0/cgroup.procs" && exec "$@"',
            narrow,
            sys.executable,
            "-c",
            HUNGRY,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "1 SIGKILL True"
    assert "out-of-memory killer ended it" in done.stdout
