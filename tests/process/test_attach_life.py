"""How groups that other programs call begin and end, and what their programs' ends do to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from asyncwg import (
    ClassWithInitArgs,
    GroupBrokenError,
    GroupClosedError,
    ResourcePool,
    RestartPolicy,
    UsageError,
    Worker,
    WorkerDiedError,
    WorkerGroup,
    WorkerStartError,
    register,
)
from asyncwg._attach.registry import Folder, peer_of
from tests.leaks import PATIENCE, bounded
from tests.process.workers_attach import Program, command, detached, own
from tests.process.workers_life import Fifo, alive


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the sockets of this test's groups; no host may be left in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "asyncwg"
    left: list[str] = []
    with Folder() as folder:
        for name in folder.names():
            sock = folder.connect(name)
            if sock is not None:
                left.append(name)
                os.kill(peer_of(sock).pid, signal.SIGKILL)
                sock.close()
    assert left == []


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    started = await bounded(detached("actor"))
    yield started
    with contextlib.suppress(GroupClosedError, GroupBrokenError):
        await bounded(started.shutdown())


def host_of(name: str) -> int:
    with Folder() as folder:
        sock = folder.connect(name)
        assert sock is not None
        with sock:
            return peer_of(sock).pid


async def until(condition: Callable[[], bool]) -> None:
    """Come back when ``condition`` holds, looking in every turn of the loop."""
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0)


async def gone(pids: list[int]) -> None:
    """Wait until no process of ``pids`` is there."""
    loop = asyncio.get_running_loop()
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended = asyncio.Event()
        loop.add_reader(fd, ended.set)
        try:
            await bounded(ended.wait())
        finally:
            loop.remove_reader(fd)
            os.close(fd)


async def test_a_shutdown_leaves_no_process_and_no_name(wg: WorkerGroup, runtime: Path) -> None:
    pids = [*wg.pids, host_of("actor")]
    await bounded(wg.shutdown())
    assert alive(pids) == []
    assert wg.state == "closed"
    assert os.listdir(runtime) == ["lock"]
    with pytest.raises(GroupClosedError):
        wg.add(1)
    await wg.shutdown()


async def test_leaving_async_with_only_lets_go(wg: WorkerGroup) -> None:
    async with await bounded(WorkerGroup.attach("actor")) as other:
        await bounded(other.add(2))
    assert other.state == "closed"
    assert await bounded(wg.add(1)) == [3, 3]


async def test_a_group_outlives_the_program_that_started_it() -> None:
    text = """
async def main():
    wg = await WorkerGroup.start(
        ResourcePool([2], use_gpu=False), ClassWithInitArgs(Plain, 40), detached=True, name="left", preload=[]
    )
    say(*wg.pids)
"""
    with Program(text) as creator:
        pids = [int(pid) for pid in (await creator.line()).split()]
        assert creator.finish() == ""
    async with await bounded(WorkerGroup.attach("left")) as wg:
        assert wg.pids == pids
        assert await bounded(wg.add(2)) == [42, 42]
    assert command("stop", "left").returncode == 0
    assert alive(pids) == []


async def test_a_creator_that_is_killed_while_the_host_starts_leaves_a_group_that_is_listed(
    fifo: Callable[[], Fifo],
) -> None:
    begun, permit = fifo(), fifo()
    text = """
class Slow(Worker):
    def __init__(self, begun, permit):
        super().__init__()
        begun.put()
        permit.take()

    @register()
    def ok(self):
        return "ok"

async def main():
    begun, permit = (Fifo(path) for path in sys.argv[1:])
    await WorkerGroup.start(
        ResourcePool([1], use_gpu=False), ClassWithInitArgs(Slow, begun, permit),
        detached=True, name="orphan", preload=[],
    )
