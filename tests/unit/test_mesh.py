from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncwg import Worker
from asyncwg.errors import DispatchError, UsageError
from asyncwg.mesh import (
    CheckedMesh,
    DispatchCollect,
    DistGlobalInfo,
    DistRankInfo,
    check_mesh,
    dp_place,
    learn_meshes,
)

sizes = st.integers(min_value=1, max_value=4)
infos = st.builds(DistGlobalInfo, sizes, sizes, sizes, sizes)


@given(infos)
def test_every_rank_has_a_place_of_its_own(info: DistGlobalInfo) -> None:
    places = {info.rank_info(rank) for rank in range(info.world_size)}
    assert len(places) == info.world_size


@given(infos)
def test_rank_of_is_the_inverse_of_rank_info(info: DistGlobalInfo) -> None:
    ranks = range(info.world_size)
    assert [info.rank_of(info.rank_info(rank)) for rank in ranks] == list(ranks)


@given(infos)
def test_exactly_one_rank_collects_for_each_dp_rank(info: DistGlobalInfo) -> None:
    ranks = range(info.world_size)
    collecting = [info.rank_info(rank).dp_rank for rank in ranks if info.collects(rank)]
    assert sorted(collecting) == list(range(info.dp_size))


@given(infos)
def test_a_mesh_made_of_a_megatron_order_is_valid(info: DistGlobalInfo) -> None:
    ranks = range(info.world_size)
    table = [(info.rank_info(rank).dp_rank, info.collects(rank)) for rank in ranks]
    checked = check_mesh("train", table)
    assert checked.dp_size == info.dp_size
    assert [checked.dp_of[i] for i in checked.collectors] == list(range(info.dp_size))


def test_tp_changes_fastest_then_cp_then_dp_then_pp() -> None:
    info = DistGlobalInfo(tp_size=2, dp_size=2, pp_size=2, cp_size=2)
    axes = [info.rank_info(rank) for rank in (1, 2, 4, 8)]
    assert axes == [
        DistRankInfo(tp_rank=1, dp_rank=0, pp_rank=0, cp_rank=0),
        DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0, cp_rank=1),
        DistRankInfo(tp_rank=0, dp_rank=1, pp_rank=0, cp_rank=0),
        DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=1, cp_rank=0),
    ]


def test_the_last_pipeline_stage_collects() -> None:
    info = DistGlobalInfo(tp_size=2, dp_size=1, pp_size=2)
    assert [info.collects(rank) for rank in range(4)] == [False, False, True, False]


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="pp_size must be at least 1, not 0"):
        DistGlobalInfo(1, 1, 0)


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(UsageError, match="no rank 4 among 4"):
        DistGlobalInfo(2, 2, 1).rank_info(4)


def test_a_place_outside_of_an_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="no dp_rank 2: dp_size is 2"):
        DistGlobalInfo(2, 2, 1).rank_of(DistRankInfo(0, 2, 0))


def test_ranks_that_have_not_registered_are_named() -> None:
    table = [(0, True), None, None]
    with pytest.raises(
        DispatchError, match=r"ranks 1, 2.*_register_dispatch_collect_info\('train'"
    ):
        check_mesh("train", table)


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(DispatchError, match="not registered on any rank"):
        check_mesh("train", [])


def test_a_gap_in_the_dp_ranks_is_named() -> None:
    table = [(0, True), (0, False), (2, True), (2, False)]
    with pytest.raises(DispatchError, match=r"no rank has dp rank 1 \(registered: 0, 2"):
        check_mesh("train", table)


def test_a_negative_dp_rank_is_refused() -> None:
    with pytest.raises(DispatchError, match="negative"):
        check_mesh("train", [(-1, True), (0, True)])


def test_two_collectors_of_a_dp_rank_are_named() -> None:
    table = [(0, True), (1, True), (1, True)]
    with pytest.raises(DispatchError, match="ranks 1, 2, which have dp rank 1, ranks 1, 2 all"):
        check_mesh("train", table)


def test_a_dp_rank_without_a_collector_is_named() -> None:
    table = [(0, True), (1, False), (1, False)]
    with pytest.raises(DispatchError, match="ranks 1, 2, which have dp rank 1, none collects"):
        check_mesh("train", table)


def test_collectors_are_listed_in_dp_order() -> None:
    table = [(1, True), (1, False), (0, True), (0, False)]
    assert check_mesh("train", table) == CheckedMesh(2, (1, 1, 0, 0), (2, 0))


