"""What goes wrong in verl comes out right here, and every mode that splits treats uneven rows alike."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import pytest_asyncio
import torch

import asyncwg
from asyncwg import (
    Call,
    ClassWithInitArgs,
    DataProto,
    DispatchError,
    ResourcePool,
    UsageError,
    Worker,
    WorkerGroup,
    blocking,
    create_colocated_worker_cls,
)
from asyncwg._core import WINDOW_CALLS
from tests.leaks import bounded
from tests.process.workers_from_verl import (
    Actor,
    Collected,
    Critic,
    Facts,
    Outer,
    Place,
    Reference,
    Splitting,
)
from tests.process.workers_life import Fifo
from tests.process.workers_values import Rows, group

MODES: Final = ["proto", "with_func", "metric", "mesh", "pair"]
"""Every mode that splits a batch by rows; ``pair`` is a mode of the user's own."""


@pytest_asyncio.fixture
async def two() -> AsyncIterator[WorkerGroup]:
    async with group(Splitting) as started:
        yield started


@pytest_asyncio.fixture
async def three() -> AsyncIterator[WorkerGroup]:
    async with group(Splitting, 3) as started:
        yield started


def split(wg: WorkerGroup, mode: str, rows: Any, uneven: str) -> Call[Any]:
    """Call the method with this mode."""
    if mode == "with_func":
        of_function: Call[Any] = wg.execute_with_func_generator.options(uneven=uneven)(
            Splitting.seen, rows
        )
        return of_function
    call: Call[Any] = getattr(wg, mode).options(uneven=uneven)(rows)
    return call


def by_rank(mode: str, result: Any, key: str) -> list[Any]:
    """What the ranks said under ``key``; the results of all modes but one are joined key by key."""
    return [told[key] for told in result] if mode == "metric" else result[key]


def values(rows: Any) -> list[Any]:
    if isinstance(rows, DataProto):
        assert rows.batch is not None
        rows = rows.batch["x"]
    listed: list[Any] = rows.tolist()
    return listed


@pytest.mark.parametrize("mode", MODES)
async def test_rows_that_do_not_divide_are_shared_out_as_evenly_as_can_be(
    two: WorkerGroup, mode: str
) -> None:
    """https://github.com/verl-project/verl/issues/473, /issues/606: "only support equal chunk"."""
    for rows, sizes in ((5, [3, 2]), (1, [1, 0]), (0, [0, 0]), (4, [2, 2])):
        batch = torch.arange(rows, dtype=torch.int16)
        result = await bounded(split(two, mode, batch, "allow"))
        assert by_rank(mode, result, "rows") == by_rank(mode, result, "real") == sizes
        doubled = result["doubled"] if mode != "metric" else torch.cat(
            [told["doubled"] for told in result]
        )  # fmt: skip
        assert (values(doubled), doubled.dtype) == (values(batch * 2), torch.int16)


async def test_the_mean_of_all_rows_is_not_the_mean_of_the_shards_means(two: WorkerGroup) -> None:
    """https://github.com/verl-project/verl/pull/1356."""
    for mode in MODES:
        result = await bounded(split(two, mode, torch.arange(5.0), "allow"))
        assert sum(by_rank(mode, result, "sum")) / sum(by_rank(mode, result, "real")) == 2.0


@pytest.mark.parametrize("rows", [5, 1, 0])
async def test_rows_that_do_not_divide_are_refused_where_nothing_else_was_said(
    two: WorkerGroup, rows: int
) -> None:
    for mode in MODES:
        with pytest.raises(DispatchError, match="can't be split evenly over 2 ranks"):
            split(two, mode, torch.arange(rows), "error")


