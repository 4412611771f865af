"""Large values and the ends of processes: ranks that die, controllers that do, children that are forked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
import torch

from asyncwg import WorkerDiedError, WorkerGroup
from asyncwg import _linux as linux
from asyncwg._driver.arena import Arena, arena
from tests.leaks import PATIENCE, bounded
from tests.process.workers_arena import LARGE, Large, numbers, same
from tests.process.workers_life import Fifo, alive
from tests.process.workers_values import group

ROOT: Final = Path(__file__).parents[2]


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    async with group(Large) as started:
        yield started


def program(text: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a controller of its own."""
    head = "from tests.process.workers_arena import *; from tests.process.workers_life import *\n"
    head += "from tests.process.workers_values import group\nimport asyncio, os, sys, asyncwg\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + text, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # see Child
        **options,
    )


def ends_well(process: subprocess.Popen[str]) -> str:
    """Return what a program printed, if it ended well and said nothing on stderr."""
    try:
        out, err = process.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, err) == (0, "")
    return out


class Child:
    """A fork of this process that runs ``main``; its exit code is what ``main`` returns.

    It computes on one thread: OpenMP's threads are not in a fork, and their master waits for them.
    """

    def __init__(self, main: Callable[[], int]) -> None:
        self.pid = os.fork()
        if not self.pid:
            try:
                torch.set_num_threads(1)
                os._exit(main())
            finally:
                os._exit(70)

    async def exit_code(self) -> int:
        """Wait for its end; cancelled or too late, it is killed."""
        descriptor = os.pidfd_open(self.pid)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            await bounded(ended.wait())
        finally:
            loop.remove_reader(descriptor)
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
            status = os.waitpid(self.pid, 0)[1]  # noqa: ASYNC222 - it has ended
        return os.waitstatus_to_exitcode(status)


# Ranks that die


async def test_what_a_killed_rank_held_is_taken_back_and_another_group_keeps_its_own() -> None:
    """https://github.com/python/cpython/issues/82300: a reader's end took the memory from the others."""
    async with group(Large, 1) as other:
        await bounded(other.keep(numbers(3)))
        async with group(Large) as wg:
            await bounded(wg.keep(numbers(1)))
            call = wg.check(numbers(2), 2)
            os.kill(wg.pids[0], signal.SIGKILL)
            with pytest.raises(WorkerDiedError):
                await bounded(call)
            del call
        gc.collect()
        for i in range(5):
            await bounded(other.check(numbers(50 + i), 50 + i))
        assert await bounded(other.kept_firsts()) == [[3]]
        await bounded(other.forget())
        await bounded(other.descriptors())
        assert arena().in_use() == 0