def test_a_view_that_misses_a_dp_rank_is_refused() -> None:
    table = [(0, True), (0, False), (1, True), (1, False)]
    with pytest.raises(DispatchError, match="ranks 2, 3 only, and none of them has dp rank 0"):
        check_mesh("train", table, [2, 3])


def test_a_view_that_misses_a_collector_is_refused() -> None:
    table = [(0, True), (0, False), (1, True), (1, False)]
    with pytest.raises(DispatchError, match=r"without rank 2, which collects .* dp rank 1"):
        check_mesh("train", table, [0, 1, 3])


def test_a_view_counts_positions_and_not_ranks() -> None:
    table = [(0, True), (0, False), (1, True), (1, False)]
    assert check_mesh("train", table, [2, 0]) == CheckedMesh(2, (1, 0), (1, 0))


class FakeMesh:
    """As much of torch's DeviceMesh as is asked for, with the ranks in row-major order."""

    def __init__(
        self, shape: Sequence[int], names: Sequence[str] | None, coordinate: Sequence[int] | None
    ) -> None:
        self.shape = tuple(shape)
        self.mesh_dim_names = None if names is None else tuple(names)
        self._coordinate = coordinate

    def size(self) -> int:
        return math.prod(self.shape)

    def get_coordinate(self) -> Sequence[int] | None:
        return self._coordinate


def worker_at(rank: int, world_size: int) -> Worker:
    worker = Worker()
    vars(worker).update(rank=rank, world_size=world_size)
    return worker


def table_of(
    shape: Sequence[int],
    names: Sequence[str] | None,
    dp: Any,
    collect: Mapping[str, int] | None = None,
) -> list[tuple[int, bool]]:
    """Let every rank of a mesh register it."""
    table: list[tuple[int, bool]] = []
    for rank, place in enumerate(itertools.product(*map(range, shape))):
        worker = worker_at(rank, math.prod(shape))
        mesh: Any = FakeMesh(shape, names, place)
        worker.register_mesh("m", mesh, dp, collect=collect)
        told = worker.get_dispatch_collect()
        table.append((told["dispatch_dp_rank"]["m"], told["collect_dp_rank"]["m"]))
    return table


shapes = st.lists(st.integers(min_value=1, max_value=3), min_size=1, max_size=4)


@given(st.data(), shapes)
def test_a_mesh_of_any_shape_is_valid_over_any_of_its_dimensions(
    data: st.DataObject, shape: list[int]
) -> None:
    names = [f"d{i}" for i in range(len(shape))]
    order = data.draw(st.permutations(names))
    dp = order[: data.draw(st.integers(min_value=1, max_value=len(names)))]
    collect = {
        name: data.draw(st.integers(-size, size - 1))
        for name, size in zip(names, shape, strict=True)
        if name not in dp and data.draw(st.booleans())
    }
    checked = check_mesh("m", table_of(shape, names, dp, collect))
    assert checked.dp_size == math.prod(shape[names.index(name)] for name in dp)


def test_the_rank_with_place_0_on_all_other_dimensions_collects() -> None:
    assert table_of([2, 2], ["dp", "tp"], "dp") == [(0, True), (0, False), (1, True), (1, False)]
    assert table_of([2, 2], ["tp", "dp"], "dp") == [(0, True), (1, True), (0, False), (1, False)]


def test_another_rank_collects_where_that_is_said() -> None:
    last = table_of([2, 2], ["dp", "pp"], "dp", {"pp": -1})
    assert last == [(0, False), (0, True), (1, False), (1, True)]


def test_several_dimensions_are_counted_together_the_last_one_fastest() -> None:
    by_shard = table_of([2, 2], ["replicate", "shard"], ["replicate", "shard"])
    assert [dp for dp, _ in by_shard] == [0, 1, 2, 3]
    by_replica = table_of([2, 2], ["replicate", "shard"], ("shard", "replicate"))
    assert [dp for dp, _ in by_replica] == [0, 2, 1, 3]


def test_dimensions_without_names_have_numbers() -> None:
    assert table_of([1, 3], None, 1) == [(0, True), (1, True), (2, True)]


@given(infos)
def test_sizes_alone_register_megatrons_order(info: DistGlobalInfo) -> None:
    table: list[tuple[int, bool]] = []
    for rank in range(info.world_size):
        worker = worker_at(rank, info.world_size)
        worker.register_mesh("m", info)
        told = worker.get_dispatch_collect()
        table.append((told["dispatch_dp_rank"]["m"], told["collect_dp_rank"]["m"]))
    ranks = range(info.world_size)
    assert table == [(info.rank_info(rank).dp_rank, info.collects(rank)) for rank in ranks]


