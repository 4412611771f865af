from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from asyncwg import shards
from asyncwg._modes import CustomMode, MeshMode, Mode
from asyncwg.decorator import Dispatch, Method, MethodOptions, PerRank, Replicate, Shard, Uneven
from asyncwg.dispatch import Layout, Plan, plan
from asyncwg.errors import DispatchError
from asyncwg.shards import Handler

PROTO = Dispatch.DP_COMPUTE_PROTO
METRIC = Dispatch.DP_COMPUTE_METRIC
WITH_FUNC = Dispatch.DP_COMPUTE_PROTO_WITH_FUNC
TP2_DP2 = ((0, True), (0, False), (1, True), (1, False))


def step(self: Any, batch: Any, mask: Any = None, *rest: Any) -> None:
    """The method that the tests call."""


METHOD = Method("step", "Trainer.step", MethodOptions(), "def", step)


def layout(n: int, single: bool = False, **meshes: Sequence[tuple[int, bool] | None]) -> Layout:
    return Layout(tuple(range(n)), single, "the group", meshes)


def planned(
    mode: Mode,
    *args: Any,
    n: int = 2,
    single: bool = False,
    uneven: Uneven = "error",
    on: Layout | None = None,
    **kwargs: Any,
) -> Plan:
    return plan(METHOD, mode, args, kwargs, on or layout(n, single), uneven)


def received(made: Plan, n: int) -> list[tuple[Any, ...]]:
    """What each position gets: its positional and then its keyword arguments, tensors as lists."""
    index = made.index or (0,) * n
    assert len(index) == n
    return [
        tuple(
            value.tolist() if isinstance(value, torch.Tensor) else value
            for value in (*made.payloads[i].args, *made.payloads[i].kwargs.values())
        )
        for i in index
    ]


def rows_of(made: Plan) -> list[int | None]:
    return [payload.rows for payload in made.payloads]


def refused(mode: Mode, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DispatchError) as caught:
        planned(mode, *args, **kwargs)
    assert caught.value.results is None
    assert str(caught.value).startswith("Trainer.step")
    return str(caught.value)