"""
    with Program(text, begun.path, permit.path) as creator:
        await bounded(begun.taken())
        creator.kill()
    assert "starting" in command("list").stdout
    attaching = asyncio.create_task(WorkerGroup.attach("orphan"))
    permit.put()
    wg = await bounded(attaching)
    assert await bounded(wg.ok()) == ["ok"]
    await bounded(wg.shutdown())


class Refuses(Worker):
    def __init__(self) -> None:
        super().__init__()
        if self.rank == 1:
            raise RuntimeError("not today")


async def test_a_start_that_fails_tells_why_and_leaves_nothing(runtime: Path) -> None:
    pool = ResourcePool([2], use_gpu=False)
    with pytest.raises(WorkerStartError) as caught:
        await bounded(
            WorkerGroup.start(
                pool, ClassWithInitArgs(Refuses), detached=True, name="bad", preload=[]
            ),
        )
    (error,) = caught.value.exceptions
    assert (type(error), str(error)) == (RuntimeError, "not today")
    assert getattr(error, "rank", None) == 1
    assert any("in __init__" in note for note in error.__notes__)
    assert os.listdir(runtime) == ["lock"]


async def test_a_start_that_is_cancelled_leaves_nothing(
    runtime: Path, fifo: Callable[[], Fifo]
) -> None:
    begun, permit = fifo(), fifo()
    starting = asyncio.create_task(
        WorkerGroup.start(
            ResourcePool([1], use_gpu=False),
            ClassWithInitArgs(Slow, begun, permit),
            detached=True,
            name="slow",
            preload=[],
        )
    )
    await bounded(begun.taken())
    host = host_of("slow")
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(starting)
    await gone([host])
    assert command("list").stdout.strip() == "no groups"


class Slow(Worker):
    def __init__(self, begun: Fifo, permit: Fifo) -> None:
        super().__init__()
        begun.put()
        permit.take()


async def test_a_name_belongs_to_one_group_at_a_time(wg: WorkerGroup) -> None:
    with pytest.raises(UsageError, match="there is a group 'actor' already"):
        await bounded(detached("actor"))
    with pytest.raises(UsageError, match="there is a group 'actor' already"):
        async with own(attachable=True, name="actor"):
            pass
    assert await bounded(wg.add(1)) == [1, 1]


async def test_when_the_host_is_killed_every_call_fails_at_once(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started = fifo()
    calls = [wg.wait_for(started, fifo()), wg.add(1), wg.twice(1)]
    await bounded(started.taken(2))
    await bounded(calls[2])
    host, pids = host_of("actor"), wg.pids
    os.kill(host, signal.SIGKILL)
    for call in calls[:2]:
        with pytest.raises(GroupBrokenError, match=f"{host} that hosts group 'actor' has ended"):
            await bounded(call)
    with pytest.raises(GroupBrokenError, match="has ended"):
        wg.add(1)
    assert wg.state == "broken"
    await gone([host, *pids])


async def test_what_a_dead_host_has_left_is_found_and_removed(
    wg: WorkerGroup, runtime: Path
) -> None:
    host, pids = host_of("actor"), wg.pids
    os.kill(host, signal.SIGKILL)
    await gone([host, *pids])
    assert (runtime / "actor.sock").exists()
    assert command("list").stdout.strip() == "no groups"
    assert not (runtime / "actor.sock").exists()
    with pytest.raises(UsageError, match="no group 'actor'"):
        await bounded(WorkerGroup.attach("actor"))
    again = await bounded(detached("actor", 7))
    assert await bounded(again.add(0)) == [7, 7]
    await bounded(again.shutdown())


async def test_a_dead_socket_is_replaced_by_the_next_start(wg: WorkerGroup) -> None:
    host, pids = host_of("actor"), wg.pids
    os.kill(host, signal.SIGKILL)
    await gone([host, *pids])
    again = await bounded(detached("actor", 7))
    assert await bounded(again.add(0)) == [7, 7]
    await bounded(again.shutdown())


async def test_a_program_that_is_killed_gives_up_its_calls(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, permit = fifo(), fifo()
    text = """
async def main():
    async with await WorkerGroup.attach("actor") as wg:
        wg.wait_for(Fifo(sys.argv[1]), Fifo(sys.argv[2]))
        wg.note("never")
        wg.wait_async(Fifo(sys.argv[1]))
        await asyncio.Event().wait()
