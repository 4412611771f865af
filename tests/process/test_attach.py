"""Groups that other programs call: the same calls, values and errors as those of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncwg import (
    CallTimeoutError,
    DispatchError,
    GroupClosedError,
    PerRank,
    UsageError,
    WorkerGroup,
    WorkerGroupError,
)
from tests.leaks import PATIENCE, bounded, in_thread
from tests.process.workers_attach import Plain, Program, Traveller, command, detached, own
from tests.process.workers_life import Fifo


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the sockets of this module's groups."""
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("run")
        patch.setenv("XDG_RUNTIME_DIR", str(path))
        yield path


@pytest.fixture(scope="module")
def hosted(runtime: Path) -> Iterator[str]:
    """The name of a group in a process of its own."""

    async def start() -> None:
        wg = await detached("plain")
        await wg.detach()

    asyncio.run(start())
    yield "plain"
    assert command("stop", "plain").returncode == 0


@pytest_asyncio.fixture
async def wg(hosted: str) -> AsyncIterator[WorkerGroup]:
    async with await bounded(WorkerGroup.attach(hosted)) as attached:
        yield attached


def iter_nothing() -> Any:
    return (each for each in "")


def negated(value: int) -> int:
    return -value


CALLS: list[Callable[[Any], Any]] = [
    lambda wg: wg.echo([1, "two"]),
    lambda wg: wg.echo(PerRank(["a", "b"])),
    lambda wg: wg.zero({"x": 1}),
    lambda wg: wg.each(["a", "b"]),
    lambda wg: wg.rows([1, 2, 3, 4]),
    lambda wg: wg.padded([1, 2, 3]),
    lambda wg: wg.apply(negated, [1, 2]),
    lambda wg: wg.metric([1, 2, 3, 4]),
    lambda wg: wg.meshed([1, 2, 3, 4]),
    lambda wg: wg.shout("hey you"),
    lambda wg: wg.first(),
    lambda wg: wg.twice(4),
    lambda wg: wg[1].echo("alone"),
    lambda wg: wg[0:2].rows([5, 6]),
    lambda wg: wg.execute_all("echo", 3),
    lambda wg: wg.execute_rank_zero("echo", 4),
    lambda wg: wg.run(lambda worker, x: (worker.rank, x), 9),
    lambda wg: wg.rows.options(uneven="allow")([1, 2, 3]),
]


async def test_every_way_to_call_gives_what_it_gives_in_a_group_of_ones_own(
    wg: WorkerGroup,
) -> None:
    async with own() as local:
        for call in CALLS:
            assert await bounded(call(wg)) == await bounded(call(local))


async def test_a_handle_shows_what_the_group_is(wg: WorkerGroup) -> None:
    assert wg.state == "running"
    assert wg.alive
    assert wg.pids == await bounded(wg.pid())
    assert (wg.world_size, wg.name, wg.dp_size("pair")) == (2, "plain", 2)
    assert wg.worker_names == ["plain:0", "plain:1"]
    assert wg.master_port
    assert "echo" in dir(wg)
    assert wg.add.__doc__ == Plain.add.__doc__
    assert "idle" in str(await bounded(wg.stacks(PATIENCE)))
    assert None not in await bounded(wg.check_health(timeout=PATIENCE))


async def test_bad_arguments_fail_before_a_rank_has_a_byte(wg: WorkerGroup) -> None:
    with pytest.raises(TypeError, match="unexpected"):
        wg.echo(1, wrong=2)
    with pytest.raises(DispatchError):
        wg.rows([1, 2, 3])
    with pytest.raises(AttributeError, match="did you mean 'echo'"):
        _ = wg.ecko
    with pytest.raises(TypeError, match="can't be pickled"):
        wg.echo(iter_nothing())
    assert await bounded(wg.echo(1)) == [1, 1]


async def test_errors_arrive_with_their_type_rank_and_traceback(wg: WorkerGroup) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.fail())
    errors = caught.value.exceptions
    assert {type(error) for error in errors} == {LookupError}
    assert sorted(getattr(error, "rank", -1) for error in errors) == [0, 1]
    assert any("in fail" in note for error in errors for note in error.__notes__)
    with pytest.raises(LookupError, match="no luck on 1"):
        await bounded(wg[1].fail())
    with pytest.raises(WorkerGroupError, match="1 of 2"):
        await bounded(wg.fail((1,)))
    assert await bounded(wg.echo(1)) == [1, 1]


async def test_the_first_failure_wins_when_others_do_not_answer(
    runtime: Path, fifo: Callable[[], Fifo]
) -> None:
    permit = fifo()
    wg = await detached("grace", error_grace=0.2, on_error="wait")
    try:
        blocked = wg[0].wait_for(None, permit)
        notes = ""
        # A host that is busy with others leaves the stacks out.
        while "in wait_for" not in notes:
            with pytest.raises(WorkerGroupError) as caught:
                await bounded(wg.fail((1,)))
            notes = "\n".join(caught.value.__notes__)
            assert "rank 0 had not answered 0.2 s after" in notes
        permit.put()
        assert await bounded(blocked) == "waited"
        assert await bounded(wg.echo(1)) == [1, 1]
    finally:
        await bounded(wg.shutdown())


async def test_results_come_one_by_one_and_unjoined(wg: WorkerGroup) -> None:
    call = wg.fail((1,))
    found = await bounded(call.results())
    assert found[0] is None
    assert isinstance(found[1], LookupError)
    ranks = [rank async for rank, _ in wg.echo(1).as_completed()]
    assert sorted(ranks) == [0, 1]


async def test_an_unawaited_call_is_an_argument(wg: WorkerGroup) -> None:
    first = wg.rows([1, 2])
    second = wg.rows(first)
    third = wg.echo({"deep": [second]})
    assert await bounded(third) == [{"deep": [[100, 211]]}] * 2


