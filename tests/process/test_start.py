"""How a group starts, and what is told and left when it can't: promise E-6 and part of E-1."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncwg import (
    CallTimeoutError,
    ClassWithInitArgs,
    GroupClosedError,
    ResourcePool,
    UsageError,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerGroup,
    WorkerGroupError,
    WorkerStartError,
    register,
)
from asyncwg._driver.gang import Gang
from asyncwg._driver.process import Processes
from asyncwg._driver.rank import RankState
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import AtHome, Fifo, Hooks, Late, LateTwice, Steps, alive, group


async def start_failure(wg: WorkerGroup) -> WorkerStartError:
    """Return the error of a start that fails."""
    with pytest.raises(WorkerStartError) as caught:
        await bounded(wg.__aenter__())
    return caught.value


async def test_a_failed_init_is_told_with_its_message_rank_and_place(loop_kind: str) -> None:
    """The cause was in another process's log: https://github.com/vllm-project/vllm/issues/30021.

    See also https://github.com/vllm-project/vllm/issues/28910 and 22303.
    """
    error = await start_failure(group(Late, 2, "raise", 1))
    (cause,) = error.exceptions
    assert isinstance(cause, ValueError)
    text = "".join(traceback.format_exception(error))
    assert "bad cfg 42" in text
    assert "rank 1" in text
    assert "workers_life.py" in text
    assert "in __init__" in text


async def test_no_process_is_left_of_a_start_that_failed(
    fifo: Callable[[], Fifo], tmp_path: Path
) -> None:
    """https://github.com/vllm-project/vllm/issues/30021. E-6: also the rank that was ready."""
    wg = group(Noting, 2, str(tmp_path), fifo())
    await start_failure(wg)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in (0, 1)]
    assert alive(pids) == []
    assert wg.state == "closed"


class Noting(Worker):
    """Rank 1 fails when rank 0 has noted its pid."""

    def __init__(self, folder: str, noted: Fifo) -> None:
        super().__init__()
        (Path(folder) / f"pid-{self.rank}").write_text(str(os.getpid()))
        if self.rank == 0:
            noted.put()
        else:
            noted.take()
            raise ValueError("bad cfg 42")


async def test_a_start_fails_at_once_though_another_rank_is_busy_in_its_init(
    fifo: Callable[[], Fifo],
) -> None:
    """E-3: a rendezvous that nobody joins must not hide the error."""
    error = await start_failure(group(LateTwice, 2, fifo(), error_grace=0.05))
    assert "bad cfg 42" in str(error.exceptions[0])


async def test_all_ranks_that_fail_are_in_the_error() -> None:
    error = await start_failure(group(Late, 3, "raise", error_grace=30))
    assert [getattr(each, "rank", None) for each in error.exceptions] in (
        [0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0],
    )  # fmt: skip


async def test_a_start_error_is_a_group_error() -> None:
    """E-2: one handler takes both."""
    with pytest.raises(WorkerGroupError):
        await bounded(group(Late, 1, "raise").__aenter__())


async def test_sys_exit_in_init_is_a_failed_start() -> None:
    """E-2."""
    error = await start_failure(group(Late, 1, "exit"))
    (cause,) = error.exceptions
    assert isinstance(cause, WorkerError)
    assert "SystemExit" in str(cause)


async def test_a_death_in_init_is_in_the_start_error(capfd: pytest.CaptureFixture[str]) -> None:
    """E-2, E-4."""
    error = await start_failure(group(Late, 2, "die", 1))
    (cause,) = [each for each in error.exceptions if isinstance(each, WorkerDiedError)]
    assert (cause.rank, cause.exit_code) == (1, 7)
    assert cause.stderr_tail[-1] == "last words"


async def test_a_failed_setup_is_a_failed_start() -> None:
    error = await start_failure(group(Late, 1, "raise in setup"))
    text = "".join(traceback.format_exception(error))
    assert "bad setup 43" in text
    assert "in setup" in text


