"""Every row of the dispatch table over real workers, and that bad arguments reach nobody."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from tensordict import TensorDict

from asyncwg import (
    DataProto,
    DispatchError,
    PerRank,
    Replicate,
    Shard,
    WorkerGroup,
    WorkerGroupError,
)
from tests.leaks import bounded, in_thread
from tests.process.workers_values import Custom, Mesh, Rows, group


@pytest_asyncio.fixture
async def wg() -> AsyncIterator[WorkerGroup]:
    async with group(Rows) as started:
        yield started


@pytest_asyncio.fixture
async def three() -> AsyncIterator[WorkerGroup]:
    """A group of three ranks."""
    async with group(Rows, 3) as started:
        yield started


def listed(tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = tensor.tolist()
    return values


async def test_one_to_all_gives_every_rank_the_same_and_a_list_by_rank(three: WorkerGroup) -> None:
    results = await bounded(three.one_to_all([1, 2, 3], key=5))
    assert results == [(rank, ([1, 2, 3],), {"key": 5}) for rank in range(3)]


async def test_all_to_all_gives_every_rank_what_was_passed_and_each_its_own_of_per_rank(
    three: WorkerGroup,
) -> None:
    """A list of the length of the group is scattered in verl (VERL.md, 3.1, 2)."""
    results = await bounded(three.all_to_all([1, 2, 3], PerRank("abc"), key=PerRank([7, 8, 9])))
    assert results == [
        (rank, ([1, 2, 3], letter), {"key": 7 + rank}) for rank, letter in enumerate("abc")
    ]


async def test_rank_zero_runs_on_rank_zero_alone_and_gives_its_value(wg: WorkerGroup) -> None:
    assert await bounded(wg.rank_zero([1, 2], key=3)) == (0, ([1, 2],), {"key": 3})
    assert await bounded(wg.count()) == [1, 0]


async def test_dp_compute_gives_item_i_to_rank_i(three: WorkerGroup) -> None:
    results = await bounded(three.dp_compute([1, 2, 3], ("a", "b", "c"), key=[[], None, {}]))
    assert results == [(0, (1, "a"), {"key": []}), (1, (2, "b"), {"key": None}),
                       (2, (3, "c"), {"key": {}})]  # fmt: skip


@dataclass
class Batch:
    """A dataclass that is a batch because it holds a tensor."""

    x: torch.Tensor
    names: list[str]
    step: int


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).reshape(6, 1),
        lambda: np.arange(6),
    ],
    ids=["tensor", "array"],
)
async def test_dp_compute_proto_splits_a_batch_and_joins_the_results(
    three: WorkerGroup, make: Callable[[], Any]
) -> None:
    batch = make()
    result = await bounded(three.double(batch))
    assert type(result) is type(batch)
    assert bool((result == batch * 2).all())
    assert await bounded(three.real_rows(batch)) == [(2, 2)] * 3


async def test_every_type_of_batch_is_split_and_joined(wg: WorkerGroup) -> None:
    x, names = torch.arange(4), np.array(list("abcd"), dtype=object)
    data = DataProto.from_dict({"x": x}, {"name": names}, {"step": 3})
    back = await bounded(wg.echo(data))
    assert (listed(back.batch["x"]), list(back.non_tensor_batch["name"])) == (
        listed(x), list(names),
    )  # fmt: skip
    assert back.meta_info == {"step": 3}
    back = await bounded(wg.echo(TensorDict({"x": x}, [4])))
    assert listed(back["x"]) == listed(x)
    assert await bounded(wg.echo([1, "a", None, 2.5])) == [1, "a", None, 2.5]
    back = await bounded(wg.echo({"x": x, "names": [1, 2, 3, 4], "lr": 0.1}))
    assert (listed(back["x"]), back["names"], back["lr"]) == ([0, 1, 2, 3], [1, 2, 3, 4], [0.1] * 2)
    back = await bounded(wg.echo(Batch(x, list("abcd"), 7)))
    assert (listed(back.x), back.names, back.step) == ([0, 1, 2, 3], list("abcd"), [7, 7])


async def test_a_sparse_batch_is_split_by_its_rows(wg: WorkerGroup) -> None:
    """https://github.com/pytorch/pytorch/issues/20248."""
    sparse = torch.eye(4).to_sparse()
    assert await bounded(wg.real_rows(sparse)) == [(2, 2)] * 2
    assert torch.equal((await bounded(wg.echo(sparse))).to_dense(), torch.eye(4))


