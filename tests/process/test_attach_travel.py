"""Groups as arguments: what arrives in a worker, or in another program, is a handle."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from asyncwg import (
    ClassWithInitArgs,
    GroupClosedError,
    ResourcePool,
    UsageError,
    WorkerGroup,
    create_colocated_worker_cls,
)
from tests.leaks import bounded, in_thread
from tests.process.workers_attach import Heavy, Plain, Program, Traveller, detached, own
from tests.process.workers_life import Fifo


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest_asyncio.fixture
async def critic() -> AsyncIterator[WorkerGroup]:
    """A group that others may call."""
    async with own(100, attachable=True, name="critic") as wg:
        yield wg


@pytest_asyncio.fixture
async def actor() -> AsyncIterator[WorkerGroup]:
    """A group that calls it."""
    async with own(name="actor") as wg:
        yield wg


async def test_async_methods_call_another_group(actor: WorkerGroup, critic: WorkerGroup) -> None:
    answers = await bounded(actor.ask(critic, "add", 1))
    # Both ranks call it; the host has ordered the calls.
    assert sorted(answers) == [[101, 101], [102, 102]]
    assert await bounded(actor.ask(critic, "rows", [1, 2])) == [[10, 21]] * 2


async def test_def_methods_call_another_group_in_a_loop_of_their_own(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    for _ in range(2):
        assert await bounded(actor.ask_blocking(critic, "twice", 4)) == [[8, 8]] * 2


async def test_a_def_method_without_a_loop_is_told_so(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    with pytest.raises(UsageError, match="without an event loop"):
        await bounded(actor[0].ask_without_loop(critic))


async def test_a_handle_can_be_kept(actor: WorkerGroup, critic: WorkerGroup) -> None:
    await bounded(actor.keep(critic))
    assert sorted(await bounded(actor.ask_kept(1))) == [[101, 101], [102, 102]]
    await bounded(critic.restart())
    assert sorted(await bounded(actor.ask_kept(1))) == [[101, 101], [102, 102]]


async def test_errors_come_through_both_groups(actor: WorkerGroup, critic: WorkerGroup) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await bounded(actor[0].ask(critic, "fail"))
    assert {type(error) for error in caught.value.exceptions} == {LookupError}


async def test_a_view_travels_as_that_view(actor: WorkerGroup, critic: WorkerGroup) -> None:
    assert await bounded(actor[0].ask(critic[1], "echo", "x")) == "x"
    assert await bounded(actor[0].ask(critic[1:2], "zero", "x")) == (1, "x")


async def test_roles_of_colocated_groups_are_called_and_travel(
    actor: WorkerGroup, runtime: Path
) -> None:
    secret = Traveller(str(runtime / "pids"))
    both = create_colocated_worker_cls(
        {"policy": ClassWithInitArgs(Plain, 10), "value": ClassWithInitArgs(Heavy, secret)}
    )
    pool = ResourcePool([2], use_gpu=False)
    wg = WorkerGroup(pool, both, name="both", preload=[], detached=True)
    async with await bounded(wg.__aenter__()):
        roles = wg.spawn()
        assert await bounded(roles["policy"].add(1)) == [11, 11]
        assert await bounded(roles["value"].weight()) == [7, 7]
        assert roles["policy"].dp_size("pair") == 2
        assert await bounded(roles["policy"].meshed([1, 2])) == [10, 21]
        assert await bounded(actor[0].ask(roles["policy"], "add", 1)) == [12, 12]
        async with await bounded(WorkerGroup.attach("both")) as other:
            other.fuse(["value"])
            assert await bounded(other.value.weight()) == [7, 7]
        await bounded(roles["value"].shutdown())
    assert wg.state == "closed"
    # Their arguments went to the host and its ranks, and not to who attaches.
    assert str(os.getpid()) not in (runtime / "pids").read_text().split()


async def test_a_detached_group_travels_too(actor: WorkerGroup) -> None:
    wg = await bounded(detached("far", 5))
    try:
        assert await bounded(actor[0].ask(wg, "add", 1)) == [6, 6]
    finally:
        await bounded(wg.shutdown())


async def test_a_handle_that_arrived_can_be_passed_on(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    arrived = pickle.loads(pickle.dumps(critic))
    assert (arrived.name, arrived.world_size, arrived.state) == ("critic", 2, "new")
    assert await bounded(actor[0].ask(arrived, "add", 1)) == [101, 101]
    calls = [arrived.add(1) for _ in range(3)]
    assert [(await bounded(call))[0] for call in calls] == [102, 103, 104]
    assert arrived.state == "running"
    assert arrived.pids == critic.pids
    await arrived.detach()


async def test_calls_made_before_it_is_attached_take_arguments_as_they_are(
    critic: WorkerGroup,
) -> None:
    arrived = pickle.loads(pickle.dumps(critic))
    value = [1]
    call = arrived.echo(value)
    value.append(2)
    waiting = arrived.rows(arrived.rows([1, 2]))
    assert await bounded(call) == [[1], [1]]
    assert await bounded(waiting) == [100, 211]
    async with arrived:
        assert arrived.dp_size("pair") == 2


async def test_a_group_that_has_ended_is_told_when_it_is_used() -> None:
    async with own(attachable=True, name="short") as wg:
        arrived = pickle.loads(pickle.dumps(wg))
    with pytest.raises(GroupClosedError, match="has ended"):
        await bounded(arrived.add(1))
    async with own(attachable=True, name="short"):
        with pytest.raises(GroupClosedError, match="another one has its name"):
            await bounded(arrived.add(1))


async def test_a_group_that_nobody_else_may_call_is_not_pickled(actor: WorkerGroup) -> None:
    for refused in (actor, actor[0], actor.add):
        with pytest.raises(UsageError, match="attachable=True"):
            pickle.dumps(refused)
    with pytest.raises(UsageError, match="attachable=True"):
        copy.copy(actor)
    with pytest.raises(UsageError, match=r"argument value.*attachable=True"):
        actor.echo({"group": actor})
    assert await bounded(actor.echo(1)) == [1, 1]


async def test_a_def_method_may_not_wait_for_itself(critic: WorkerGroup) -> None:
    with pytest.raises(UsageError, match="would wait for itself"):
        await bounded(critic[0].ask_blocking(critic, "add", 1))
    with pytest.raises(UsageError, match="would wait for itself"):
        await bounded(critic[0].ask_blocking(critic, "pid"))
    # Another rank's lane is free, and async methods run beside it.
    assert await bounded(critic[0].ask_blocking(critic[1], "echo", 1)) == 1
    assert await bounded(critic.ask_blocking(critic, "twice", 1)) == [[2, 2]] * 2
    assert await bounded(critic.ask(critic, "twice", 1)) == [[2, 2]] * 2
    assert sorted(await bounded(critic.ask(critic, "add", 1))) == [[101, 101], [102, 102]]


async def test_large_values_go_between_groups_through_the_hosts_arena(
    actor: WorkerGroup, critic: WorkerGroup
) -> None:
    value = bytes(range(256)) * 4096
    assert await bounded(actor[0].ask(critic, "echo", value)) == [value, value]


async def test_a_cancelled_method_cancels_the_call_it_makes(
    actor: WorkerGroup, critic: WorkerGroup, fifo: Callable[[], Fifo]
) -> None:
    started = fifo()
    call = actor[0].ask(critic, "wait_async", started)
    await bounded(started.taken(2))
    call.cancel()

    async def heard() -> None:
        while not all("cancelled" in seen for seen in await critic.noted()):
            pass

    await bounded(heard())


async def test_a_pickled_group_reaches_another_program(critic: WorkerGroup, tmp_path: Path) -> None:
    (tmp_path / "group").write_bytes(pickle.dumps(critic[0:2]))
    text = """
import pickle
async def main():
    wg = pickle.loads(open(sys.argv[1], "rb").read())
    say(await wg.add(1))
"""
    with Program(text, str(tmp_path / "group")) as other:
        assert await other.line() == "[101, 101]"
        other.finish()


async def test_a_handle_attaches_in_each_loop_that_uses_it(critic: WorkerGroup) -> None:
    arrived = pickle.loads(pickle.dumps(critic))

    def elsewhere() -> list[int]:
        async def main() -> list[int]:
            return await arrived.twice(2)  # type: ignore[no-any-return]

        return asyncio.run(main())

    assert await bounded(in_thread(elsewhere)) == [4, 4]
    assert await bounded(arrived.twice(3)) == [6, 6]
    assert await bounded(in_thread(elsewhere)) == [4, 4]
    await arrived.detach()