async def test_an_import_error_in_the_classs_module_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module can be imported here and not in the worker."""
    (tmp_path / "moody_module.py").write_text(
        "import os\n"
        "import asyncwg\n"
        "if 'RANK' in os.environ:\n"
        "    import no_such_module_42\n"
        "class Moody(asyncwg.Worker):\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = __import__("moody_module")
    error = await start_failure(group(module.Moody, 1))
    text = "".join(traceback.format_exception(error))
    assert "no_such_module_42" in text
    assert "can't be unpickled in the worker" in text


async def test_an_init_argument_that_fails_to_unpickle_is_a_failed_start() -> None:
    """E-2."""
    error = await start_failure(group(Late, 1, AtHome()))
    assert "far from home" in str(error.exceptions[0])


async def test_a_start_that_takes_too_long_names_the_ranks_and_leaves_nothing(
    fifo: Callable[[], Fifo],
) -> None:
    """E-6: ranks that are ready are not blamed."""
    async with group(Steps, 1):
        pass  # the guardian takes its time on a busy machine, and is there from now on
    errors: list[Exception] = []
    seconds = 0.2
    while len(errors) != 1 and seconds < PATIENCE:  # rank 0 needs more time on a busy machine
        seconds *= 5
        wg = group(Late, 2, "block", 1, fifo(), start_timeout=seconds)
        errors = list((await start_failure(wg)).exceptions)
    (late,) = errors
    assert isinstance(late, CallTimeoutError)
    assert "rank 1" in str(late)
    assert "Late.__init__" in str(late)
    assert f"after {seconds} s" in str(late)


async def test_the_processes_of_a_group_are_known_when_its_start_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A guardian that has to wait for a processor tells of a rank when that has long answered."""
    late: list[Callable[[], None]] = []
    take, receive = Processes._take, Gang._receive_rare

    def take_late(self: Processes, message: dict[str, Any], fds: list[int]) -> None:
        if message["event"] == "started":
            late.append(lambda: take(self, message, fds))
        else:
            take(self, message, fds)

    def receive_and_tell(self: Gang, *args: Any) -> None:
        receive(self, *args)
        if all(rank.state is RankState.READY for rank in self._ranks):
            while late:
                self._loop.call_soon(self._loop.call_soon, late.pop())

    monkeypatch.setattr(Processes, "_take", take_late)
    monkeypatch.setattr(Gang, "_receive_rare", receive_and_tell)
    async with group(Steps, 2) as wg:
        assert wg.alive
        assert wg.pids == await bounded(wg.pid())


async def test_a_start_that_is_cancelled_leaves_nothing(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """E-6."""
    started = fifo()
    wg = group(Late, 2, "block", None, started)
    starting = asyncio.create_task(wg.__aenter__())
    await bounded(started.taken(2))
    pids = wg.pids
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(starting)
    assert alive(pids) == []
    assert wg.state == "closed"


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8])
async def test_a_start_that_is_cancelled_early_leaves_nothing(turns: int) -> None:
    """E-6: at any moment; the leak check looks for processes and descriptors."""
    starting = asyncio.create_task(group(Steps, 2).__aenter__())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await bounded(starting)


async def test_a_class_that_can_not_be_pickled_names_the_attribute() -> None:
    """Nothing is started."""

    class Holder(Worker):
        lock = threading.Lock()

    with pytest.raises(UsageError, match=r"Holder.*lock"):
        await bounded(group(Holder).__aenter__())


async def test_an_init_argument_that_can_not_be_pickled_is_named() -> None:
    with pytest.raises(UsageError, match=r"\['deep'\]\[0\].*lock"):
        await bounded(group(Late, 1, {"deep": [threading.Lock()]}).__aenter__())


def test_an_unknown_option_is_a_type_error_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"'eror_grace'.*'error_grace'"):
        group(Steps, 1, eror_grace=3)


def test_a_method_with_a_name_of_the_groups_own_is_refused_with_the_remedy() -> None:
    class Taken(Worker):
        @register()
        def shutdown(self) -> None: ...

    with pytest.raises(
        UsageError, match=r"Taken\.shutdown.*WorkerGroup\.shutdown.*register.*name="
    ):
        group(Taken)


