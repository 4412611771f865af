"""The predefined modes as functions do what the modes do, also inside of a mode of the user's own."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncwg._modes import CustomMode, Mode, as_mode
from asyncwg.decorator import (
    Dispatch,
    Method,
    MethodOptions,
    PerRank,
    Shard,
    Uneven,
    collect_all_to_all,
    collect_dp_compute_data_proto,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_dp_compute_data_proto_with_func,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    register_dispatch_mode,
)
from asyncwg.dispatch import Layout, Plan, plan
from asyncwg.errors import DispatchError, UsageError

PAIRED = [
    Dispatch.ONE_TO_ALL,
    Dispatch.ALL_TO_ALL,
    Dispatch.DP_COMPUTE,
    Dispatch.DP_COMPUTE_PROTO,
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC,
    Dispatch.DP_COMPUTE_METRIC,
]


def step(self: Any, *args: Any, **kwargs: Any) -> None:
    """The method that the tests call."""


METHOD = Method("step", "Trainer.step", MethodOptions(), "def", step)


def planned(mode: Mode, *args: Any, uneven: Uneven = "error", n: int = 2, **kwargs: Any) -> Plan:
    layout = Layout(tuple(range(n)), False, types.SimpleNamespace(world_size=n), {})
    return plan(METHOD, mode, args, kwargs, layout, uneven)


def received(made: Plan, n: int = 2) -> list[tuple[Any, ...]]:
    """By rank: its arguments, and the real rows of its shard; tensors as lists."""
    payloads = [made.payloads[i] for i in made.index or (0,) * n]
    return [
        (
            *(
                value.tolist() if isinstance(value, torch.Tensor) else value
                for value in (*payload.args, *payload.kwargs.values())
            ),
            payload.rows,
        )
        for payload in payloads
    ]


@pytest.mark.parametrize("mode", PAIRED, ids=lambda mode: mode.name)
def test_a_mode_made_of_a_predefined_pair_gives_out_and_collects_as_the_mode(
    mode: Dispatch,
) -> None:
    twin = as_mode(get_predefined_dispatch_fn(mode))
    args: tuple[Any, ...] = ([1, 2], (3, 4))
    if mode is Dispatch.DP_COMPUTE_PROTO_WITH_FUNC:
        args = (sum, *args)
    own, others = planned(twin, *args, batch=[5, 6]), planned(mode, *args, batch=[5, 6])
    assert received(own) == received(others)
    assert own.collect([[1], [2]]) == others.collect([[1], [2]])


@pytest.mark.parametrize("rows", [5, 1, 0])
def test_padding_is_cut_from_what_a_predefined_function_collects(rows: int) -> None:
    mode = CustomMode(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto)
    made = planned(mode, torch.arange(rows), uneven="pad")
    shards = [torch.tensor(batch) for batch, _ in received(made)]
    assert len({len(shard) for shard in shards}) == 1
    assert made.collect(shards).tolist() == list(range(rows))


def test_a_function_of_the_users_own_can_change_what_a_predefined_one_gives_out() -> None:
    def dispatch(group: Any, batch: Any, scale: float) -> Any:
        (batch, scale), named = dispatch_dp_compute_data_proto(group, batch, scale)
        return (batch, scale), {**named, "seed": PerRank(range(group.world_size))}

    made = planned(CustomMode(dispatch, collect_all_to_all), torch.arange(4), 0.5)
    assert received(made) == [([0, 1], 0.5, 0, 2), ([2, 3], 0.5, 1, 2)]


def test_what_the_caller_has_marked_stays_marked() -> None:
    mode = CustomMode(dispatch_one_to_all, collect_all_to_all)
    made = planned(mode, PerRank("ab"), Shard([1, 2]), whole=[3, 4])
    assert received(made) == [("a", [1], [3, 4], 1), ("b", [2], [3, 4], 1)]


def test_results_that_do_not_join_are_kept() -> None:
    mode = CustomMode(dispatch_one_to_all, collect_dp_compute_data_proto)
    with pytest.raises(DispatchError) as caught:
        planned(mode, 1).collect([1.0, 2.0])
    assert caught.value.results == [1.0, 2.0]


def test_an_argument_that_is_no_item_for_each_rank_is_refused_with_the_method() -> None:
    mode = CustomMode(dispatch_dp_compute, collect_all_to_all)
    with pytest.raises(DispatchError, match=r"Trainer\.step: .* an item for each of 2 ranks"):
        planned(mode, [1, 2, 3])


def test_a_first_argument_that_can_not_be_called_is_refused_with_the_method() -> None:
    mode = CustomMode(dispatch_dp_compute_data_proto_with_func, collect_all_to_all)
    with pytest.raises(DispatchError, match=r"Trainer\.step: .* must be what to call"):
        planned(mode, 5, [1, 2])


@pytest.mark.parametrize("mode", [Dispatch.RANK_ZERO, Dispatch.DIRECT_ROLLOUT_METHOD])
def test_a_mode_that_is_no_pair_is_refused_and_those_that_are_named(mode: Dispatch) -> None:
    with pytest.raises(UsageError, match="there are those of ONE_TO_ALL"):
        get_predefined_dispatch_fn(mode)


@pytest.fixture
def own_mode() -> Iterator[Dispatch]:
    yield register_dispatch_mode("test_pair", dispatch_one_to_all, collect_all_to_all)
    Dispatch.remove("test_pair")


def test_the_pair_of_a_registered_mode_is_what_it_was_registered_with(own_mode: Dispatch) -> None:
    assert get_predefined_dispatch_fn(own_mode) == {
        "dispatch_fn": dispatch_one_to_all,
        "collect_fn": collect_all_to_all,
    }