async def test_each_rank_gets_its_own_rows_in_order(three: WorkerGroup) -> None:
    result = await bounded(three.tag(torch.arange(6)))
    assert listed(result) == [[0, 0], [1, 0], [2, 1], [3, 1], [4, 2], [5, 2]]


async def test_what_is_no_batch_is_replicated_beside_one(wg: WorkerGroup) -> None:
    results = await bounded(wg.metric(torch.arange(2), 5, "text", (1, 2), key={"lr": 0.1}))
    assert [(args[1:], kwargs) for _, args, kwargs in results] == [
        ((5, "text", (1, 2)), {"key": {"lr": 0.1}})
    ] * 2


async def test_a_batch_that_is_a_keyword_is_split(wg: WorkerGroup) -> None:
    """In verl a call with keywords alone raised an IndexError (VERL.md, 3.1, 12)."""
    assert listed(await bounded(wg.double(batch=torch.arange(4)))) == [0, 2, 4, 6]


async def test_a_metric_gives_a_list_by_rank(wg: WorkerGroup) -> None:
    assert await bounded(wg.statistics(torch.tensor([1.0, 2.0, 3.0, 4.0]))) == [(2, 3.0), (2, 7.0)]


async def test_results_that_are_all_none_give_none(wg: WorkerGroup) -> None:
    assert await bounded(wg.nothing(torch.arange(4))) is None


async def test_a_dict_of_results_is_joined_key_by_key(wg: WorkerGroup) -> None:
    result = await bounded(wg.as_dict(torch.arange(4)))
    assert listed(result["x"]) == [0, 1, 2, 3]
    assert result["sum"] == [1.0, 5.0]


async def test_results_that_do_not_join_are_kept_in_the_error(wg: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match="DP_COMPUTE_METRIC") as caught:
        await bounded(wg.scalar(torch.arange(4)))
    assert caught.value.results == [1.0, 5.0]
    assert await bounded(wg.count()) == [1, 1]


async def test_with_func_takes_the_function_to_every_rank_with_its_shard(wg: WorkerGroup) -> None:
    def tagged(worker: Rows, batch: torch.Tensor, *, factor: int) -> torch.Tensor:
        return batch * factor + worker.rank

    result = await bounded(wg.execute_with_func_generator(tagged, torch.arange(4), factor=10))
    assert listed(result) == [0, 10, 21, 31]


async def test_with_func_takes_any_callable(wg: WorkerGroup) -> None:
    offset = 3
    result = await bounded(
        wg.execute_with_func_generator(lambda _worker, batch: batch + offset, torch.arange(4))
    )
    assert listed(result) == [3, 4, 5, 6]


async def test_a_function_for_rank_zero_does_not_get_the_worker(wg: WorkerGroup) -> None:
    assert await bounded(wg.execute_func_rank_zero(lambda x: x + 1, 4)) == 5


@pytest.mark.parametrize("rows", [5, 1, 0])
async def test_uneven_rows_are_refused_unless_they_are_allowed(wg: WorkerGroup, rows: int) -> None:
    """https://github.com/verl-project/verl/issues/473."""
    batch = torch.arange(rows, dtype=torch.int16)
    with pytest.raises(DispatchError, match="uneven="):
        wg.double(batch)
    result = await bounded(wg.double.options(uneven="allow")(batch))
    assert listed(result) == listed(batch * 2)
    assert result.dtype is torch.int16


@pytest.mark.parametrize(("rows", "sizes"), [(5, [3, 2]), (1, [1, 0]), (0, [0, 0]), (4, [2, 2])])
async def test_allowed_shards_differ_by_one_row_at_most(
    wg: WorkerGroup, rows: int, sizes: Sequence[int]
) -> None:
    """torch.chunk gives fewer pieces: https://github.com/verl-project/verl/issues/606."""
    call = wg.real_rows.options(uneven="allow")(torch.arange(rows))
    assert await bounded(call) == [(size, size) for size in sizes]


async def test_the_mean_of_all_rows_can_be_had_from_uneven_shards(wg: WorkerGroup) -> None:
    """The mean of the shards' means is another one: https://github.com/verl-project/verl/pull/1356."""
    found = await bounded(wg.statistics.options(uneven="allow")(torch.arange(5.0)))
    assert sum(total for _, total in found) / sum(count for count, _ in found) == 2.0