async def test_a_deadline_fails_the_call_and_spares_the_group(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, permit = fifo(), fifo()
    with pytest.raises(CallTimeoutError):
        await bounded(wg.wait_for.options(timeout=0.2)(started, permit))
    permit.put(2)
    assert await bounded(wg.echo(1)) == [1, 1]
    with pytest.raises(CallTimeoutError):
        await bounded(wg.wait_async.options(timeout=0.2)(started))
    assert await bounded(wg.echo(1)) == [1, 1]


async def test_a_cancelled_call_is_dropped_by_all_ranks_or_run_by_all(
    wg: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started, permit = fifo(), fifo()
    running = wg.wait_for(started, permit)
    await bounded(started.taken(2))
    waiting = wg.note("never")
    last = wg.note("kept")
    assert waiting.cancel()
    assert running.cancel()
    await bounded(wg.check_health(timeout=PATIENCE))  # by then the ranks have been asked
    permit.put(2)
    await bounded(last)
    seen = await bounded(wg.noted())
    assert seen[0] == seen[1]
    assert "never" not in seen[0]
    assert "kept" in seen[0]


async def test_a_cancelled_async_method_sees_it(wg: WorkerGroup, fifo: Callable[[], Fifo]) -> None:
    started = fifo()
    call = wg.wait_async(started)
    await bounded(started.taken(2))
    call.cancel()

    async def heard() -> None:
        while not all("cancelled" in seen for seen in await wg.noted()):
            pass

    await bounded(heard())


async def test_a_mesh_that_is_registered_later_is_known_with_the_answer(wg: WorkerGroup) -> None:
    await bounded(wg.late_mesh("swapped"))
    assert wg.dp_size("swapped") == 2


async def test_generators_are_read_item_by_item(wg: WorkerGroup) -> None:
    async def read(stream: Any) -> list[tuple[int, Any]]:
        return [(rank, item) async for rank, item in stream]

    assert sorted(await bounded(read(wg.count(5)))) == [(r, n) for r in (0, 1) for n in range(5)]
    large = await bounded(read(wg[1].count_async(3)))
    assert [(rank, item[0], len(item)) for rank, item in large] == [
        (1, n, 1 << 20) for n in range(3)
    ]
    with pytest.raises(WorkerGroupError, match="1 of 2"):
        await bounded(read(wg.count(1000, 3)))

    async def leave_early() -> None:
        async for _ in wg.count(1_000_000):
            return

    await bounded(leave_early())
    assert (await bounded(wg.noted()))[0].count("closed") == 3


async def test_two_programs_are_given_one_order(wg: WorkerGroup) -> None:
    text = """
async def main():
    async with await WorkerGroup.attach("plain") as wg:
        say("ready")
        await asyncio.gather(*(wg.note((sys.argv[1], i)) for i in range(300)))
"""
    with Program(text, "a") as one, Program(text, "b") as other:
        await bounded(asyncio.gather(*(wg.note(("own", i)) for i in range(300))), 60)
        await asyncio.gather(one.line(), other.line())
        one.finish()
        other.finish()
    first, second = await bounded(wg.noted())
    assert first == second
    for who in ("a", "b", "own"):
        numbers = [each[1] for each in first if each[0] == who]
        assert numbers == list(range(300))


async def test_only_ranks_unpickle_arguments_and_only_callers_results(
    wg: WorkerGroup, tmp_path: Path
) -> None:
    import os

    record = tmp_path / "pids"
    await bounded(wg.echo(Traveller(str(record))))
    pids = {int(line) for line in record.read_text().split()}
    assert pids == {*wg.pids, os.getpid()}


async def test_handles_that_were_let_go_take_no_calls(hosted: str) -> None:
    wg = await bounded(WorkerGroup.attach(hosted))
    await wg.detach()
    assert wg.state == "closed"
    with pytest.raises(GroupClosedError):
        wg.echo(1)
    await wg.detach()


async def test_calls_in_flight_are_given_up_with_the_handle(
    hosted: str, fifo: Callable[[], Fifo]
) -> None:
    permit = fifo()
    started = fifo()
    wg = await bounded(WorkerGroup.attach(hosted))
    call = wg.wait_for(started, permit)
    await bounded(started.taken(2))
    await wg.detach()
    with pytest.raises(GroupClosedError, match="let go"):
        await bounded(call)
    permit.put(2)


async def test_verls_way_to_attach(hosted: str) -> None:
    ways: list[dict[str, Any]] = [{"name_prefix": hosted}, {"worker_names": ["plain:0", "plain:1"]}]
    for given in ways:
        async with await bounded(WorkerGroup.from_detached(**given)) as wg:
            assert await bounded(wg.echo(1)) == [1, 1]
    with pytest.raises(UsageError, match="not all ranks"):
        await bounded(WorkerGroup.from_detached(worker_names=["plain:1"]))
    with pytest.raises(UsageError, match="view"):
        await WorkerGroup.from_detached(hosted, worker_handles=[1])


async def test_a_name_that_nobody_has_is_told(runtime: Path) -> None:
    with pytest.raises(UsageError, match="no group 'nobody'"):
        await bounded(WorkerGroup.attach("nobody"))


async def test_a_handle_belongs_to_its_loop(wg: WorkerGroup) -> None:
    def elsewhere() -> None:
        async def main() -> None:
            wg.echo(1)

        asyncio.run(main())

    with pytest.raises(UsageError, match="loop"):
        await bounded(in_thread(elsewhere))


async def test_a_union_with_another_programs_group_is_refused(wg: WorkerGroup) -> None:
    async with own() as local:
        with pytest.raises(UsageError, match="another program's"):
            WorkerGroup.union(local, wg)