"""
    with Program(text, started.path, permit.path) as other:
        await bounded(started.taken(4))
        other.kill()

    async def heard() -> None:
        # The async method is cancelled, so the rest has been given up too.
        while not all(await wg.run(lambda worker: "cancelled" in worker.seen)):
            pass

    permit.put(2)
    await bounded(heard())
    await bounded(wg.check_health(timeout=PATIENCE))
    # Dropped by all or run by all. Before or after the other lane's cancelled method, that is each rank's.
    seen = await bounded(wg.noted())
    assert sorted(seen[0]) == sorted(seen[1])


async def test_a_rank_that_dies_tells_everybody_and_the_host_ends_with_the_last_handle(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    other = await bounded(WorkerGroup.attach("actor"))
    started = fifo()
    theirs = other.wait_async(started)
    await bounded(started.taken(2))
    with pytest.raises(WorkerDiedError) as caught:
        await bounded(wg.leave(3))
    assert (caught.value.rank, caught.value.exit_code) == (1, 3)
    assert caught.value.method == "Plain.leave"
    with pytest.raises(WorkerDiedError):
        await bounded(theirs)
    with pytest.raises(GroupBrokenError, match="exit code 3"):
        other.add(1)
    assert other.state == "broken"
    host = host_of("actor")
    late = await bounded(WorkerGroup.attach("actor"))
    with pytest.raises(GroupBrokenError, match="exit code 3"):
        late.add(1)
    for each in (other, late, wg):
        assert alive([host]) == [host]
        await each.detach()
    await gone([host])


async def test_a_broken_group_can_be_started_again_by_any_program(wg: WorkerGroup) -> None:
    other = await bounded(WorkerGroup.attach("actor"))
    await bounded(wg.add(5))
    with pytest.raises(WorkerDiedError):
        await bounded(wg.leave(3))
    before = wg.pids
    await bounded(other.restart())
    assert await bounded(other.add(1)) == [1, 1]
    assert await bounded(wg.add(1)) == [2, 2]
    assert wg.pids == other.pids != before
    await other.detach()


async def test_a_policy_starts_it_again_and_saved_state_is_kept() -> None:
    wg = await bounded(detached("phoenix", restart=RestartPolicy(backoff=0.0)))
    await bounded(wg.add(5))
    await bounded(wg.save())
    with pytest.raises(WorkerDiedError):
        await bounded(wg.leave(3))

    async def back() -> list[int]:
        while True:
            with contextlib.suppress(GroupBrokenError):
                return await wg.add(1)  # type: ignore[no-any-return]
            await asyncio.sleep(0)

    assert await bounded(back()) == [6, 6]
    await bounded(wg.shutdown())


async def test_a_group_that_another_program_shuts_down_is_closed_for_all(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started = fifo()
    call = wg.wait_async(started)
    await bounded(started.taken(2))
    other = await bounded(WorkerGroup.attach("actor"))
    await bounded(other.shutdown())
    with pytest.raises(GroupClosedError):
        await bounded(call)
    with pytest.raises(GroupClosedError, match="shut down"):
        wg.add(1)


class Unclean(Worker):
    @register()
    def ok(self) -> None: ...

    def close(self) -> None:
        raise RuntimeError("could not close")


async def test_what_close_raises_is_told_to_who_shuts_down() -> None:
    wg = await bounded(
        WorkerGroup.start(
            ResourcePool([2], use_gpu=False),
            ClassWithInitArgs(Unclean),
            detached=True,
            name="unclean",
            preload=[],
        ),
    )
    host = host_of("unclean")
    with pytest.raises(ExceptionGroup) as caught:
        await bounded(wg.shutdown())
    assert [str(error) for error in caught.value.exceptions] == ["could not close"] * 2
    assert alive([host]) == []


async def test_the_command_line_lists_and_stops(wg: WorkerGroup) -> None:
    host, pids = host_of("actor"), wg.pids
    listed = command("list").stdout.splitlines()
    assert listed[0].split() == ["name", "pid", "class", "ranks", "devices", "state", "since"]
    assert listed[1].split()[:6] == ["actor", str(host), "Plain", "2", "-", "running"]
    assert "idle" in command("stacks", "actor").stdout
    stopped = command("stop", "actor")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert alive([host, *pids]) == []
    missing = command("stop", "actor")
    assert missing.returncode == 1
    assert "no group 'actor'" in missing.stderr


async def test_sigterm_ends_a_host_politely(wg: WorkerGroup, runtime: Path) -> None:
    host, pids = host_of("actor"), wg.pids
    os.kill(host, signal.SIGTERM)
    await gone([host, *pids])
    assert not (runtime / "actor.sock").exists()
    await bounded(until(lambda: wg.state == "closed"))


async def test_what_ranks_print_is_in_a_file_beside_the_socket(
    wg: WorkerGroup, runtime: Path
) -> None:
    await bounded(wg.run(lambda worker: print(f"hello from {worker.rank}", flush=True)))  # noqa: T201
    log = runtime / "actor.sock.log"
    await bounded(until(lambda: "actor:1] hello from 1" in log.read_text()))


async def test_a_group_of_this_program_can_be_attached_to_while_it_runs() -> None:
    text = """