@pytest.mark.parametrize("rows", [5, 1, 0])
async def test_padding_is_cut_from_the_result(wg: WorkerGroup, rows: int) -> None:
    """https://github.com/verl-project/verl/pull/5969: padding entered the metrics."""
    batch = torch.arange(rows)
    result = await bounded(wg.double.options(uneven="pad")(batch))
    assert listed(result) == listed(batch * 2)
    assert listed(batch) == list(range(rows))


async def test_padding_is_cut_from_a_result_with_several_rows_for_each(wg: WorkerGroup) -> None:
    result = await bounded(wg.twice_the_rows.options(uneven="pad")(torch.arange(3)))
    assert listed(result) == [0, 1, 0, 1, 2, 2]


async def test_a_result_whose_padding_can_not_be_told_is_refused(wg: WorkerGroup) -> None:
    with pytest.raises(DispatchError, match="which of them are padding") as caught:
        await bounded(wg.odd_rows.options(uneven="pad")(torch.arange(3)))
    assert len(caught.value.results or ()) == 2


async def test_a_method_can_leave_padding_out_of_its_statistics(wg: WorkerGroup) -> None:
    """https://github.com/verl-project/verl/pull/5969."""
    statistics = wg.statistics.options(uneven="pad")
    assert await bounded(statistics(torch.tensor([1.0, 2.0, 3.0]))) == [(2, 3.0), (1, 3.0)]
    assert await bounded(statistics(torch.tensor([1.0]))) == [(1, 1.0), (0, 0.0)]


@pytest.mark.parametrize("uneven", ["allow", "pad"])
async def test_a_method_knows_its_share_of_all_rows(wg: WorkerGroup, uneven: str) -> None:
    """Means of uneven shards are not the mean: https://github.com/verl-project/verl/issues/473."""
    share_of_mean = wg.share_of_mean.options(uneven=uneven)
    for rows in (5, 1):
        shares = await bounded(share_of_mean(torch.arange(float(rows))))
        assert sum(shares) == pytest.approx((rows - 1) / 2)
    assert await bounded(wg.rows_known(torch.arange(4))) == [(None, None)] * 2


async def test_padded_shards_have_the_same_number_of_rows(wg: WorkerGroup) -> None:
    call = wg.real_rows.options(uneven="pad")(torch.arange(3))
    assert await bounded(call) == [(2, 2), (1, 2)]


async def test_a_data_proto_may_ask_for_padding_itself(wg: WorkerGroup) -> None:
    """In verl the caller's batch was padded (VERL.md, 3.1, 3)."""
    data = DataProto.from_dict({"x": torch.arange(3)}, auto_padding=True)
    result = await bounded(wg.double(data))
    assert listed(result.batch["x"]) == [0, 2, 4]
    assert len(data) == 3


async def test_the_group_that_splits_does_the_padding(wg: WorkerGroup, three: WorkerGroup) -> None:
    """It was computed with another group's size: https://github.com/verl-project/verl/issues/149."""
    result = await bounded(wg.echo(torch.arange(4)))
    padded = three.real_rows.options(uneven="allow")(result)
    assert [rows for rows, _ in await bounded(padded)] == [2, 1, 1]
    assert listed(await bounded(three.echo.options(uneven="pad")(result))) == [0, 1, 2, 3]


async def test_markers_override_what_the_type_says(wg: WorkerGroup) -> None:
    whole = torch.arange(3)
    results = await bounded(
        wg.metric(torch.arange(2), Replicate(whole), Shard({"a": [1, 2]}), key=PerRank("xy"))
    )
    for rank, args, kwargs in results:
        batch, replicated, sharded = args
        assert listed(batch) == [rank]
        assert torch.equal(replicated, whole)
        assert sharded == {"a": [rank + 1]}
        assert kwargs == {"key": "xy"[rank]}


async def test_execute_rank_zero_runs_on_rank_zero_with_the_arguments_whole(
    wg: WorkerGroup,
) -> None:
    assert await bounded(wg.on_rank_zero([1, 2])) == (0, ([1, 2],), {})
    assert await bounded(wg.count()) == [1, 0]


async def test_execute_any_splits_nothing(wg: WorkerGroup) -> None:
    _, (batch,), _ = await bounded(wg.on_any(torch.arange(3)))
    assert listed(batch) == [0, 1, 2]
    assert sum(await bounded(wg.count())) == 1