async def test_a_rank_that_is_killed_while_its_result_waits_for_room_leaves_nothing(
    wg: WorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the offer and the place for it."""
    arena().trim()
    transfers = wg._core.gang.transfers  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(linux, "available_memory", lambda: 0)
        patch.setattr(Arena, "fits", lambda _self, _weight: True)
        call = wg.big_rows(torch.empty(2, 0))
        while len(transfers._wants) < 2:
            await bounded(wg.ping_async())
        os.kill(wg.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await bounded(call)
    del call
    await bounded(wg.shutdown())
    gc.collect()
    assert arena().in_use() == 0


async def test_a_rank_that_is_killed_after_its_peer_has_given_its_rows_leaves_nothing(
    fifo: Callable[[], Fifo],
) -> None:
    """The place for the joined result is given out, and half of it is written."""
    turn = fifo()
    async with group(Large) as wg:
        call = wg.rows_in_turn(numbers(0, 2 * LARGE), turn)
        assert await bounded(_first_to_answer(call)) == 0
        os.kill(wg.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            await bounded(call)
        del call
    gc.collect()
    assert arena().in_use() == 0


async def test_a_worker_that_can_not_map_a_value_fails_its_call_and_keeps_no_room(
    wg: WorkerGroup,
) -> None:
    await bounded(wg[0].run(_limit_address_space))
    for i in range(3):
        with pytest.raises(OSError, match="memory"):
            await bounded(wg[0].check(numbers(i), i))
    assert await bounded(wg.size_of("abc")) == [[3], [3]]
    assert arena().in_use() == 0


def _limit_address_space(_worker: Large) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = 4096 * pages + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


async def _first_to_answer(call: Any) -> int | None:
    async for rank, _value in call.as_completed():
        return int(rank)
    return None


# Children that are forked


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["fork_and_hold", "load_and_hold"])
async def test_a_child_that_a_worker_forks_keeps_seeing_what_it_was_forked_with(
    how: str,
) -> None:
    """A data loader over a received tensor."""
    async with group(Large, 1) as one:
        value = numbers(7)
        await bounded(getattr(one, how)(value, 7))
        for i in range(5):
            await bounded(one.overwrite(numbers(100 + i), -1))
        assert await bounded(one.child_saw_it()) == [True]


async def test_a_child_that_the_controller_forks_keeps_seeing_its_results(wg: WorkerGroup) -> None:
    results: list[torch.Tensor] = await bounded(wg.make(7))
    joined = [await bounded(wg.rows(numbers(0, 2 * LARGE)))]
    told, tell = os.pipe()

    def main() -> int:
        os.read(told, 1)
        return not (all(same(result, 7) for result in results) and same(joined[0], 0))

    child = Child(main)
    results.clear()
    joined.clear()
    for i in range(5):
        await bounded(wg.echo(numbers(100 + i)))
        await bounded(wg.rows(numbers(200 + i, 2 * LARGE)))
    os.write(tell, b"x")
    assert await child.exit_code() == 0
    os.close(told)
    os.close(tell)


async def test_results_stay_as_they_are_when_the_controller_forks(wg: WorkerGroup) -> None:
    results = await bounded(wg.make(7))

    def main() -> int:
        for result in results:
            result.fill_(-1)
        return 0

    assert await Child(main).exit_code() == 0
    for i in range(5):
        await bounded(wg.echo(numbers(100 + i)))
    assert [same(result, 7) for result in results] == [True, True]


FORKED: Final = """
async def main():
    async with group(Large) as wg:
        for first in range(3):
            assert all(same(back, first) for back in await wg.echo(numbers(first, 20 * MB)))

asyncio.run(main())
pid = os.fork()
if not pid:
    asyncio.run(main())
else:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_a_forked_child_of_a_controller_can_be_a_controller_itself() -> None:
    """Threads that copied in the parent are not there in the child."""
    ends_well(program(FORKED))


# Controllers that end


def controller_of_two(act: str) -> str:
    return f"""
async def main():
    async with group(Large) as wg:
        {act}

asyncio.run(main())
"""


COPYING: Final = controller_of_two(
    """await wg.keep(numbers(0))
        from asyncwg._wire import sources
        def copy(source, place):
            os.write(1, (" ".join(map(str, wg.pids)) + "\\n").encode())
            os.read(0, 1)
        sources.copy = copy
        await wg.echo(numbers(0, 40 * MB))"""
)


def test_a_controller_that_is_killed_in_the_middle_of_a_copy_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    process = program(COPYING, stdin=subprocess.PIPE)
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.communicate(timeout=PATIENCE)
    _wait_for_the_end(pids)
    assert alive(pids) == []
    assert set(os.listdir("/dev/shm")) <= before


def _wait_for_the_end(pids: list[int]) -> None:
    """Wait until none is left, taken by its parent too."""
    end = time.monotonic() + PATIENCE
    while alive(pids) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(OSError):
                descriptor = os.pidfd_open(pid)
                select.select([descriptor], [], [], PATIENCE)
                os.close(descriptor)


HELD: Final = controller_of_two(
    """global kept
        kept = [await wg.make(i) for i in range(5)]
        kept.append(asyncwg.shared_empty(1000))
        kept.append(await wg.rows(numbers(0, 2 * LARGE)))
        kept[0][0].fill_(1)"""
)


def test_a_program_that_holds_results_to_its_end_ends_in_silence() -> None:
    """No "leaked shared_memory objects": https://github.com/luizalabs/shared-memory-dict/issues/55."""
    ends_well(program(HELD))


SMALL_SHM: Final = controller_of_two(
    """assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 1 << 20
        for i in range(5):
            assert all(same(back, i) for back in await wg.echo(numbers(i, 4 * MB)))
        print("right")"""
)


def test_one_megabyte_of_dev_shm_is_enough() -> None:
    """Tensors in it ended processes with SIGBUS: https://github.com/pytorch/pytorch/issues/58386."""
    mount = "mount -t tmpfs -o size=1m none /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode:
        pytest.skip("no right to mount")
    head = "from tests.process.workers_arena import *; from tests.process.workers_values import group\n"
    head += "import asyncio, os\n"
    done = subprocess.run(
        [
            "unshare",
            "-m",
            "sh",
            "-c",
            f'{mount} && exec "$0" -c "$1"',
            sys.executable,
            head + SMALL_SHM,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("right\n", "")


WITHOUT_MEMFD: Final = """
import errno
def refuse(*_):
    raise OSError(errno.ENOSYS, "no such call")
if sys.argv[1] == "refused":
    os.memfd_create = refuse
else:
    del os.memfd_create
""" + controller_of_two(
    """for i in range(5):
            assert all(same(back, i) for back in await wg.echo(numbers(i, 4 * MB)))
        from asyncwg._driver.arena import arena
        print(os.readlink(f"/proc/self/fd/{arena().fd}").partition("-")[0])"""
)


@pytest.mark.parametrize("how", ["refused", "missing"])
def test_without_memfd_values_go_through_a_file_that_has_no_name(how: str) -> None:
    before = set(os.listdir("/dev/shm"))
    assert ends_well(program(WITHOUT_MEMFD, how)) == "/dev/shm/asyncwg\n"
    assert set(os.listdir("/dev/shm")) <= before


# Whatever the threshold


@pytest.mark.parametrize("threshold", ["0", "inf"])
def test_values_arrive_the_same_whether_all_of_them_or_none_go_through_the_arena(
    threshold: str,
) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
            "tests/process/test_dispatch.py", "tests/process/test_values.py",
            "-k", "come_back or own_and or is_taken_as or every_type or each_rank or joined",
        ],
        cwd=ROOT,
        env={**os.environ, "ASYNCWG_ARENA_FROM": threshold},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