@pytest.mark.parametrize("handed_on", ["as a call", "as a value"])
async def test_the_group_that_splits_counts_its_own_ranks(
    two: WorkerGroup, three: WorkerGroup, handed_on: str
) -> None:
    """It was padded for another group's: https://github.com/verl-project/verl/issues/149."""
    for mode in MODES:
        call = two.double.options(uneven="pad")(torch.arange(4))
        rows: Any = call if handed_on == "as a call" else await bounded(call)
        result = await bounded(split(three, mode, rows, "allow"))
        assert by_rank(mode, result, "rows") == [2, 1, 1]
        padded = await bounded(split(three, mode, rows, "pad"))
        assert (by_rank(mode, padded, "rows"), by_rank(mode, padded, "real")) == (
            [2, 2, 2],
            [2, 2, 0],
        )
        assert sum(by_rank(mode, padded, "sum")) == 12.0
        if mode != "metric":
            assert values(result["doubled"]) == values(padded["doubled"]) == [0, 4, 8, 12]


@pytest.mark.parametrize("asked", ["by the call", "by the batch"])
@pytest.mark.parametrize("mode", MODES)
async def test_padding_is_in_no_result_and_in_no_statistics(
    two: WorkerGroup, mode: str, asked: str
) -> None:
    """https://github.com/verl-project/verl/pull/5969."""
    for x, real in (([1.0, 2.0, 3.0], [2, 1]), ([1.0], [1, 0])):
        batch: Any = torch.tensor(x)
        uneven = "pad"
        if asked == "by the batch":
            batch, uneven = DataProto.from_dict({"x": batch}, auto_padding=True), "error"
        result = await bounded(split(two, mode, batch, uneven))
        assert by_rank(mode, result, "real") == real
        assert sum(by_rank(mode, result, "sum")) == sum(x)
        if mode != "metric":  # its results are each rank's own, and never cut
            assert values(result["doubled"]) == [2 * value for value in x]
        assert values(batch) == x


async def test_padding_takes_no_rank_out_of_a_metric() -> None:
    """In verl two of four ranks' metrics were cut off."""
    async with group(Splitting, 4) as wg:
        data = DataProto.from_dict({"x": torch.arange(10)}, auto_padding=True)
        told = await bounded(wg.metric(data))
        assert [rank["real"] for rank in told] == [3, 3, 3, 1]
        # Not awaited, it is cut like any other: verl's future kept the padding.
        assert values(await bounded(wg.double.options(uneven="allow")(wg.double(data)))) == [
            4 * x for x in range(10)
        ]


@pytest.mark.parametrize("nodes", [[2, 1], [1, 2]])
async def test_nodes_of_different_sizes_give_all_their_ranks(nodes: list[int]) -> None:
    """In verl [2, 1] failed, and [1, 2] had a world size of 3 and two workers."""
    pool = ResourcePool(nodes, use_gpu=False)
    async with WorkerGroup(pool, ClassWithInitArgs(Place), start_timeout=60) as wg:
        places = await bounded(wg.place())
    assert wg.world_size == 3
    expected = [(local, size) for size in nodes for local in range(size)]
    assert places == [(rank, 3, *node) for rank, node in enumerate(expected)]


async def test_the_address_that_a_group_tells_is_that_of_its_ranks() -> None:
    """In verl ``master_addr`` and ``master_port`` were taken and others used."""
    async with group(Place) as wg:
        told = await bounded(wg.variables(["MASTER_ADDR", "MASTER_PORT"]))
        assert told == [[wg.master_address, str(wg.master_port)]] * 2
        assert await bounded(wg.execute_rank_zero("get_master_addr_port")) == tuple(told[0])


@pytest.mark.parametrize("option", ["master_addr", "device_nmae"])
def test_an_option_that_would_be_ignored_is_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"no option {option!r}"):
        group(Place, 1, **{option: "1"})


async def test_each_mesh_of_an_inner_worker_is_copied_as_itself() -> None:
    """The last one was copied, whatever the name."""
    async with group(Outer, 3) as wg:
        assert (wg.dp_size("actor"), wg.dp_size("play")) == (2, 2)
        assert values(await bounded(wg.train(torch.arange(2)))) == [[0, 0], [1, 2]]
        assert values(await bounded(wg.play(torch.arange(2)))) == [[0, 1], [1, 0]]