async def test_execute_any_takes_the_rank_with_the_least_to_do(
    wg: WorkerGroup, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    busy = wg[0].wait_for(str(pipe))
    ranks = [(await bounded(wg.on_any(1)))[0] for _ in range(3)]
    await bounded(in_thread(pipe.write_bytes, b"go on"))
    await bounded(busy)
    assert ranks == [1, 1, 1]


async def test_a_view_splits_over_its_own_ranks(three: WorkerGroup) -> None:
    assert listed(await bounded(three[1:].tag(torch.arange(4)))) == [[0, 1], [1, 1], [2, 2], [3, 2]]
    assert await bounded(three.count()) == [0, 1, 1]


async def test_a_view_on_one_rank_splits_nothing_and_gives_the_value(three: WorkerGroup) -> None:
    assert listed(await bounded(three[2].tag(torch.arange(3)))) == [[0, 2], [1, 2], [2, 2]]
    assert listed(await bounded(three[2:].tag(torch.arange(2)))) == [[0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda wg: wg.double(torch.arange(5)), "5 rows can't be split evenly over 2 ranks"),
        (lambda wg: wg.double(torch.arange(1)), "fewer rows than ranks"),
        (lambda wg: wg.echo(torch.arange(4), torch.arange(6)), "same number of rows"),
        (lambda wg: wg.echo({"names": [1, 2]}), r"Shard\(x\) or Replicate\(x\)"),
        (lambda wg: wg.echo(Shard(5)), "has none"),
        (lambda wg: wg.dp_compute([1, 2, 3]), "an item for each of 2 ranks"),
        (lambda wg: wg.dp_compute([1, 2], 5), "an item for each of 2 ranks"),
        (lambda wg: wg.all_to_all(PerRank([1, 2, 3])), "PerRank has 3 values"),
        (lambda wg: wg[0].echo(PerRank([1])), "nothing for PerRank to give out"),
        (lambda wg: wg.on_rank_zero(PerRank([1, 2])), "nothing for PerRank to give out"),
        (lambda wg: wg.on_any(PerRank([1, 2])), "nothing for PerRank to give out"),
        (lambda wg: wg.execute_with_func_generator(5, torch.arange(2)), "must be a function"),
        (lambda wg: wg.direct(), "DIRECT_ROLLOUT_METHOD"),
    ],
    ids=[
        "uneven", "too-few", "rows-differ", "ambiguous", "no-rows", "too-long", "no-list",
        "per-rank", "single", "rank-zero", "any", "no-function", "direct",
    ],
)  # fmt: skip
async def test_arguments_that_can_not_be_given_out_raise_before_a_rank_gets_a_byte(
    wg: WorkerGroup, call: Callable[[WorkerGroup], Any], told: str
) -> None:
    with pytest.raises(DispatchError, match=told):
        call(wg)
    assert await bounded(wg.count()) == [0, 0]


async def test_arguments_that_do_not_fit_the_method_raise_before_a_rank_gets_a_byte(
    wg: WorkerGroup,
) -> None:
    with pytest.raises(TypeError, match=r"Rows\.double: missing a required argument: 'batch'"):
        wg.double()
    with pytest.raises(TypeError, match="nonesuch"):
        wg.double(torch.arange(2), nonesuch=1)
    with pytest.raises(TypeError, match="has no option 'unevn'"):
        wg.double.options(unevn="pad")
    with pytest.raises(AttributeError, match="did you mean 'double'"):
        wg.duoble(1)
    assert await bounded(wg.count()) == [0, 0]


COLLECTING = [(0, True), (0, False), (1, True)]
"""Ranks 0 and 1 share a dp rank and rank 0 speaks for both."""
CROSSED = [(1, True), (0, False), (0, True)]
"""The dp order is not the order of the ranks."""


async def test_a_mesh_splits_over_dp_ranks_and_joins_what_collects() -> None:
    async with group(Mesh, 3, COLLECTING) as wg:
        assert wg.dp_size("actor") == 2
        assert listed(await bounded(wg.tag(torch.arange(4)))) == [[0, 0], [1, 0], [2, 2], [3, 2]]
        assert await bounded(wg.count()) == [1, 1, 1]


async def test_results_of_a_mesh_are_joined_in_dp_order() -> None:
    """They came in the order of global ranks (VERL.md, 3.1, 1)."""
    async with group(Mesh, 3, CROSSED) as wg:
        assert listed(await bounded(wg.tag(torch.arange(4)))) == [[0, 2], [1, 2], [2, 0], [3, 0]]