@given(infos)
def test_the_axes_of_a_rank_are_its_places(info: DistGlobalInfo) -> None:
    for rank in range(info.world_size):
        places = {axis: place for axis, (place, _) in info.axes(rank).items()}
        assert (
            info.rank_of(DistRankInfo(**{f"{axis}_rank": places[axis] for axis in places})) == rank
        )


@pytest.mark.parametrize(
    ("mesh", "dp", "collect", "told"),
    [
        (FakeMesh([2], ["tp"], [0]), "dp", None, "mesh 'm' has no dimension 'dp'; it has 'tp'"),
        (FakeMesh([2], ["dp"], [0]), "dp", {"pp": 1}, "has no dimension 'pp'"),
        (FakeMesh([2], ["dp"], [0]), [], None, "must name a dimension"),
        (FakeMesh([2], ["dp"], [0]), ["dp", "dp"], None, "no dimension twice"),
        (FakeMesh([2], ["dp"], [0]), "dp", {"dp": 0}, "no dimension twice"),
        (FakeMesh([1, 2], ["dp", "tp"], [0, 0]), "dp", {"tp": 2}, "'tp' has 2 places"),
        (FakeMesh([1], ["dp"], [0]), "dp", None, "has 1 ranks and the group 2: register the whole"),
        (FakeMesh([2], ["dp"], None), "dp", None, "this rank is not in the mesh"),
        (DistGlobalInfo(3, 1, 1), "dp", None, "has 3 ranks and the group 2"),
    ],
    ids=["dp", "collect", "none", "twice", "both", "place", "slice", "outside", "sizes"],
)
def test_a_mesh_that_can_not_be_right_is_refused(
    mesh: Any, dp: Any, collect: Any, told: str
) -> None:
    worker = worker_at(0, 2)
    with pytest.raises(UsageError, match=told):
        worker.register_mesh("m", mesh, dp, collect=collect)
    assert worker.get_dispatch_collect() == {"dispatch_dp_rank": {}, "collect_dp_rank": {}}


def test_a_place_needs_no_collecting_axis() -> None:
    assert dp_place("m", {"dp": (1, 2)}, ["dp"], {}) == (1, True)


def test_a_mesh_of_an_inner_worker_is_taken_by_its_name() -> None:
    """The last one won, whatever was asked for (VERL.md, 3.1, 8)."""
    inner = Worker()
    inner._register_dispatch_collect_info("train", 0, False)
    inner._register_dispatch_collect_info("infer", 1, True)
    outer = Worker()
    outer.set_dispatch_collect("actor", **inner.get_dispatch_collect(), source="train")
    outer.set_dispatch_collect("infer", **inner.get_dispatch_collect())
    assert outer.get_dispatch_collect() == {
        "dispatch_dp_rank": {"actor": 0, "infer": 1},
        "collect_dp_rank": {"actor": False, "infer": True},
    }


def test_the_only_mesh_of_an_inner_worker_needs_no_name() -> None:
    inner, outer = Worker(), Worker()
    inner._register_dispatch_collect_info("train", 1, True)
    outer.set_dispatch_collect("actor", **inner.get_dispatch_collect())
    assert outer.get_dispatch_collect()["dispatch_dp_rank"] == {"actor": 1}


@pytest.mark.parametrize("source", [None, "ref"])
def test_a_mesh_that_an_inner_worker_does_not_have_is_refused(source: str | None) -> None:
    inner, outer = Worker(), Worker()
    for mesh in ("train", "infer"):
        inner._register_dispatch_collect_info(mesh, 0, True)
    with pytest.raises(UsageError, match=r"has the meshes \['infer', 'train'\], none called"):
        outer.set_dispatch_collect("actor", **inner.get_dispatch_collect(), source=source)


def test_meshes_of_one_name_in_two_roles_are_two_tables() -> None:
    tables: dict[str | None, dict[str, list[tuple[int, bool] | None]]] = {}
    for rank, role, dp_rank in ((0, "actor", 0), (1, "actor", 1), (1, "critic", 0)):
        told = DispatchCollect(dispatch_dp_rank={"m": dp_rank}, collect_dp_rank={"m": rank == 1})
        learn_meshes(tables, {role: told}, rank, 2)
    assert tables == {
        "actor": {"m": [(0, False), (1, True)]},
        "critic": {"m": [None, (0, True)]},
    }