async def test_a_group_leaves_nothing_in_the_class_that_it_was_made_of() -> None:
    """In verl the first group wrote its options into it, and the next group had them."""
    spec = ClassWithInitArgs(Place)
    before = dict(vars(spec))
    pool = ResourcePool([1], use_gpu=False)
    asked = ["WANDB_FOR_ONE_GROUP", "WG_PREFIX"]
    first = WorkerGroup(pool, spec, name="first", worker_env={"WANDB_FOR_ONE_GROUP": "1"})
    async with first as wg:
        assert await bounded(wg.variables(asked)) == [["1", "first"]]
    assert vars(spec) == before
    async with WorkerGroup(pool, spec, name="second") as wg:
        assert await bounded(wg.variables(asked)) == [[None, "second"]]


@pytest_asyncio.fixture
async def facts() -> AsyncIterator[WorkerGroup]:
    async with group(Facts) as started:
        yield started


async def test_facts_that_are_arrays_are_kept_once_where_they_are_equal(
    facts: WorkerGroup,
) -> None:
    """Comparing them raised "truth value is ambiguous"."""
    meta: dict[str, Any] = {"weights": np.arange(3.0), "scale": torch.ones(2), "lr": 0.1}
    joined = await bounded(facts.data_proto(torch.arange(4), asyncwg.Replicate(meta)))
    assert values(joined) == [0, 1, 2, 3]
    assert np.array_equal(joined.meta_info["weights"], meta["weights"])
    assert torch.equal(joined.meta_info["scale"], torch.ones(2))
    assert joined.meta_info["lr"] == 0.1


async def test_facts_that_differ_are_an_error_that_names_them_and_the_way_out(
    facts: WorkerGroup,
) -> None:
    with pytest.raises(DispatchError, match=r"meta_info\['time'\] is 0\.0 in part 0") as caught:
        await bounded(facts.own_time(torch.arange(4)))
    parts = caught.value.results or []
    joined: Any = DataProto.concat(parts, meta={"time": max})
    assert (values(joined), joined.meta_info) == ([0, 1, 2, 3], {"time": 1.0})


async def test_a_fact_in_a_tensordict_that_differs_by_rank_stays_with_each_ranks_rows(
    facts: WorkerGroup,
) -> None:
    """In verl rank 0 won, without a word."""
    joined = await bounded(facts.tensordict(torch.arange(4), asyncwg.Replicate([1.0, 1.0])))
    assert (joined["x"].tolist(), joined["temperature"]) == ([0, 1, 2, 3], 1.0)
    joined = await bounded(facts.tensordict(torch.arange(4), asyncwg.Replicate([1.0, 2.0])))
    assert list(joined["temperature"]) == [1.0, 1.0, 2.0, 2.0]


async def test_what_is_handed_on_is_what_the_users_collect_function_makes_of_it(
    three: WorkerGroup,
) -> None:
    """The future in verl ignored it and concatenated."""
    async with group(Collected) as wg:
        call = wg.add_rank(torch.arange(3))
        assert values(await bounded(three.double(call))) == [20, 22, 24]


async def test_a_producer_can_wait_until_every_rank_has_room(
    fifo: Callable[[], Fifo],
) -> None:
    """In verl calls pile up in the object store."""
    async with group(Rows) as wg:
        gate = fifo()
        busy = wg.run(lambda _worker, gate: gate.take(), gate)
        waiting = [wg.count() for _ in range(WINDOW_CALLS)]
        ready = asyncio.create_task(wg.ready())
        done, _ = await asyncio.wait({ready}, timeout=0.05)
        assert not done
        gate.put(2)
        await bounded(ready)
        await bounded(asyncio.gather(busy, *waiting))


async def test_a_worker_tells_its_environment_by_the_methods_of_verl() -> None:
    async with group(Place) as wg:
        assert await bounded(wg.execute_all("get_cuda_visible_devices")) == ["", ""]
        names = Worker.env_keys()
        assert await bounded(wg.variables(names)) == [
            [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
              "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": wg.master_address,
              "MASTER_PORT": str(wg.master_port), "CUDA_VISIBLE_DEVICES": ""}[name]
             for name in names]
            for rank in range(2)
        ]  # fmt: skip


