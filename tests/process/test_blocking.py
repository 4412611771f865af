"""Groups without an event loop: plain functions, handles, threads, Ctrl-C and what is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import inspect
import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from asyncwg import (
    CallTimeoutError,
    ClassWithInitArgs,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    PerRank,
    ResourcePool,
    UsageError,
    Worker,
    WorkerDiedError,
    WorkerGroupError,
    WorkerStartError,
    register,
    shared_empty,
)
from asyncwg import WorkerGroup as AsyncWorkerGroup
from asyncwg._loop_thread import Errand
from asyncwg.blocking import Handle, WorkerGroup
from asyncwg.colocated import create_colocated_worker_cls
from tests.leaks import bounded
from tests.process.workers_life import (
    AsyncSteps,
    Fifo,
    Late,
    Mortal,
    Raiser,
    Steps,
    alive,
)
from tests.times import GRACE, PATIENCE

pytestmark = pytest.mark.timeout(150)
"""What waits for ever is interrupted: no call here can be bounded from within its own thread."""

ROOT: Final = Path(__file__).parents[2]
THREAD: Final = "asyncwg-blocking"

Interrupt = Callable[[Fifo], threading.Thread]


class Later(Steps):
    """Methods whose calls give handles."""

    @register(blocking=False)
    def triple(self, value: int) -> int:
        """Triple it."""
        return 3 * value

    @register(blocking=False)
    def hold_later(self, started: Fifo, release: Fifo, value: Any = None) -> Any:
        return self.hold(started, release, value)

    @register()
    def until_cancelled_with(self, fifos: tuple[Fifo, Fifo]) -> None:
        self.until_cancelled(*fifos)

    @register(blocking=False)
    def fail_later(self, message: str) -> None:
        raise ValueError(message)


class Giver(Steps):
    """Generators."""

    @register()
    def count(self, end: int | None = None) -> Iterator[int]:
        try:
            for number in itertools.count():
                if number == end:
                    return
                self.log.append(number)
                yield number
        finally:
            self.log.append("closed")

    @register()
    async def count_async(self) -> AsyncIterator[int]:
        for number in itertools.count():
            yield number


def group(cls: type = Later, ranks: int = 2, *args: Any, **options: Any) -> WorkerGroup:
    pool = ResourcePool([ranks], use_gpu=False)
    given: dict[str, Any] = {"preload": [], "start_timeout": 60, "error_grace": GRACE, **options}
    return WorkerGroup(pool, ClassWithInitArgs(cls, *args), **given)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerGroup]:
    """A group for tests that leave it as it was."""
    with group() as wg:
        yield wg


class TestCalls:
    def test_a_call_returns_what_awaiting_it_would_give(self, shared: WorkerGroup) -> None:
        assert shared.echo(1) == [1, 1]
        assert shared.rank_and_value("x", extra=2) == [(0, "x", 2), (1, "x", 2)]
        assert shared.on_rank_zero("x") == (0, "x")

    def test_views_are_as_those_of_other_groups(self, shared: WorkerGroup) -> None:
        assert shared[1].rank_and_value() == (1, None, None)
        assert shared.rank(-1).rank_and_value() == (1, None, None)
        assert shared[1:].rank_and_value() == [(1, None, None)]
        assert shared[1:][0].rank_and_value() == (1, None, None)
        assert [worker.echo(7) for worker in shared.workers] == [7, 7]
        assert (shared.world_size, shared[0:1].world_size) == (2, 1)
        with pytest.raises(IndexError):
            shared[2]

    def test_a_method_registered_as_not_blocking_gives_a_handle(self, shared: WorkerGroup) -> None:
        handle = shared.triple(2)
        assert isinstance(handle, Handle)
        assert [handle.get(), handle.get(timeout=0)] == [[6, 6]] * 2
        assert handle.done()
        assert not handle.cancel()
        assert shared[0].triple(2).get() == 6

    def test_the_caller_may_choose_for_one_call(self, shared: WorkerGroup) -> None:
        assert shared.triple.options(blocking=True)(2) == [6, 6]
        assert shared.echo.options(blocking=False, timeout=PATIENCE)(2).get() == [2, 2]
        with pytest.raises(TypeError, match="no option 'timeot'"):
            shared.echo.options(timeot=1)

    def test_the_names_of_verl_call_methods_that_are_not_registered(
        self, shared: WorkerGroup
    ) -> None:
        both, first = [(0, 5), (1, 5)], (0, 5)
        assert shared.execute_all("plain", 5).get() == both
        assert shared.execute_all_async("plain", value=5).get() == both
        assert shared.execute_all_sync("plain", 5) == both
        assert shared.execute_rank_zero("plain", 5).get() == first
        assert shared.execute_rank_zero_async("plain", 5).get() == first
        assert shared.execute_rank_zero_sync("plain", value=5) == first
        assert shared[1].execute_all_sync("plain", 5) == (1, 5)
        with pytest.raises(AttributeError, match="no method 'plane'"):
            shared.execute_all_sync("plane")

    def test_a_list_as_long_as_the_group_is_no_other_argument(self, shared: WorkerGroup) -> None:
        """In verl such a list is given out by rank."""
        assert shared.execute_all_sync("plain", [1, 2]) == [(0, [1, 2]), (1, [1, 2])]
        assert shared.execute_all_sync("plain", PerRank([1, 2])) == [(0, 1), (1, 2)]

    def test_functions_run_on_every_rank(self, shared: WorkerGroup) -> None:
        assert shared.run(lambda worker, x: worker.rank + x, 10) == [10, 11]
        assert shared[1].run(lambda worker: worker.rank) == 1

    def test_a_method_given_as_a_function_is_called(self, shared: WorkerGroup) -> None:
        assert shared.call(Later.doubled, 2) == [4, 4]
        assert shared[0].call(Later.doubled, 2) == 4
        assert shared.call(Later.triple, 2).get() == [6, 6]
        with pytest.raises(AttributeError, match="no registered method of Later"):
            shared.call(Raiser.ping)

    def test_proxies_tell_what_they_are(self, shared: WorkerGroup) -> None:
        for surface in (shared, shared[0], shared[0:1]):
            for proxy, doc in ((surface.doubled, "Double it."), (surface.triple, "Triple it.")):
                assert str(inspect.signature(proxy)) == "(value: 'int') -> 'int'"
                assert proxy.__doc__ == doc
            assert {"doubled", "triple", "world_size"} <= set(dir(surface))
        assert "Later.doubled" in repr(shared.doubled)
        assert shared.doubled.__name__ == "doubled"

    def test_errors_of_a_call_are_those_of_other_groups(self, shared: WorkerGroup) -> None:
        with pytest.raises(AttributeError, match="did you mean 'doubled'"):
            shared.doubld(1)
        with pytest.raises(TypeError, match=r"Later.doubled: missing a required argument"):
            shared.doubled()
        with pytest.raises(TypeError, match="can't be pickled"):
            shared.echo(threading.Lock())
        with pytest.raises(DispatchError):
            shared.echo(PerRank([1, 2, 3]))

    def test_what_a_method_raises_comes_with_both_tracebacks(self, shared: WorkerGroup) -> None:
        with pytest.raises(ValueError, match="bad row 7") as caught:
            shared[1].fail("bad row 7")
        told = "".join(traceback.format_exception(caught.value))
        assert 'shared[1].fail("bad row 7")' in told
        assert "raise ValueError(message)" in told  # of the worker
        with pytest.raises(WorkerGroupError) as group_caught:
            shared.fail("both")
        assert len(group_caught.value.exceptions) == 2

    def test_a_handle_raises_each_time(self, shared: WorkerGroup) -> None:
        handle = shared[0].fail_later("again")
        for _ in range(2):
            with pytest.raises(ValueError, match="again"):
                handle.get()

    def test_results_come_by_rank_and_as_they_come(self, shared: WorkerGroup) -> None:
        handle = shared.fail.options(blocking=False)("one", rank=1)
        value, error = handle.results(timeout=PATIENCE)
        assert (value, str(error)) == (0, "one")
        assert sorted(rank for rank, _ in handle.as_completed()) == [0, 1]
        assert dict(shared.triple(1).as_completed()) == {0: 3, 1: 3}

    def test_shared_tensors_are_released(self, shared: WorkerGroup) -> None:
        tensor = shared_empty(100_000)
        handle = shared.note.options(blocking=False)("given", tensor)
        handle.released(timeout=PATIENCE)
        assert handle.done()
        assert handle.get() == ["given", "given"]


class TestWaiting:
    def test_a_wait_that_times_out_leaves_the_call_running(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo]
    ) -> None:
        started, release = fifo(), fifo()
        handle = shared[0].hold_later(started, release, "late")
        with pytest.raises(CallTimeoutError, match="it goes on"):
            handle.get(timeout=0.01)
        assert not handle.done()
        with pytest.raises(CallTimeoutError):
            handle.results(timeout=0)
        release.put()
        assert handle.get(timeout=float("inf")) == "late"
        started.take_here()

    def test_a_deadline_of_the_call_ends_it(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo]
    ) -> None:
        started, release = fifo(), fifo()
        with pytest.raises(CallTimeoutError, match="did not end within"):
            shared[0].hold.options(timeout=0.05)(started, release)
        release.put()
        assert shared[0].echo(1) == 1

    def test_a_cancelled_call_that_has_not_begun_never_does(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo]
    ) -> None:
        started, release = fifo(), fifo()
        busy = shared.hold_later(started, release)
        waiting = shared.note.options(blocking=False)("cancelled")
        assert waiting.cancel()
        assert waiting.cancelled()
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.get()
        shared.check_health(timeout=PATIENCE)  # every rank has been asked before
        release.put(2)
        busy.get()
        assert ["cancelled" in notes for notes in shared.notes()] == [False, False]

    def test_a_handle_among_the_arguments_stands_for_its_value(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo]
    ) -> None:
        started, release = fifo(), fifo()
        with group(Later, 1) as other:
            late = shared[0].hold_later(started, release, 5)
            direct, named = other.triple(late), other.echo.options(blocking=False)(value=late)
            nested = other.total.options(blocking=False)({"a": [1, late]})
            assert not direct.done()
            release.put()
            assert (direct.get(), named.get(), nested.get()) == ([15], [5], [6])
            failing = shared[0].fail_later("of the first")
            with pytest.raises(ValueError, match="of the first"):
                other.triple(failing).get()

    def test_arguments_are_taken_as_they_are_at_the_call(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo]
    ) -> None:
        started, release = fifo(), fifo()
        busy = shared[0].hold_later(started, release)
        rows = [1, 2, 3]
        waiting = shared[0].echo.options(blocking=False)(rows)
        after = shared[0].echo.options(blocking=False)([busy, rows])
        rows.append(4)
        release.put()
        assert waiting.get() == [1, 2, 3]
        assert after.get() == [None, [1, 2, 3]]

    def test_calls_of_many_threads_reach_all_ranks_in_one_order(self) -> None:
        def work(wg: WorkerGroup, number: int) -> None:
            for step in range(50):
                assert wg.note((number, step)) == [(number, step)] * 2

        with group() as wg:
            with concurrent.futures.ThreadPoolExecutor(4) as pool:
                for done in [pool.submit(work, wg, number) for number in range(4)]:
                    done.result()
            first, second = wg.notes()
        assert first == second
        assert len(first) == 200
        for number in range(4):
            assert [step for who, step in first if who == number] == list(range(50))

    async def test_it_works_in_a_thread_whose_loop_runs(self, shared: WorkerGroup) -> None:
        """As in a notebook."""
        assert shared.echo(1) == [1, 1]
        assert shared.triple(1).get() == [3, 3]
        assert asyncio.get_running_loop().is_running()

    async def test_a_call_of_another_loop_is_no_argument(self, shared: WorkerGroup) -> None:
        pool = ResourcePool([1], use_gpu=False)
        async with AsyncWorkerGroup(pool, ClassWithInitArgs(Steps), preload=[]) as other:
            call = other.echo(1)
            with pytest.raises(UsageError, match="belongs to another event loop"):
                shared.echo(call)
            assert await bounded(call) == [1]
            with pytest.raises(UsageError, match="belongs to another event loop"):
                other.echo([shared.triple(1)])


class TestCtrlC:
    @pytest.fixture
    def interrupt_when(self, monkeypatch: pytest.MonkeyPatch) -> Interrupt:
        """Send Ctrl-C when a permit is given and the main thread waits for something that is to come."""
        waits = threading.Event()
        wait = Errand.wait

        def tell(errand: Errand, timeout: float | None = None) -> bool:
            waits.set()
            return wait(errand, timeout)

        def interrupt(permit: Fifo) -> None:
            permit.take_here()
            assert waits.wait(PATIENCE)
            os.kill(os.getpid(), signal.SIGINT)

        def begin(permit: Fifo) -> threading.Thread:
            waits.clear()
            thread = threading.Thread(target=interrupt, args=(permit,))
            thread.start()
            return thread

        monkeypatch.setattr(Errand, "wait", tell)
        return begin

    def test_it_ends_the_wait_and_leaves_the_group_usable(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo], interrupt_when: Interrupt
    ) -> None:
        started, seen = fifo(), fifo()
        thread = interrupt_when(started)
        with pytest.raises(KeyboardInterrupt):
            shared[0].until_cancelled(started, seen)
        seen.take_here()  # the body was told (E-5)
        thread.join()
        assert shared.echo(1) == [1, 1]

    def test_it_drops_a_call_that_no_rank_has_begun(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo], interrupt_when: Interrupt
    ) -> None:
        started, release, go = fifo(), fifo(), fifo()
        busy = shared.hold_later(started, release)
        thread = interrupt_when(go)
        started.take_here()
        started.take_here()
        go.put()
        with pytest.raises(KeyboardInterrupt):
            shared.note("interrupted")
        thread.join()
        shared.check_health(timeout=PATIENCE)  # every rank has been asked before
        release.put(2)
        busy.get()
        assert ["interrupted" in notes for notes in shared.notes()] == [False, False]

    def test_it_cancels_the_call_whose_handle_is_waited_for(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo], interrupt_when: Interrupt
    ) -> None:
        started, seen = fifo(), fifo()
        handle = shared[0].until_cancelled.options(blocking=False)(started, seen)
        thread = interrupt_when(started)
        with pytest.raises(KeyboardInterrupt):
            handle.get()
        seen.take_here()
        thread.join()
        with pytest.raises(concurrent.futures.CancelledError):
            handle.get()

    def test_it_ends_a_start_and_leaves_nothing(
        self, fifo: Callable[[], Fifo], interrupt_when: Interrupt
    ) -> None:
        started = fifo()
        wg = group(Late, 2, "block", 1, started)
        thread = interrupt_when(started)
        with pytest.raises(KeyboardInterrupt):
            wg.start()
        thread.join()
        assert wg.state == "closed"

    def test_a_program_in_a_terminal(self, tmp_path: Path) -> None:
        """The signal goes to the whole foreground group of the terminal."""
        program = """
            started, seen = Fifo.make(folder + "/a"), Fifo.make(folder + "/b")
            with group(Later, 2) as wg:
                print("pids", *wg.pids, flush=True)
                try:
                    print("begins", flush=True)
                    wg.until_cancelled(started, seen)
                except KeyboardInterrupt:
                    print("interrupted", wg.echo(1), flush=True)
        """
        with start_program(program, tmp_path) as running:
            assert running.stdout is not None
            pids = [int(pid) for pid in running.stdout.readline().split()[1:]]
            assert running.stdout.readline() == "begins\n"
            Fifo(tmp_path / "a").take_here()
            os.killpg(running.pid, signal.SIGINT)
            out, error = running.communicate(timeout=100)
        assert (out, error, running.returncode) == ("interrupted [1, 1]\n", "", 0)
        assert alive(pids) == []


def start_program(body: str, folder: Path) -> subprocess.Popen[str]:
    """Start a program that has this module's names, in a process group of its own."""
    program = (
        f"folder = {str(folder)!r}\nimport os, sys\n"
        "from tests.process.test_blocking import *\nfrom tests.process.workers_life import Hooks\n"
        + textwrap.dedent(body)
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip


class TestLife:
    def test_a_group_tells_its_state(self) -> None:
        wg = group(name="mine")
        assert (wg.state, wg.alive, wg.pids, wg.name) == ("new", False, [], "mine")
        with pytest.raises(GroupClosedError, match="has not been started: use 'with'"):
            wg.echo(1)
        with wg as entered:
            assert entered is wg
            assert (wg.state, wg.alive, len(wg.pids)) == ("running", True, 2)
            assert wg.worker_names == ["mine:0", "mine:1"]
            assert repr(wg) == "<blocking WorkerGroup 'mine' of 2 x Later, running>"
            pids = wg.pids
        assert (wg.state, wg.alive) == ("closed", False)
        assert alive(pids) == []
        with pytest.raises(GroupClosedError, match="was shut down"):
            wg.echo(1)
        with pytest.raises(UsageError, match="started before"):
            wg.start()

    def test_start_and_shutdown_are_the_long_form(self) -> None:
        wg = group(Steps, 1).start()
        assert wg.echo(1) == [1]
        wg.shutdown(grace=3)
        wg.shutdown()
        pool = ResourcePool([1], use_gpu=False)
        with WorkerGroup.start(pool, ClassWithInitArgs(Steps), preload=[]) as other:
            assert other.echo(1) == [1]
        assert other.state == "closed"

    def test_a_group_that_was_never_started_can_be_shut_down(self) -> None:
        wg = group()
        wg.shutdown()
        assert wg.state == "closed"

    def test_it_takes_the_arguments_of_the_other_group(self) -> None:
        theirs = inspect.signature(AsyncWorkerGroup)
        assert inspect.signature(WorkerGroup).parameters == theirs.parameters
        with pytest.raises(TypeError, match="did you mean 'output'"):
            group(outputs="inherit")

    def test_every_function_of_the_other_group_is_here(self) -> None:
        theirs = {name for name in dir(AsyncWorkerGroup) if not name.startswith("_")}
        assert theirs - set(dir(WorkerGroup)) == set()

    def test_a_method_may_not_have_the_name_of_a_function_of_the_group(self) -> None:
        class Clash(Worker):
            @register()
            def execute_all_sync(self) -> None: ...

        with pytest.raises(UsageError, match="'execute_all_sync' is a function of every blocking"):
            group(Clash)

    def test_a_failed_start_raises_what_the_ranks_raised(self) -> None:
        wg = group(Late, 2, "raise", 1)
        with pytest.raises(WorkerStartError, match="rank 1") as caught, wg:
            pass
        assert "bad cfg 42" in str(caught.value.exceptions[0])
        assert wg.state == "closed"

    def test_what_close_raises_does_not_hide_another_error(self) -> None:
        from tests.process.workers_life import Clinging

        with (
            pytest.raises(WorkerGroupError, match="close failed"),
            group(Clinging, 1, "close raises"),
        ):
            pass
        with pytest.raises(KeyError) as caught, group(Clinging, 1, "close raises"):
            raise KeyError("first")
        assert "close failed" in caught.value.__notes__[0]

    def test_a_dead_rank_breaks_the_group_and_a_restart_mends_it(self) -> None:
        with group(Mortal) as wg:
            before = wg.pids
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                wg.say_and_die("last words")
            assert wg.state == "broken"
            with pytest.raises(GroupBrokenError):
                wg.ping(1)
            wg.restart()
            assert wg.ping(1) == [1, 1]
            assert not set(before) & set(wg.pids)

    def test_a_call_that_waits_fails_when_another_thread_shuts_down(
        self, fifo: Callable[[], Fifo]
    ) -> None:
        started, release = fifo(), fifo()
        wg = group(Steps, 1).start()

        def shut_down() -> None:
            started.take_here()
            wg.shutdown(grace=0.2)

        thread = threading.Thread(target=shut_down)
        thread.start()
        with pytest.raises(GroupClosedError):
            wg.hold(started, release)
        thread.join()

    def test_the_rest_works_while_a_rank_is_busy(self, fifo: Callable[[], Fifo]) -> None:
        started, release = fifo(), fifo()
        with group(Meshed) as wg:
            wg.ready()
            assert wg.dp_size("dp") == 2
            assert wg.execute_all_sync("value_of") == [0, 0]
            wg.execute_all_sync("keep", 7)
            wg.save()
            wg.restart()
            assert wg.execute_all_sync("value_of") == [7, 7]
            busy = wg[0].hold.options(blocking=False)(started, release)
            started.take_here()
            assert None not in wg.check_health(timeout=PATIENCE)
            assert "in hold" in str(wg.stacks(timeout=PATIENCE))
            release.put()
            busy.get()

    def test_many_groups_share_one_thread(self, shared: WorkerGroup) -> None:
        with group(Steps, 1) as one, group(Steps, 1) as two:
            assert (one.echo(1), two.echo(2)) == ([1], [2])
            assert len(threads()) == 1

    def test_the_thread_ends_with_the_last_group(self, tmp_path: Path) -> None:
        program = """
            for _ in range(2):
                with group(Steps, 1) as wg:
                    with group(Steps, 1):
                        print(len(threads()))
                    print(len(threads()))
                print(len(threads()))
        """
        running = start_program(program, tmp_path)
        assert running.communicate(timeout=100) == ("1\n1\n0\n" * 2, "")

    def test_inline_ranks_work_too(self) -> None:
        with group(AsyncSteps, executor="inline") as wg:
            assert wg.pids == []
            assert wg.echo(1) == [1, 1]
            assert wg.echo_async(1) == [1, 1]
            with pytest.raises(WorkerGroupError):
                wg.fail("x")

    def test_a_group_that_is_dropped_ends_by_itself(self) -> None:
        wg = group(Steps, 1).start()
        pids, view = wg.pids, wg[0]
        assert view.echo(1) == 1
        del wg
        gc.collect()
        assert view.echo(2) == 2  # a view keeps its group
        handle = view.echo.options(blocking=False)(3)
        del view
        gc.collect()
        assert handle.get() == 3  # and so does a handle
        ends = [os.pidfd_open(pid) for pid in pids]
        del handle
        gc.collect()
        for end in ends:
            assert select.select([end], [], [], PATIENCE)[0]
            os.close(end)

    def test_functions_that_the_loop_calls_can_not_make_blocking_calls(self) -> None:
        def dispatch(_group: Any, value: Any) -> Any:
            return ([wg.echo(value)],), {}

        class Looping(Steps):
            @register(dispatch_mode={"dispatch_fn": dispatch, "collect_fn": lambda _g, out: out})
            def looping(self, value: Any) -> Any:
                return value

        with group(Looping, 1) as wg:
            with pytest.raises(UsageError, match="would wait for itself"):
                wg.looping(1)
            assert wg.echo(1) == [1]

    def test_on_death_is_told(self) -> None:
        told: list[Exception] = []
        seen = threading.Event()

        def on_death(error: Exception) -> None:
            told.append(error)
            seen.set()

        with group(Mortal, 1) as wg:
            wg.start_worker_aliveness_check(on_death=on_death)
            with pytest.raises(WorkerDiedError):
                wg.leave(3)
            assert seen.wait(PATIENCE)
        assert isinstance(told[0], WorkerDiedError)


class Meshed(Steps):
    """Has a mesh, and a state that is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0
        self._register_dispatch_collect_info("dp", self.rank, is_collect=True)

    def keep(self, value: int) -> None:
        self.value = value

    def value_of(self) -> int:
        return self.value

    def save_state(self) -> int:
        return self.value

    def load_state(self, state: int) -> None:
        self.value = state


IN_FLIGHT: Final = """
            fifo = Fifo.make(folder + "/f")
            fifo.put(2)
            handle = wg.execute_all("hold", fifo, fifo)
"""


class TestManyRanks:
    def test_whoever_is_free_does_the_work(self, shared: WorkerGroup) -> None:
        assert shared.any.doubled(4) == 8
        assert shared.any.triple(4).get() == 12
        assert list(shared.map("doubled", range(20), ordered=True)) == [2 * n for n in range(20)]
        assert sorted(shared.map(Later.doubled, iter(range(20)), max_inflight=3)) == list(
            range(0, 40, 2)
        )
        assert dict(shared.map("triple", [1, 2], with_items=True)) == {1: 3, 2: 6}
        with pytest.raises(ValueError, match="bad") as caught:
            list(shared.map("fail", ["bad"]))
        assert "item 0 of map(Later.fail): 'bad'" in caught.value.__notes__[-1]
        with pytest.raises(UsageError, match="max_inflight"):
            shared.map("doubled", [], max_inflight=0)

    def test_leaving_a_map_cancels_what_is_on_its_way(
        self, shared: WorkerGroup, fifo: Callable[[], Fifo]
    ) -> None:
        started, seen = fifo(), fifo()

        def items() -> Iterator[tuple[Fifo, Fifo]]:
            yield started, seen
            started.take_here()
            raise KeyError("no more")

        running = shared.map("until_cancelled_with", items(), max_inflight=2)
        with pytest.raises(KeyError):
            next(running)
        seen.take_here()

    def test_generators_are_read_item_by_item(self) -> None:
        with group(Giver) as wg:
            assert sorted(wg.count(2)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
            for rank, item in wg[1].count():
                assert rank == 1
                if item == 2:
                    break
            assert wg[1].notes()[-1] == "closed"
            items = wg[0].count_async()
            assert next(items) == (0, 0)
            assert wg.echo(1) == [1, 1]  # it holds no lane
            items.close()

    def test_a_call_that_would_wait_for_its_own_loop_is_refused(self) -> None:
        with group(Giver, 1) as wg:
            for _ in wg.count():
                with pytest.raises(UsageError, match="Leave the loop first"):
                    wg.echo(1)
                break
            assert wg.echo(1) == [1]

    def test_groups_are_called_as_one(self, shared: WorkerGroup) -> None:
        with group(Later, 1) as other:
            both = WorkerGroup.union(shared, other[0:1])
            assert both.doubled(2) == [4, 4, 4]
            assert both.triple(2).get() == [6, 6, 6]
            assert both.execute_all_sync("plain", 1) == [(0, 1), (1, 1), (0, 1)]
            assert both.run(lambda worker: worker.rank) == [0, 1, 0]
            assert (both.world_size, both[2].doubled(1), both[-3].rank_and_value()[0]) == (3, 2, 0)
            assert str(inspect.signature(both.doubled)) == "(value: 'int') -> 'int'"
            with pytest.raises(UsageError, match="blocking groups"):
                WorkerGroup.union(shared, "other")  # type: ignore[arg-type]

    def test_roles_of_one_process_are_groups(self) -> None:
        both = create_colocated_worker_cls(
            {"actor": ClassWithInitArgs(Later), "critic": ClassWithInitArgs(Steps)}
        )
        with WorkerGroup(ResourcePool([2], use_gpu=False), both, preload=[]) as wg:
            roles = wg.spawn({"actor", "critic"})
            assert roles["actor"].pid() == roles["critic"].pid() == wg.pids
            assert roles["actor"].triple(1).get() == [3, 3]
            wg.fuse({"critic"})
            assert wg.critic[0].doubled(2) == 4
            assert "critic" in dir(wg)

    def test_a_group_of_another_program_is_called(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        with group(Later, 2, attachable=True, name="open") as own:
            with WorkerGroup.attach("open") as wg:
                assert wg.doubled(2) == [4, 4]
                assert wg.pids == own.pids
            assert wg.state == "closed"
            again = WorkerGroup.from_detached("open")
            assert again[1].doubled(2) == 4
            again.detach()
            assert own.doubled(1) == [2, 2]
        with pytest.raises(UsageError, match="nowhere"):
            WorkerGroup.attach("nowhere", timeout=1)


class TestEndOfTheProgram:
    @pytest.mark.parametrize(
        ("ending", "code", "error"),
        [
            ("pass", 0, ""),
            ("sys.exit(3)", 3, ""),
            ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
            (IN_FLIGHT, 0, ""),
        ],
    )  # fmt: skip
    def test_forgetting_to_shut_down_is_silent(
        self, ending: str, code: int, error: str, tmp_path: Path
    ) -> None:
        program = f"""
            wg = group(Later, 2).start()
            print(*wg.pids, flush=True)
            {ending}
        """
        running = start_program(program, tmp_path)
        out, err = running.communicate(timeout=100)
        assert (running.returncode, err.strip().splitlines()[-1:]) == (
            code,
            [error] if error else [],
        )
        assert "asyncwg" not in err
        assert alive(int(pid) for pid in out.split()) == []

    def test_close_runs_in_what_was_forgotten(self, tmp_path: Path) -> None:
        program = """
            wg = group(Hooks, 1, folder).start()
            wg.ping()
        """
        running = start_program(program, tmp_path)
        assert running.communicate(timeout=100) == ("", "")
        assert (tmp_path / "0").read_text().split() == ["init", "setup", "ping", "close"]

    def test_a_fork_can_not_use_the_group_and_can_have_its_own(self, tmp_path: Path) -> None:
        program = """
            wg = group(Steps, 1).start()
            handle = wg.echo.options(blocking=False)(5)
            handle.get()
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                try:
                    wg.echo(1)
                except UsageError as error:
                    print("refused:", str(error)[:23])
                assert handle.get() == [5]
                with group(Steps, 1) as own:
                    print(own.echo(2))
                del wg, handle
                sys.exit(0)
            print(os.waitpid(pid, 0)[1], wg.echo(3), flush=True)
            wg.shutdown()
        """
        running = start_program(program, tmp_path)
        out, err = running.communicate(timeout=100)
        assert (out.splitlines(), err) == (
            ["refused: this process was forked", "[2]", "0 [3]"],
            "",
        )
