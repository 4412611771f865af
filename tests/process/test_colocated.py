"""Several roles in one process per rank, each as if it had a group of its own."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncwg import (
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    PerRank,
    UsageError,
    Worker,
    WorkerDiedError,
    WorkerGroup,
    WorkerGroupError,
    WorkerStartError,
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    register,
)
from tests.leaks import bounded
from tests.process.workers_colocated import (
    AsyncRole,
    Careless,
    Hybrid,
    Lived,
    LivedAsync,
    Long,
    Outer,
    Plain,
    Role,
    Saving,
    SavingAsync,
    Short,
    Unlimited,
    colocated,
    group_of,
)
from tests.process.workers_life import Fifo, alive

Roles = dict[str, ClassWithInitArgs[Any]]
TWO_DP = [(0, True), (1, True)]
ONE_DP = [(0, False), (0, True)]
"""Rank 1 speaks for both."""
EXECUTORS = pytest.mark.parametrize("executor", ["process", "inline"])


def two() -> Roles:
    return {"actor": ClassWithInitArgs(Role, 1), "critic": ClassWithInitArgs(Role, value=2)}


@pytest_asyncio.fixture(params=["process", "inline"])
async def wg(request: pytest.FixtureRequest) -> AsyncIterator[WorkerGroup]:
    """The group of an actor and a critic on two ranks, once in processes and once inline."""
    async with colocated(two(), executor=request.param) as started:
        yield started


async def test_all_roles_of_a_rank_share_one_process() -> None:
    async with colocated(two()) as wg:
        actor, critic = wg.spawn({"actor", "critic"}).values()
        expected = [(wg.pids[0], 0, 2), (wg.pids[1], 1, 2)]
        assert await bounded(actor.place()) == expected
        assert await bounded(critic.place()) == expected
        assert actor.pids == critic.pids == wg.pids


async def test_one_class_with_other_arguments_is_another_role(wg: WorkerGroup) -> None:
    roles = wg.spawn({"actor", "critic"})
    assert await bounded(roles["actor"].add(10)) == [11, 11]
    assert await bounded(roles["critic"].get()) == [2, 2]


async def test_a_role_has_the_proxies_of_its_class_and_of_no_other() -> None:
    roles: Roles = {
        "a": ClassWithInitArgs(Short),
        "b": ClassWithInitArgs(Plain, 4),
    }
    wg = colocated(roles)
    a, b = wg.spawn().values()
    assert "b_get" in dir(a)
    assert "doubled" not in dir(a)
    with pytest.raises(AttributeError, match="Short has no registered method 'doubled'"):
        _ = a.doubled
    assert inspect.signature(a.add).parameters.keys() == {"amount"}
    assert a.get.__doc__ == "Return the value."
    assert not hasattr(b, "get")


async def test_a_class_that_is_no_worker_can_be_a_role() -> None:
    async with colocated({"plain": ClassWithInitArgs(Plain, 4), **two()}) as wg:
        assert await bounded(wg.spawn()["plain"].doubled()) == [8, 8]


async def test_names_that_would_run_into_each_other_do_not() -> None:
    """``a`` + ``b_get`` and ``a_b`` + ``get`` were one string (VERL.md, 3.1, 15)."""
    roles: Roles = {
        "a": ClassWithInitArgs(Short, 1),
        "a_b": ClassWithInitArgs(Long, 2),
    }
    async with colocated(roles) as wg:
        a, a_b = wg.spawn(["a", "a_b"]).values()
        assert await bounded(a.b_get()) == ["b_get of a"] * 2
        assert await bounded(a_b.get()) == [2, 2]
        assert await bounded(a.get()) == [1, 1]
        assert not hasattr(a, "b_only_here")
        assert not hasattr(a, "only_here")


async def test_spawn_gives_the_roles_that_are_asked_for(wg: WorkerGroup) -> None:
    assert list(wg.spawn(["critic"])) == ["critic"]
    assert set(wg.spawn()) == {"actor", "critic"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"actor", "ref"}, r"has no role 'ref'; it has \['actor', 'critic'\]"),
        ("actor", "a set or list of"),
    ],
)
async def test_roles_that_are_not_there_are_refused(wrong: Any, told: str) -> None:
    wg = colocated(two())
    with pytest.raises(UsageError, match=told):
        wg.spawn(wrong)
    with pytest.raises(UsageError, match=told):
        wg.fuse(wrong)
    assert not hasattr(wg, "actor")


async def test_a_group_without_roles_has_none_to_spawn() -> None:
    wg = group_of(ClassWithInitArgs(Role))
    with pytest.raises(UsageError, match="has no roles"):
        wg.spawn({"actor"})
    with pytest.raises(UsageError, match="has no roles"):
        colocated(two()).spawn()["actor"].spawn()


async def test_fuse_puts_the_roles_on_the_group(wg: WorkerGroup) -> None:
    with pytest.raises(
        AttributeError, match=r"'actor' is a role of .*: say fuse\(\['actor'\]\) first"
    ):
        _ = wg.actor
    wg.fuse({"actor", "critic"})
    assert await bounded(wg.actor.add(5)) == [6, 6]
    assert await bounded(wg.critic.get()) == [2, 2]
    assert {"actor", "critic"} <= set(dir(wg))


async def test_a_role_that_can_not_be_an_attribute_is_not_fused() -> None:
    roles: Roles = {
        "state": ClassWithInitArgs(Role),
        "re-ward": ClassWithInitArgs(Role),
        **two(),
    }
    wg = colocated(roles)
    for role in ("state", "re-ward"):
        with pytest.raises(UsageError, match=f"role '{role}' can't be an attribute"):
            wg.fuse(["actor", role])
    assert not hasattr(wg, "actor")
    assert set(wg.spawn()) == set(roles)


async def test_a_method_of_the_groups_own_keeps_its_name_from_a_role() -> None:
    class Taken(create_colocated_worker_cls(two()).cls):  # type: ignore[misc]
        @register()
        def actor(self) -> None: ...

    with pytest.raises(UsageError, match="it has one of that name"):
        group_of(ClassWithInitArgs(Taken)).fuse(["actor"])


async def test_roles_find_each_other(wg: WorkerGroup) -> None:
    actor, critic = wg.spawn(["actor", "critic"]).values()
    await bounded(critic.add(40))
    assert await bounded(actor.value_of("critic")) == [42, 42]
    assert await bounded(critic.value_of("actor")) == [1, 1]


async def test_a_role_finds_in_its_init_those_before_it_and_in_setup_all(wg: WorkerGroup) -> None:
    actor, critic = wg.spawn(["actor", "critic"]).values()
    assert await bounded(actor.seen()) == [([], ["actor", "critic"])] * 2
    # Of itself it knows nothing yet.
    assert await bounded(critic.seen()) == [(["actor"], ["actor", "critic"])] * 2


@EXECUTORS
async def test_a_subclass_combines_roles_in_methods_of_its_own(executor: str) -> None:
    async with group_of(ClassWithInitArgs(Hybrid), executor=executor) as wg:
        wg.fuse()
        assert await bounded(wg.both(1)) == [11 + 21] * 2
        assert await bounded(wg.actor.get()) == [11, 11]
        assert await bounded(wg.critic.get()) == [21, 21]


async def test_a_subclass_can_be_local() -> None:
    base: Any = create_colocated_worker_cls(two()).cls

    class Local(base):  # type: ignore[misc]
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def total(self) -> Any:
            return (self.actor.value + self.critic.value) * self.factor

    async with group_of(ClassWithInitArgs(Local, factor=10)) as wg:
        assert await bounded(wg.total()) == [30, 30]


async def test_a_subclass_that_does_not_build_its_roles_is_told_how() -> None:
    with pytest.raises(WorkerStartError) as caught:
        await bounded(group_of(ClassWithInitArgs(Careless)).__aenter__())
    for error in caught.value.exceptions:
        assert "must call super().__init__()" in str(error)


async def test_async_methods_of_a_role_run_beside_def_methods_of_another(
    fifo: Callable[[], Fifo],
) -> None:
    """They could not be called at all (VERL.md, 3.1, 14)."""
    gate = fifo()
    roles: Roles = {
        "actor": ClassWithInitArgs(Role, 1),
        "rollout": ClassWithInitArgs(AsyncRole, 2),
    }
    async with colocated(roles) as wg:
        wg.fuse()
        waiting = wg.actor.wait(gate)
        assert await bounded(wg.rollout.get_async()) == [2, 2]
        assert not waiting.done()
        gate.put(2)
        await bounded(waiting)


@EXECUTORS
async def test_async_methods_know_their_place(executor: str) -> None:
    async def rank(worker: Role) -> tuple[int, int]:
        return worker.rank, worker.world_size

    async with colocated({"rollout": ClassWithInitArgs(AsyncRole)}, executor=executor) as wg:
        assert await bounded(wg.spawn()["rollout"].run(rank)) == [(0, 2), (1, 2)]


async def test_a_limit_of_one_role_is_not_another_roles(fifo: Callable[[], Fifo]) -> None:
    gate = fifo()
    roles: Roles = {
        "one": ClassWithInitArgs(AsyncRole),
        "many": ClassWithInitArgs(Unlimited),
    }
    async with colocated(roles, ranks=1) as wg:
        wg.fuse()
        calls = [role.limited(gate) for role in (wg.one, wg.many) for _ in range(3)]
        assert await bounded(wg.many.crowd()) == [3]
        assert await bounded(wg.one.crowd()) == [1]
        gate.put(6)
        await bounded(asyncio.gather(*calls))
        assert await bounded(wg.one.crowd()) == [1]


async def test_calls_to_all_roles_keep_one_order(wg: WorkerGroup) -> None:
    """O-1: what two roles enter one after the other, they enter so on every rank."""

    def note(role: Role, name: str) -> None:
        vars(role.fused_worker_dict["actor"]).setdefault("log", []).append(name)

    roles = wg.spawn(["actor", "critic"])
    order = ["actor", "critic", "critic", "actor", "critic"] * 4
    await bounded(asyncio.gather(*[roles[name].run(note, name) for name in order]))
    assert await bounded(roles["actor"].run(lambda role: role.log)) == [order] * 2


async def test_each_role_splits_over_meshes_of_its_own(wg: WorkerGroup) -> None:
    actor, critic = wg.spawn(["actor", "critic"]).values()
    await bounded(actor.join("mesh", TWO_DP))
    with pytest.raises(
        DispatchError, match=r"^critic\.Role\.tag_over_mesh: no rank has registered"
    ):
        critic.tag_over_mesh([1, 2])
    await bounded(critic.join("mesh", ONE_DP))
    assert (actor.dp_size("mesh"), critic.dp_size("mesh")) == (2, 1)
    assert await bounded(actor.tag_over_mesh([1, 2])) == [(1, 0, 1), (2, 1, 1)]
    assert await bounded(critic.tag_over_mesh([1, 2])) == [(1, 1, 2), (2, 1, 2)]
    with pytest.raises(DispatchError, match="not registered"):
        wg.dp_size("mesh")


async def test_a_role_can_register_a_mesh_of_another(wg: WorkerGroup) -> None:
    actor, critic = wg.spawn(["actor", "critic"]).values()
    await bounded(actor.join_for("critic", "mesh", ONE_DP))
    assert critic.dp_size("mesh") == 1


async def test_a_role_and_its_views_refuse_what_would_lose_rows(wg: WorkerGroup) -> None:
    actor = wg.spawn()["actor"]
    await bounded(actor.join("mesh", TWO_DP))
    with pytest.raises(DispatchError, match="its rows would be lost"):
        actor[:1].tag_over_mesh([1, 2])


@EXECUTORS
async def test_the_group_takes_over_a_mesh_of_a_role_under_another_name(executor: str) -> None:
    async with group_of(ClassWithInitArgs(Hybrid), executor=executor) as wg:
        wg.fuse()
        await bounded(wg.actor.join("mesh", TWO_DP))
        await bounded(wg.actor.join("other", ONE_DP))
        await bounded(wg.take_over("whole", "other"))
        assert await bounded(wg.tag_all([1, 2])) == [(1, 1), (2, 1)]


async def test_a_worker_inside_a_worker_gives_it_its_meshes_under_new_names() -> None:
    """The last of several won, whatever was asked for (VERL.md, 3.1, 8)."""
    async with group_of(ClassWithInitArgs(Outer, TWO_DP, ONE_DP)) as wg:
        assert await bounded(wg.tag([1, 2])) == [(1, 0, "inner"), (2, 1, "inner")]
        assert await bounded(wg.tag_other([1, 2])) == [(1, 1, "inner"), (2, 1, "inner")]


async def test_a_role_has_views_and_the_general_calls(wg: WorkerGroup) -> None:
    critic = wg.spawn()["critic"]
    assert await bounded(critic[1].get()) == 2
    assert await bounded(critic.rank(0).add(1)) == 3
    assert await bounded(critic[1:].get()) == [2]
    assert await bounded(critic.workers[0].get()) == 3
    assert await bounded(critic.tag([1, 2])) == [(1, 0, 3), (2, 1, 2)]
    assert await bounded(critic.execute_all("unregistered", "x")) == [("x", 3), ("x", 2)]
    assert await bounded(critic.execute_rank_zero("unregistered", word="y")) == ("y", 3)
    assert await bounded(critic.execute_all("add", PerRank([1, 2]))) == [4, 4]
    assert await bounded(critic.run(lambda role, more: role.value + more, 1)) == [5, 5]
    assert await bounded(critic.call(Role.add, 1)) == [5, 5]
    await bounded(critic.ready())


async def test_a_role_tells_its_name_and_the_state_of_its_processes() -> None:
    wg = colocated(two(), name="both")
    critic = wg.spawn()["critic"]
    assert (critic.name, critic.state, critic.world_size) == ("both.critic", "new", 2)
    async with wg:
        assert critic.state == "running"
        assert critic.alive
        assert critic.worker_names == ["both:0", "both:1"]
        assert critic.resource_pool is wg.resource_pool
        assert critic.master_port == wg.master_port
        assert repr(critic) == "<WorkerGroup 'both.critic' of 2 x Role, running>"
        assert "role 'critic' of group 'both'" in repr(critic[0])
        assert len(await bounded(critic.check_health())) == 2
    assert critic.state == "closed"


async def test_a_call_of_one_role_is_an_argument_for_another(wg: WorkerGroup) -> None:
    actor, critic = wg.spawn(["actor", "critic"]).values()
    assert await bounded(critic.tag(actor.tag([7, 8]))) == [((7, 0, 1), 0, 2), ((8, 1, 1), 1, 2)]


@EXECUTORS
async def test_generator_methods_of_a_role_are_read_item_by_item(executor: str) -> None:
    class Counting(Role):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def upwards(self, stop: int) -> Iterator[int]:
            yield from range(self.value, stop)

    roles: Roles = {"one": ClassWithInitArgs(Role), "counting": ClassWithInitArgs(Counting, 4)}
    async with colocated(roles, ranks=1, executor=executor) as wg:

        async def read() -> list[tuple[int, int]]:
            return [pair async for pair in wg.spawn()["counting"].upwards(7)]

        assert await bounded(read()) == [(0, 4), (0, 5), (0, 6)]


async def test_any_rank_of_a_role_takes_a_call(wg: WorkerGroup) -> None:
    critic = wg.spawn()["critic"]
    assert await bounded(critic.any.get()) == 2
    assert not hasattr(critic.any, "nonesuch")

    async def mapped() -> list[int]:
        return [value async for value in critic.map(Role.add, [0, 0, 0])]

    assert await bounded(mapped()) == [2, 2, 2]


async def test_roles_of_different_groups_are_called_as_one() -> None:
    others: Roles = {
        "plain": ClassWithInitArgs(Plain, 0),
        "extra": ClassWithInitArgs(Role, 5),
        "rollout": ClassWithInitArgs(Role, 7),
    }
    async with colocated(two()) as train, colocated(others, ranks=1) as infer:
        both = WorkerGroup.union(train.spawn()["critic"], infer.spawn()["rollout"])
        assert await bounded(both.get()) == [2, 2, 7]
        assert await bounded(both.run(lambda role, more: role.value + more, 1)) == [3, 3, 8]
        assert await bounded(both.execute_all("unregistered", "x")) == [
            ("x", 2),
            ("x", 2),
            ("x", 7),
        ]
        assert await bounded(both.tag([1, 2, 3])) == [(1, 0, 2), (2, 1, 2), (3, 0, 7)]


async def test_roles_of_one_process_are_no_union() -> None:
    roles = colocated(two()).spawn()
    with pytest.raises(UsageError, match="is in the union twice"):
        WorkerGroup.union(roles["actor"], roles["critic"])


async def test_a_death_in_one_role_breaks_all_for_they_share_the_process() -> None:
    async with colocated(two(), ranks=1) as wg:
        actor, critic = wg.spawn(["actor", "critic"]).values()
        with pytest.raises(WorkerDiedError, match=r"actor\.run\(_exit\)"):
            await bounded(actor.run(_exit))
        assert critic.state == "broken"
        with pytest.raises(GroupBrokenError):
            critic.get()
        await bounded(critic.restart())
        assert await bounded(actor.get()) == [1]


def _exit(_role: Role) -> None:
    os._exit(3)


async def test_an_error_tells_the_role(wg: WorkerGroup) -> None:
    critic = wg.spawn()["critic"]
    with pytest.raises(WorkerGroupError, match=r"critic\.Role\.fail") as caught:
        await bounded(critic.fail())
    assert [str(error) for error in caught.value.exceptions] == ["value is 2"] * 2
    with pytest.raises(ValueError, match="value is 2") as one:
        await bounded(critic[1].fail())
    assert "critic.Role.fail, rank 1" in one.value.__notes__[-1]
    with pytest.raises(TypeError, match=r"^critic\.Role\.add: missing a required argument"):
        critic.add()
    with pytest.raises(TypeError, match=r"^critic\.Role\.add: argument amount"):
        critic.add(threading.Lock())
    with pytest.raises(DispatchError, match=r"^critic\.Role\.tag: 3 rows"):
        critic.tag([1, 2, 3])
    with pytest.raises(AttributeError, match="Role has no method 'unregistred'; did you mean"):
        critic.execute_all("unregistred")


def lived(path: Path, **fails: str) -> Roles:
    return {
        "a": ClassWithInitArgs(Lived, "a", str(path / "log"), fails.get("a", "")),
        "b": ClassWithInitArgs(LivedAsync, "b", str(path / "log"), fails.get("b", "")),
    }


@EXECUTORS
async def test_roles_are_set_up_in_order_and_closed_backwards(
    tmp_path: Path, executor: str
) -> None:
    async with colocated(lived(tmp_path), executor=executor):
        pass
    lines = ["init a", "init b", "setup a", "setup b", "close b", "close a"]
    for rank in range(2):
        assert (tmp_path / f"log-{rank}").read_text().splitlines() == lines


@EXECUTORS
async def test_a_role_that_fails_to_close_does_not_keep_the_others_from_it(
    tmp_path: Path, executor: str
) -> None:
    wg = colocated(lived(tmp_path, b="close"), ranks=1, executor=executor)
    await bounded(wg.__aenter__())
    with pytest.raises(WorkerGroupError, match="close failed") as caught:
        await bounded(wg.shutdown())
    (error,) = caught.value.exceptions
    assert str(error) == "close of b"
    assert "in close() of role 'b'" in error.__notes__
    assert (tmp_path / "log-0").read_text().endswith("close b\nclose a\n")


async def test_errors_of_several_roles_at_the_end_come_together(tmp_path: Path) -> None:
    wg = colocated(lived(tmp_path, a="close", b="close"), ranks=1)
    await bounded(wg.__aenter__())
    with pytest.raises(WorkerGroupError) as caught:
        await bounded(wg.shutdown())
    (together,) = caught.value.exceptions
    assert isinstance(together, ExceptionGroup)
    assert [str(error) for error in together.exceptions] == ["close of b", "close of a"]


@EXECUTORS
@pytest.mark.parametrize("step", ["init", "setup"])
async def test_a_role_that_fails_to_start_is_named(
    tmp_path: Path, step: str, executor: str
) -> None:
    with pytest.raises(WorkerStartError) as caught:
        await bounded(colocated(lived(tmp_path, b=step), executor=executor).__aenter__())
    where = {"init": "__init__", "setup": "setup()"}[step]
    for error in caught.value.exceptions:
        assert str(error) == f"{step} of b"
        assert f"in {where} of role 'b'" in "\n".join(error.__notes__)


@EXECUTORS
async def test_the_state_of_each_role_comes_back(executor: str) -> None:
    roles: Roles = {
        "plain": ClassWithInitArgs(Role, 1),
        "saving": ClassWithInitArgs(Saving, 2),
        "async_saving": ClassWithInitArgs(SavingAsync, 3),
    }
    async with colocated(roles, executor=executor) as wg:
        wg.fuse()
        for role in (wg.plain, wg.saving, wg.async_saving):
            await bounded(role[1].add(10))
        await bounded(wg.saving.save())
        await bounded(wg.saving.add(100))
        await bounded(wg.restart())
        assert await bounded(wg.plain.get()) == [1, 1]
        assert await bounded(wg.saving.get()) == [2, 12]
        assert await bounded(wg.async_saving.get()) == [3, 13]


async def test_a_subclass_may_save_state_of_its_own_beside_its_roles() -> None:
    class Counting(create_colocated_worker_cls({"saving": ClassWithInitArgs(Saving, 2)}).cls):  # type: ignore[misc]
        count = 0

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def count_up(self) -> int:
            self.count += 1
            return self.count

        def save_state(self) -> int:
            return self.count

        def load_state(self, state: int) -> None:
            self.count = state

    async with group_of(ClassWithInitArgs(Counting), ranks=1) as wg:
        await bounded(wg.count_up())
        await bounded(wg.spawn()["saving"].add(1))
        await bounded(wg.save())
        await bounded(wg.restart())
        assert await bounded(wg.count_up()) == [2]
        assert await bounded(wg.spawn()["saving"].get()) == [3]


async def test_roles_without_a_state_say_so(wg: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="has no method 'save_state'"):
        await bounded(wg.save())


async def test_what_the_group_is_built_from_is_not_changed() -> None:
    """Options of one group leaked into the next (VERL.md, 3.1, 11)."""
    roles = two()
    before = {role: dict(vars(what)) for role, what in roles.items()}
    built = create_colocated_worker_cls(roles)
    roles["actor"].args = (99,)  # too late to matter
    async with group_of(built) as one, group_of(built) as other:
        await bounded(one.spawn()["actor"].add(5))
        assert await bounded(other.spawn()["actor"].get()) == [1, 1]
    roles["actor"].args = (1,)
    assert {role: dict(vars(what)) for role, what in roles.items()} == before
    assert (built.args, built.kwargs, built.fused_worker_used) == ((), {}, True)


async def test_an_inline_role_shares_no_argument_with_another_rank() -> None:
    given = [0]
    roles: Roles = {"actor": ClassWithInitArgs(Role, given)}
    async with colocated(roles, executor="inline") as wg:
        actor = wg.spawn()["actor"]
        await bounded(actor[0].add([1]))
        assert await bounded(actor.get()) == [[0, 1], [0]]
    assert given == [0]


async def test_arguments_that_can_not_be_sent_are_named_with_their_role() -> None:
    roles: Roles = {
        **two(),
        "ref": ClassWithInitArgs(Role, value={"lock": threading.Lock()}),
    }
    with pytest.raises(
        UsageError,
        match=r"the keyword arguments of role 'ref'\['value'\]\['lock'\].*can't be pickled",
    ):
        await bounded(colocated(roles).__aenter__())


async def test_a_role_keeps_the_processes_of_a_group_that_its_user_has_dropped() -> None:
    wg = colocated(two())
    await bounded(wg.__aenter__())
    actor = wg.spawn()["actor"]
    pids = wg.pids
    del wg
    gc.collect()
    assert await bounded(actor.get()) == [1, 1]
    assert alive(pids) == pids
    await bounded(actor.shutdown())
    assert alive(pids) == []


async def test_a_group_with_fused_roles_is_no_circle() -> None:
    """It would live until Python looks for circles, and with it its processes."""
    wg = colocated(two(), executor="inline")
    await bounded(wg.__aenter__())
    wg.fuse()
    await bounded(wg.actor.get())
    gone = weakref.ref(wg)
    gc.disable()
    try:
        del wg
        assert gone() is None
    finally:
        gc.enable()


async def test_shutting_down_a_role_shuts_down_all_for_they_share_the_processes() -> None:
    async with colocated(two()) as wg:
        actor, critic = wg.spawn(["actor", "critic"]).values()
        pids = wg.pids
        await bounded(actor.shutdown())
        assert alive(pids) == []
        assert critic.state == wg.state == "closed"
        with pytest.raises(GroupClosedError):
            critic.get()
        await bounded(critic.shutdown())


async def test_a_group_can_be_started_by_a_role_and_then_lives_as_long_as_any() -> None:
    actor = colocated(two(), executor="inline").spawn()["actor"]
    async with actor:
        gc.collect()
        assert await bounded(actor.get()) == [1, 1]


async def test_a_dispatch_function_gets_the_group_of_its_role() -> None:
    seen: list[Any] = []

    def give_out(group: Any, value: Any) -> Any:
        seen.append((repr(group), group.world_size))
        return ([value] * group.world_size,), {}

    class Custom(Worker):
        @register(
            dispatch_mode={"dispatch_fn": give_out, "collect_fn": lambda _group, out: sum(out)}
        )
        def total(self, value: int) -> int:
            return value + self.rank

    roles: Roles = {"custom": ClassWithInitArgs(Custom), **two()}
    async with colocated(roles, executor="inline", name="all") as wg:
        custom = wg.spawn()["custom"]
        assert await bounded(custom.total(10)) == 21
        assert await bounded(custom[:1].total(10)) == 10
    assert seen == [
        ("<WorkerGroup 'all.custom' of 2 x Custom, running>", 2),
        ("<ranks [0] of role 'custom' of group 'all', running>", 1),
    ]


async def test_verls_keyword_and_names_are_taken() -> None:
    for create in (create_colocated_worker_cls, create_colocated_worker_cls_fused):
        built = create(class_dict=two())
        assert built.fused_worker_used
        assert set(group_of(built).spawn(prefix_set={"actor"})) == {"actor"}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, "given as a dict"),
        ([ClassWithInitArgs(Role)], "given as a dict"),
        ({"actor": Role}, r"role 'actor' is a type: write ClassWithInitArgs\(Class, ...\)"),
        ({"": ClassWithInitArgs(Role)}, "a role's name is a text"),
        ({1: ClassWithInitArgs(Role)}, "a role's name is a text, not 1"),
        ({"rank": ClassWithInitArgs(Role)}, "'rank' has a name that every worker has already"),
        ({"setup": ClassWithInitArgs(Role)}, "'setup' has a name that every worker has already"),
        ({"x": create_colocated_worker_cls(two())}, "role 'x' is a colocated class itself"),
    ],
    ids=["empty", "list", "class", "no-name", "number", "attribute", "hook", "nested"],
)
def test_what_can_not_be_colocated_is_refused(wrong: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        create_colocated_worker_cls(wrong)


def test_a_role_with_a_method_that_has_a_name_of_the_groups_is_refused() -> None:
    class Stateful(Worker):
        @register()
        def state(self) -> None: ...

    with pytest.raises(
        UsageError, match=r"^s\.Stateful\.state has a name that WorkerGroup\.state has"
    ):
        colocated({"s": ClassWithInitArgs(Stateful)})