async def test_a_group_tells_its_ranks_by_the_names_of_verl() -> None:
    async with group(Place, name="places") as wg:
        assert wg.worker_names == ["places:0", "places:1"]
        assert [await bounded(worker.place()) for worker in wg.workers] == [
            (0, 2, 0, 2),
            (1, 2, 1, 2),
        ]
        assert (wg.resource_pool.store, wg.world_size) == ([2], 2)


PAGE: Final = Path(__file__).parents[2] / "docs" / "from-verl.md"
EXAMPLE: Final = PAGE.parent / "examples" / "ppo_colocated.py"


def compute_advantage(batch: DataProto) -> DataProto:
    """The user's own part of the control loop that the page shows."""
    assert batch.batch is not None
    data = batch.batch
    advantage = data["prompt"] - data["value"] + 0.5 * (data["response"] + data["ref_log_prob"])
    return batch.union(DataProto.from_dict({"advantage": advantage}))


def ported(form: str) -> Any:
    """Return ``main`` of the control loop in the page: verl's, or one that is ported."""
    loops = [code for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
             if "def fit(" in code]  # fmt: skip
    code = loops[["verl", "awaited", "blocking"].index(form)]
    names = {"Actor": Actor, "Critic": Critic, "Reference": Reference}
    namespace: dict[str, Any] = {**names, "compute_advantage": compute_advantage}
    exec(compile(code, f"{PAGE}: {form}", "exec"), namespace)
    return namespace["main"]


def check_history(history: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Two workers on two batches: the critic comes nearer to what is asked, the actor learns of it."""
    assert [actor["metrics"] for actor, _ in history] == [{"actor": [0.5, 1.5]}] * 2
    assert [critic["metrics"]["critic"] for _, critic in history] == [[0.5, 1.5], [0.75, 2.25]]


def prompts() -> list[DataProto]:
    return [DataProto.from_dict({"prompt": torch.tensor([1.0, 1.0, 3.0, 3.0])}) for _ in range(2)]


async def test_the_awaited_control_loop_of_the_page_runs_as_shown() -> None:
    check_history(await bounded(ported("awaited")(prompts()), 60))


def test_the_blocking_control_loop_of_the_page_runs_as_shown() -> None:
    check_history(ported("blocking")(prompts()))


def test_roles_are_groups_without_an_event_loop_too() -> None:
    roles: dict[str, ClassWithInitArgs[Any]] = {
        "actor": ClassWithInitArgs(Actor),
        "name": ClassWithInitArgs(Critic),
    }
    pool = ResourcePool([2], use_gpu=False)
    with blocking.WorkerGroup(pool, create_colocated_worker_cls(roles)) as wg:
        with pytest.raises(UsageError, match="'name' can't be an attribute"):
            wg.fuse()
        with pytest.raises(AttributeError, match="say fuse"):
            wg.actor.generate_sequences(prompts()[0])
        wg.fuse({"actor"})
        actor = wg.spawn()["actor"]
        for group_of_role in (wg.actor, actor):
            assert group_of_role.pids == wg.pids
            answer = group_of_role.generate_sequences(prompts()[0])
            assert answer.batch["response"].tolist() == [0.0] * 4
        actor.shutdown()
        assert (wg.state, wg.actor.state) == ("closed", "closed")


@pytest.mark.skipif(find_spec("gymnasium") is None, reason="needs gymnasium: pip install '.[test]'")
def test_the_ppo_example_trains_and_ends_with_1_where_it_misses_its_goal() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--updates", "2", "--until", "501"],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stderr) == (1, "expected at least 501\n")
    told = r"mean return \d+\.\d over 100 fresh episodes, after \d+ s\n"
    assert re.search(rf"update 2/2 .* KL 0\.\d+ .*\n{told}$", done.stdout), done.stdout