async def test_a_mesh_pads_for_its_dp_ranks() -> None:
    """The nd modes of verl ignore auto_padding."""
    async with group(Mesh, 3, COLLECTING) as wg:
        result = await bounded(wg.padded(DataProto.from_dict({"x": torch.arange(5)})))
        assert listed(result.batch["x"]) == [0, 2, 4, 6, 8]


async def test_an_error_on_a_rank_that_does_not_collect_is_told() -> None:
    """It vanished (VERL.md, 3.1, 5)."""
    async with group(Mesh, 3, COLLECTING) as wg:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.fails_unless_it_collects(torch.arange(4)))
        assert [str(error) for error in caught.value.exceptions] == [
            "rank 1 is not asked, but has something to say"
        ]


@pytest.mark.parametrize("method", ["join", "join_async"])
async def test_a_mesh_that_is_registered_in_a_method_is_known_when_that_call_has_ended(
    method: str,
) -> None:
    async with group(Mesh, 2, None) as wg:
        with pytest.raises(DispatchError, match=r"no rank has registered the mesh 'late'"):
            wg.late(torch.arange(4))
        await bounded(getattr(wg, method)("late", [(0, True), (1, True)]))
        assert listed(await bounded(wg.late(torch.arange(4)))) == [0, 2, 4, 6]


async def test_a_mesh_that_only_some_ranks_have_registered_is_refused() -> None:
    async with group(Mesh, 2, None) as wg:
        await bounded(wg[0].join("late", [(0, True), (1, True)]))
        with pytest.raises(DispatchError, match="not registered on rank 1"):
            wg.late(torch.arange(4))


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([(0, True), (2, True), (2, False)], "no rank has dp rank 1"),
        ([(0, True), (1, True), (1, True)], "ranks 1, 2 all collect"),
        ([(0, True), (1, False), (1, False)], "none collects"),
    ],
    ids=["gap", "two-collect", "none-collects"],
)
async def test_a_mesh_that_would_lose_or_double_rows_is_refused_before_a_rank_gets_a_byte(
    places: Sequence[tuple[int, bool]], told: str
) -> None:
    """It was never validated (VERL.md, 3.1, 1)."""
    async with group(Mesh, 3, places) as wg:
        with pytest.raises(DispatchError, match=told):
            wg.tag(torch.arange(6))
        assert await bounded(wg.count()) == [0, 0, 0]


async def test_a_view_that_misses_a_dp_rank_is_refused_and_one_that_has_all_works() -> None:
    """Sub-group views dropped rows (VERL.md, 3.1, 1)."""
    async with group(Mesh, 3, COLLECTING) as wg:
        with pytest.raises(DispatchError, match="its rows would be lost"):
            wg[:2].tag(torch.arange(4))
        with pytest.raises(DispatchError, match="without rank 0, which collects"):
            wg[1:].tag(torch.arange(4))
        assert listed(await bounded(wg[1].tag(torch.arange(2)))) == [[0, 1], [1, 1]]


async def test_a_mesh_can_be_registered_once_only() -> None:
    async with group(Mesh, 2, COLLECTING) as wg:
        with pytest.raises(WorkerGroupError, match="join failed") as caught:
            await bounded(wg.join("actor", COLLECTING))
        assert "registered already on rank" in str(caught.value.exceptions[0])


async def test_a_mode_of_the_users_own_gives_out_by_rank_and_collects() -> None:
    async with group(Custom, 3) as wg:
        assert await bounded(wg.total([1, 2, 3, 4, 5], factor=10)) == 150
        assert await bounded(wg.count()) == [1, 1, 1]


async def test_a_dispatch_function_that_returns_no_lists_is_refused_before_a_rank_gets_a_byte() -> (
    None
):
    async with group(Custom) as wg:
        with pytest.raises(DispatchError, match="dispatch_fn must make it a list"):
            wg.careless(5)
        with pytest.raises(DispatchError, match="dispatch_fn must make it a list"):
            wg.careless([1, 2, 3])
        assert await bounded(wg.count()) == [0, 0]


async def test_a_mode_of_the_users_own_is_over_the_ranks_of_the_view() -> None:
    async with group(Custom, 3) as wg:
        for view in (wg[1:], wg[::2], wg[::-1], wg[2:0:-1], wg[1:2]):
            assert await bounded(view.total([1, 2, 3, 4])) == 10
