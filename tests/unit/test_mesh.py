from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncwg.errors import DispatchError, UsageError
from asyncwg.mesh import CheckedMesh, DistGlobalInfo, DistRankInfo, check_mesh

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