async def main():
    async with await WorkerGroup.attach("mine") as wg:
        say(await wg.add(2))
"""
    async with own(attachable=True, name="mine") as wg:
        with Program(text) as other:
            assert await other.line() == "[2, 2]"
            other.finish()
        assert await bounded(wg.add(1)) == [3, 3]
        handle = await bounded(WorkerGroup.attach("mine"))
    with pytest.raises(GroupClosedError):
        handle.add(1)
    assert command("list").stdout.strip() == "no groups"


async def test_when_the_program_that_hosts_a_group_is_killed_its_handles_break() -> None:
    text = """
async def main():
    async with own(attachable=True, name="theirs") as wg:
        say(*wg.pids)
        await asyncio.Event().wait()
"""
    with Program(text) as host:
        pids = [int(pid) for pid in (await host.line()).split()]
        wg = await bounded(WorkerGroup.attach("theirs"))
        call = wg.run(lambda _worker: signal.pause())
        host.kill()
        with pytest.raises(
            GroupBrokenError, match=f"{host.pid} that hosts group 'theirs' has ended"
        ):
            await bounded(call)
    await gone(pids)


async def test_an_attachable_group_that_its_user_drops_is_not_found_any_more() -> None:
    wg = await bounded(own(attachable=True, name="dropped").__aenter__())
    pids = wg.pids
    del wg
    await gone(pids)
    assert command("list").stdout.strip() == "no groups"


async def test_an_inline_group_can_not_be_shared() -> None:
    for option in ("detached", "attachable"):
        with pytest.raises(UsageError, match="inline"):
            own(executor="inline", name="inside", **{option: True})
    async with own() as local:
        with pytest.raises(UsageError, match="program's own"):
            await local.detach()


async def test_others_could_enter_the_folder_so_nothing_is_put_there(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkdir(runtime, 0o755)
    with pytest.raises(UsageError, match="mode 0700"):
        await bounded(detached("actor"))
    with pytest.raises(UsageError, match="mode 0700"):
        await bounded(WorkerGroup.attach("actor"))
    os.chmod(runtime, 0o700)


async def test_nothing_is_read_from_another_user(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with own(attachable=True, name="mine") as wg:
        from asyncwg._attach import host

        monkeypatch.setattr(host, "peer_of", lambda sock: peer_of(sock)._replace(uid=4242))
        with pytest.raises(GroupClosedError, match="refuses this user"):
            await bounded(WorkerGroup.attach("mine"))
        monkeypatch.undo()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime.parent))
        async with await bounded(WorkerGroup.attach("mine")) as attached:
            assert await bounded(attached.add(1)) == [1, 1]
        assert await bounded(wg.add(1)) == [2, 2]


def test_a_host_does_not_hold_its_creators_output_open(tmp_path: Path) -> None:
    text = """
import asyncio
from tests.process.workers_attach import detached
async def main():
    await detached("quiet")
asyncio.run(main())
"""
    try:
        # Ends only when nobody has the pipe any more.
        subprocess.run([sys.executable, "-c", text], check=True, capture_output=True, timeout=150)
    finally:
        assert command("stop", "quiet").returncode == 0