class Greedy:
    """Rows that ask for padding, as a DataProto with auto_padding does."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> type[Greedy]:
    monkeypatch.setattr(shards, "_registry", dict(shards._registry))
    handler = Handler(
        rows=lambda value: len(value.values),
        cut=lambda value, bounds: [Greedy(value.values[a:b]) for a, b in bounds],
        pad=lambda value, count: Greedy(value.values + value.values[-1:] * count),
        join=lambda parts: Greedy([row for part in parts for row in part.values]),
        wants_padding=lambda _value: True,
    )
    shards.register_shardable(Greedy, handler)
    return Greedy


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL])
def test_all_ranks_share_one_payload_with_the_arguments_as_they_are(mode: Mode) -> None:
    made = planned(mode, [1, 2], n=2, lr={"a": [1]})
    assert made.index is None
    assert made.payloads == ((([1, 2],), {"lr": {"a": [1]}}, None, None),)
    results = [1, 2]
    assert made.collect(results) is results


@pytest.mark.parametrize("mode", [Dispatch.ALL_TO_ALL, PROTO, METRIC, Dispatch.DP_COMPUTE])
def test_a_call_on_one_rank_splits_nothing_and_gives_the_value(mode: Mode) -> None:
    batch = torch.arange(3)
    made = planned(mode, batch, n=1, single=True)
    assert made.payloads[0].args[0] is batch
    assert made.payloads[0].rows is None
    assert made.payloads[0].total_rows is None
    assert made.collect([5]) == 5


def test_a_custom_mode_on_one_rank_asks_no_function() -> None:
    made = planned(CustomMode(never, never), 1, n=1, single=True)
    assert (received(made, 1), made.collect(["value"])) == ([(1,)], "value")


def test_markers_are_taken_off_on_one_rank() -> None:
    made = planned(PROTO, Shard([1, 2, 3]), n=1, single=True, mask=Replicate([4]))
    assert received(made, 1) == [([1, 2, 3], [4])]


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, PROTO, Dispatch.RANK_ZERO])
def test_per_rank_on_one_rank_is_refused(mode: Mode) -> None:
    assert "argument 'batch': the call goes to one rank" in refused(
        mode, PerRank([1]), n=1, single=True
    )


def test_a_group_of_one_rank_splits_as_usual() -> None:
    made = planned(Dispatch.ALL_TO_ALL, PerRank([7]), n=1)
    assert (received(made, 1), made.collect([1])) == ([(7,)], [1])


@pytest.mark.parametrize("mode", [Dispatch.ONE_TO_ALL, PROTO, METRIC, MeshMode("m")])
def test_per_rank_gives_each_rank_its_own(mode: Mode) -> None:
    where = layout(2, m=((0, True), (1, True)))
    made = planned(mode, PerRank(["a", "b"]), on=where, mask=7)
    assert received(made, 2) == [("a", 7), ("b", 7)]


def test_per_rank_of_another_length_is_refused() -> None:
    message = refused(Dispatch.ALL_TO_ALL, 1, PerRank([1, 2, 3]))
    assert "argument 'mask': PerRank has 3 values and the call goes to 2 ranks" in message


def test_ranks_whose_items_are_the_same_object_share_a_payload() -> None:
    made = planned(Dispatch.DP_COMPUTE, ["prepare"] * 4, n=4)
    assert (len(made.payloads), made.index) == (1, None)


def test_shard_splits_in_a_mode_that_does_not() -> None:
    made = planned(Dispatch.ONE_TO_ALL, Shard([1, 2]), [3, 4])
    assert received(made, 2) == [([1], [3, 4]), ([2], [3, 4])]
    assert rows_of(made) == [1, 1]
    assert made.collect([[1], [2]]) == [[1], [2]]


def test_shard_splits_a_dict_of_lists() -> None:
    made = planned(PROTO, Shard({"words": ["a", "b"]}))
    assert received(made, 2) == [({"words": ["a"]},), ({"words": ["b"]},)]


@pytest.mark.parametrize("value", ["text", (1, 2), 3, torch.tensor(1)])
def test_shard_of_something_without_rows_is_refused(value: Any) -> None:
    assert "Shard(x) needs something with rows" in refused(Dispatch.ONE_TO_ALL, Shard(value))


def test_replicate_keeps_a_batch_whole() -> None:
    made = planned(PROTO, torch.arange(2), Replicate([1, 2, 3]))
    assert received(made, 2) == [([0], [1, 2, 3]), ([1], [1, 2, 3])]


@pytest.mark.parametrize("kind", [list, tuple])
def test_dp_compute_gives_out_lists_and_tuples(kind: Callable[[Any], Any]) -> None:
    made = planned(Dispatch.DP_COMPUTE, kind("ab"), mask=kind("cd"))
    assert received(made, 2) == [("a", "c"), ("b", "d")]
    assert made.collect([1, 2]) == [1, 2]


@pytest.mark.parametrize("value", [[1], (1, 2, 3), "ab", {1: 2, 3: 4}, torch.ones(2), None])
def test_dp_compute_refuses_anything_else(value: Any) -> None:
    message = refused(Dispatch.DP_COMPUTE, value)
    assert (
        "argument 'batch': DP_COMPUTE needs a list or tuple with an item for each of 2" in message
    )


def test_dp_compute_takes_markers() -> None:
    made = planned(Dispatch.DP_COMPUTE, Replicate("ab"), Shard([1, 2]))
    assert received(made, 2) == [("ab", [1]), ("ab", [2])]


def test_batches_are_split_and_the_rest_is_replicated() -> None:
    made = planned(PROTO, torch.arange(4), "text", mask=[5, 6, 7, 8])
    assert received(made, 2) == [([0, 1], "text", [5, 6]), ([2, 3], "text", [7, 8])]
    assert rows_of(made) == [2, 2]
    assert made.collect([torch.ones(1), torch.zeros(1)]).tolist() == [1, 0]


def test_without_a_batch_all_is_replicated_and_results_are_joined() -> None:
    made = planned(PROTO, 1, (2, 3), mask={"lr": 0.1})
    assert made.index is None
    assert rows_of(made) == [None]
    assert made.collect([[1], [2]]) == [1, 2]


def test_batches_of_different_lengths_are_refused_by_name() -> None:
    message = refused(PROTO, torch.ones(4), [1, 2], torch.ones(4))
    assert "argument 'batch' has 4, argument 'mask' has 2, positional argument 3 has 4" in message


def test_names_of_parameters_that_can_not_be_had_are_replaced_by_positions() -> None:
    method = METHOD._replace(function=dict.update)
    with pytest.raises(DispatchError, match="positional argument 1 has 4, positional argument 2"):
        plan(method, PROTO, (torch.ones(4), [1]), {}, layout(2), "error")


def test_a_dict_of_lists_is_refused_as_ambiguous() -> None:
    message = refused(PROTO, {"words": ["a", "b"]})
    assert "argument 'batch': the dict holds lists" in message
    assert "Shard(x) or Replicate(x)" in message


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), n=st.integers(1, 8))
def test_allow_makes_sizes_that_differ_by_at_most_one_and_keeps_the_order(
    rows: int, n: int
) -> None:
    made = planned(PROTO, torch.arange(rows), n=n, uneven="allow")
    parts = [payload.args[0] for payload in made.payloads]
    assert [len(part) for part in parts] == [len(p) for p in torch.arange(rows).tensor_split(n)]
    assert rows_of(made) == [len(part) for part in parts]
    assert made.collect(parts).tolist() == list(range(rows))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 40), n=st.integers(1, 8), times=st.integers(1, 3))
def test_pad_makes_equal_shards_and_the_padding_is_not_in_the_result(
    rows: int, n: int, times: int
) -> None:
    made = planned(PROTO, torch.arange(rows), n=n, uneven="pad")
    index = made.index or (0,)
    parts = [made.payloads[i].args[0] for i in index]
    assert {len(part) for part in parts} == {-(-rows // n)}
    real = [made.payloads[i].rows or 0 for i in index]
    assert sum(real) == rows
    assert {payload.total_rows for payload in made.payloads} == {rows}
    assert all((part[count:] == rows - 1).all() for part, count in zip(parts, real, strict=True))
    joined = made.collect([part.repeat_interleave(times) for part in parts])
    assert joined.tolist() == torch.arange(rows).repeat_interleave(times).tolist()


def test_five_rows_on_two_ranks_are_three_and_two() -> None:
    made = planned(PROTO, torch.arange(5), uneven="allow")
    assert received(made, 2) == [([0, 1, 2],), ([3, 4],)]


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_that_do_not_divide_are_refused_unless_said_otherwise(rows: int) -> None:
    message = refused(PROTO, torch.arange(rows))
    assert f"{rows} rows can't be split evenly over 2 ranks" in message
    assert 'uneven="allow"' in message
    assert 'uneven="pad"' in message


def test_no_rows_send_empty_shards_of_the_right_dtype() -> None:
    for uneven in ("allow", "pad"):
        made = planned(PROTO, torch.empty(0, 3, dtype=torch.bfloat16), uneven=uneven)
        assert rows_of(made) == [0, 0]
        joined = made.collect([payload.args[0] for payload in made.payloads])
        assert (joined.shape, joined.dtype) == ((0, 3), torch.bfloat16)


def test_a_shard_of_nothing_but_padding_adds_nothing() -> None:
    made = planned(PROTO, torch.tensor([7]), uneven="pad")
    assert received(made, 2) == [([7],), ([7],)]
    assert rows_of(made) == [1, 0]
    assert made.collect([torch.tensor([14]), torch.tensor([14])]).tolist() == [14]


def test_a_padded_result_of_another_length_is_refused_and_kept() -> None:
    made = planned(PROTO, torch.arange(3), uneven="pad")
    results = [torch.ones(2), torch.ones(3)]
    with pytest.raises(DispatchError, match="has 3 rows, and not a multiple of the 2") as caught:
        made.collect(results)
    assert caught.value.results == results


def test_padding_is_cut_off_each_entry_of_a_result() -> None:
    made = planned(PROTO, torch.arange(3), uneven="pad")
    result = {"x": torch.arange(2), "twice": [1, 2, 3, 4], "loss": 0.5}
    joined = made.collect([result, result])
    assert joined["x"].tolist() == [0, 1, 0]
    assert joined["twice"] == [1, 2, 3, 4, 1, 2]
    assert joined["loss"] == [0.5, 0.5]


def test_metrics_of_a_padded_call_are_a_list_of_every_rank_and_never_cut() -> None:
    made = planned(METRIC, torch.arange(3), uneven="pad")
    assert rows_of(made) == [2, 1]
    results = [[1, 2], [3, 4]]
    assert made.collect(results) is results


def test_a_batch_that_wants_padding_gets_it(greedy: type[Greedy]) -> None:
    batch = greedy([1, 2, 3])
    made = planned(PROTO, batch, [4, 5, 6])
    sent = [(payload.args[0].values, payload.args[1]) for payload in made.payloads]
    assert sent == [([1, 2], [4, 5]), ([3, 3], [6, 6])]
    assert rows_of(made) == [2, 1]
    assert batch.values == [1, 2, 3]


def test_replicating_a_batch_that_wants_padding_asks_for_none(greedy: type[Greedy]) -> None:
    assert "3 rows can't be split" in refused(PROTO, Replicate(greedy([1])), [1, 2, 3])


def test_the_group_that_splits_does_the_padding() -> None:
    first = planned(PROTO, torch.arange(4), n=2, uneven="pad")
    between = first.collect([payload.args[0] for payload in first.payloads])
    second = planned(PROTO, between, n=3, uneven="allow")
    parts = [payload.args[0] for payload in second.payloads]
    assert [len(part) for part in parts] == [2, 1, 1]
    assert second.collect(parts).tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_batch_that_can_not_be_cut_is_refused_by_name() -> None:
    csr = torch.eye(2).to_sparse_csr()
    assert "argument 'batch': a torch.sparse_csr tensor can't be split" in refused(PROTO, csr)


def test_results_that_can_not_be_joined_are_kept() -> None:
    made = planned(PROTO, torch.arange(2))
    with pytest.raises(DispatchError, match=r"Trainer\.step.*DP_COMPUTE_METRIC") as caught:
        made.collect([0.5, 0.25])
    assert caught.value.results == [0.5, 0.25]


def test_results_are_kept_when_a_type_refuses_to_be_joined() -> None:
    @dataclasses.dataclass
    class Small:
        x: list[int]

        def __post_init__(self) -> None:
            if len(self.x) > 1:
                raise ValueError("too many rows")

    made = planned(PROTO, torch.arange(2))
    with pytest.raises(DispatchError, match="too many rows") as caught:
        made.collect([Small([1]), Small([2])])
    assert caught.value.results == [Small([1]), Small([2])]


def test_the_callers_objects_are_not_changed() -> None:
    batch = {"x": torch.arange(3), "words": ["a", "b", "c"]}
    marker = Shard(batch)
    planned(PROTO, marker, uneven="pad")
    assert marker.value is batch
    assert (batch["x"].tolist(), batch["words"]) == ([0, 1, 2], ["a", "b", "c"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [len, functools.partial(max, 1), dict, step])
def test_any_callable_is_replicated(function: Any) -> None:
    made = planned(WITH_FUNC, function, [1, 2])
    assert received(made, 2) == [(function, [1]), (function, [2])]
    assert made.collect([[1], [2]]) == [1, 2]


def test_the_function_may_be_given_by_name() -> None:
    assert received(planned(WITH_FUNC, batch=len, mask=[1, 2]), 2) == [(len, [1]), (len, [2])]


def test_the_function_may_be_another_for_each_rank() -> None:
    assert received(planned(WITH_FUNC, PerRank([len, max])), 2) == [(len,), (max,)]


@pytest.mark.parametrize("single", [False, True])
def test_something_that_is_not_callable_is_refused_as_function(single: bool) -> None:
    message = refused(WITH_FUNC, [1, 2], n=1, single=single)
    assert "argument 'batch' must be a function or another callable, it is a list" in message


def test_a_missing_function_is_refused() -> None:
    assert "the first argument must be what to call" in refused(WITH_FUNC, mask=[1, 2])


def test_ranks_of_a_dp_rank_share_a_payload() -> None:
    made = planned(MeshMode("m"), torch.arange(4), on=layout(4, m=TP2_DP2))
    assert made.index == (0, 0, 1, 1)
    assert [payload.args[0].tolist() for payload in made.payloads] == [[0, 1], [2, 3]]


def test_results_of_the_collecting_ranks_are_joined_in_dp_order() -> None:
    table = ((1, False), (1, True), (0, True), (0, False))
    made = planned(MeshMode("m"), torch.arange(4), on=layout(4, m=table))
    assert received(made, 4) == [([2, 3],), ([2, 3],), ([0, 1],), ([0, 1],)]
    assert made.collect([None, [2, 3], [0, 1], "dropped"]) == [0, 1, 2, 3]


def test_rows_are_divided_by_the_dp_ranks() -> None:
    made = planned(MeshMode("m"), torch.arange(2), on=layout(4, m=TP2_DP2))
    assert rows_of(made) == [1, 1]


def test_a_mesh_call_with_keywords_alone_works() -> None:
    made = planned(MeshMode("m"), on=layout(4, m=TP2_DP2), data=[1, 2])
    assert received(made, 4) == [([1],), ([1],), ([2],), ([2],)]


def test_a_mesh_call_without_a_batch_replicates_and_joins() -> None:
    made = planned(MeshMode("m"), 1, on=layout(4, m=TP2_DP2))
    assert (made.index, made.collect([[1], None, [2], None])) == (None, [1, 2])


def test_padding_of_a_mesh_call_is_cut_by_dp_rank() -> None:
    made = planned(MeshMode("m"), torch.arange(3), on=layout(4, m=TP2_DP2), uneven="pad")
    assert made.collect([[0, 1], None, [2, 2], None]) == [0, 1, 2]


def test_per_rank_beside_a_batch_of_a_mesh_call_goes_to_each_rank() -> None:
    made = planned(MeshMode("m"), [1, 2], PerRank("abcd"), on=layout(4, m=TP2_DP2))
    assert received(made, 4) == [([1], "a"), ([1], "b"), ([2], "c"), ([2], "d")]


def test_results_that_can_not_be_joined_in_a_mesh_are_kept_of_all_ranks() -> None:
    made = planned(MeshMode("m"), [1, 2], on=layout(4, m=TP2_DP2))
    with pytest.raises(DispatchError, match="rank 2 returned a float and rank 0 a list") as caught:
        made.collect([[1], "a", 0.5, "b"])
    assert caught.value.results == [[1], "a", 0.5, "b"]


def test_a_mesh_that_nobody_registered_is_refused_and_the_others_named() -> None:
    message = refused(MeshMode("actor"), [1, 2], on=layout(4, m=TP2_DP2))
    assert "'actor' (registered: 'm')" in message
    assert "_register_dispatch_collect_info" in message


def test_a_view_that_would_lose_rows_is_refused() -> None:
    where = Layout((2, 3), False, None, {"m": TP2_DP2})
    assert "none of them has dp rank 0" in refused(MeshMode("m"), [1, 2], on=where)


def test_a_view_that_covers_the_mesh_counts_positions() -> None:
    made = planned(MeshMode("m"), [1, 2], on=Layout((2, 0), False, None, {"m": TP2_DP2}))
    assert received(made, 2) == [([2],), ([1],)]
    assert made.collect([[2], [1]]) == [1, 2]


def never(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AssertionError("called")


def give(args: Any, kwargs: Any = None) -> CustomMode:
    """A mode whose dispatch_fn returns this, and whose collect_fn shows what it got."""

    def dispatch_fn(_group: Any, *_args: Any, **_kwargs: Any) -> Any:
        return args, kwargs or {}

    def collect_fn(*got: Any) -> Any:
        return got

    return CustomMode(dispatch_fn, collect_fn)


def test_lists_of_the_users_function_are_given_out() -> None:
    made = planned(give([["a", "b"]], {"key": [1, 2]}))
    assert received(made, 2) == [("a", 1), ("b", 2)]
    assert made.collect([3, 4]) == ("the group", [3, 4])


def test_the_users_function_gets_the_group_and_the_arguments() -> None:
    def dispatch_fn(*args: Any, **kwargs: Any) -> Any:
        return ([[args, args], [kwargs, kwargs]], {})

    made = planned(CustomMode(dispatch_fn, never), 1, mask=2)
    assert received(made, 2)[1] == (("the group", 1), {"mask": 2})


@pytest.mark.parametrize("value", [("a", "b"), [1], [1, 2, 3], "ab", None, torch.ones(2)])
def test_another_value_of_the_users_function_is_refused_by_name(value: Any) -> None:
    message = refused(give([[1, 2], value]))
    assert "argument 'mask': dispatch_fn must make it a list with an item for each of 2" in message
    assert "argument 'key'" in refused(give([], {"key": value}))


@pytest.mark.parametrize("returned", [None, [1, 2], ([1, 2],), ([], {}, []), ({}, [])])
def test_a_function_that_returns_no_pair_is_refused(returned: Any) -> None:
    mode = CustomMode(lambda *_a, **_k: returned, never)
    assert "must return (args, kwargs)" in refused(mode, 1)


@pytest.mark.parametrize("replicating", [False, True])
def test_markers_override_the_users_function(replicating: bool) -> None:
    def dispatch_fn(_group: Any, *args: Any) -> Any:
        return [[arg, arg] if replicating else arg for arg in args], {}

    made = planned(CustomMode(dispatch_fn, never), Shard([1, 2]), PerRank("ab"), Replicate([3]))
    assert received(made, 2) == [([1], "a", [3]), ([2], "b", [3])]


@pytest.mark.parametrize("single", [False, True])
def test_a_direct_rollout_method_is_refused(single: bool) -> None:
    assert "DIRECT_ROLLOUT_METHOD" in refused(Dispatch.DIRECT_ROLLOUT_METHOD, n=1, single=single)


def test_a_mode_that_lost_its_functions_is_refused() -> None:
    mode = Dispatch.register("short_lived")
    Dispatch.remove("short_lived")
    assert "register_dispatch_mode" in refused(mode, 1)


def test_a_tensordict_is_split() -> None:
    made = planned(PROTO, TensorDict({"x": torch.arange(4)}, [4]))
    parts = [payload.args[0] for payload in made.payloads]
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    assert made.collect(parts)["x"].tolist() == [0, 1, 2, 3]