@pytest.mark.parametrize(
    "name", ["any", "map", "share", "link", "trace", "metrics", "attach", "detach", "union", "barrier",
             "logs", "debug", "world_size", "call", "run", "execute_all", "rank", "pids", "name"]
)  # fmt: skip
def test_names_that_are_reserved_for_the_group_are_refused(name: str) -> None:
    def method(self: object) -> None: ...

    cls = type("Taken", (Worker,), {name: register()(method)})
    with pytest.raises(UsageError, match=name):
        group(cls)


async def test_another_name_for_the_proxy_makes_a_reserved_name_usable() -> None:
    async with group(Renamed, 1) as wg:
        assert await bounded(wg.worker_map(3)) == [6]


class Renamed(Worker):
    """Has a method whose name the group reserves."""

    @register(name="worker_map")
    def map(self, value: int) -> int:
        return 2 * value


def _refuse(*_args: object) -> None:
    raise NotImplementedError


NoReaders: type[asyncio.SelectorEventLoop] = type(
    "NoReaders", (asyncio.SelectorEventLoop,), {"add_reader": _refuse, "add_writer": _refuse}
)
"""As the default loop of other systems."""


def test_a_loop_without_add_reader_is_refused_before_any_process_exists() -> None:
    """A bare NotImplementedError: https://github.com/agronholm/anyio/issues/77.

    See also https://github.com/tornadoweb/tornado/issues/1201 and
    https://github.com/empicano/aiomqtt/issues/4.
    """

    async def main() -> None:
        wg = group(Steps)
        try:
            await wg.__aenter__()
        finally:
            assert wg.pids == []

    with (
        asyncio.Runner(loop_factory=NoReaders) as runner,
        pytest.raises(UsageError, match=r"add_reader.*NoReaders"),
    ):
        runner.run(main())


async def test_a_group_starts_once() -> None:
    async with group(Steps, 1) as wg:
        with pytest.raises(UsageError, match="started before"):
            await bounded(wg.__aenter__())
        assert await bounded(wg.echo(1)) == [1]


async def test_the_states_of_a_group_are_told() -> None:
    wg = group(Late, 1, "well")
    assert (wg.state, wg.alive, wg.pids) == ("new", False, [])
    async with wg:
        assert (wg.state, wg.alive) == ("running", True)
        assert alive(wg.pids) == wg.pids
    assert (wg.state, wg.alive) == ("closed", False)
    with pytest.raises(GroupClosedError, match="was shut down"):
        wg.ping()


async def test_start_returns_a_running_group() -> None:
    wg = await bounded(
        WorkerGroup.start(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Steps), preload=[])
    )
    try:
        assert await bounded(wg.echo(1)) == [1, 1]
    finally:
        await bounded(wg.shutdown())


async def test_setup_has_run_on_every_rank_when_the_start_returns(tmp_path: Path) -> None:
    async with group(Hooks, 2, str(tmp_path)):
        assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["init\nsetup\n"] * 2


async def test_many_groups_start_at_once(loop_kind: str) -> None:
    groups = [group(Steps, 2, name=f"g{number}") for number in range(4)]
    await bounded(asyncio.gather(*(wg.__aenter__() for wg in groups)))
    try:
        answers = await bounded(asyncio.gather(*(wg.echo(wg.name) for wg in groups)))
        assert answers == [[f"g{number}"] * 2 for number in range(4)]
    finally:
        await bounded(asyncio.gather(*(wg.shutdown() for wg in groups)))


async def test_a_group_that_was_never_started_leaves_nothing() -> None:
    wg = group(Steps)
    await bounded(wg.shutdown())
    assert wg.state == "closed"
    del wg
    gc.collect()


async def test_spawned_workers_fail_to_start_in_the_same_words() -> None:
    """E-1: whatever the start method."""
    error = await start_failure(group(Late, 1, "raise", start_method="spawn"))
    text = "".join(traceback.format_exception(error))
    assert "bad cfg 42" in text
    assert "in __init__" in text


async def test_a_named_preload_that_can_not_be_imported_fails_the_start() -> None:
    error = await start_failure(group(Steps, 1, preload=["no_such_module_43"]))
    assert "no_such_module_43" in "".join(traceback.format_exception(error))
