"""Cutting a DataProto into parts, joining parts, padding, and mini-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncwg.errors import UsageError
from asyncwg.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from tests.unit.test_protocol_rows import Rollout, numbered, numbers_of


@given(st.integers(0, 9), st.integers(1, 5))
def test_chunks_differ_by_one_at_most_and_joined_give_the_data(rows: int, parts: int) -> None:
    chunks = numbered(rows).chunk(parts, uneven="allow")
    sizes = [len(chunk) for chunk in chunks]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    assert numbers_of(DataProto.concat(chunks)) == list(range(rows))


@given(st.integers(0, 9), st.integers(1, 5))
def test_split_parts_joined_give_the_data(rows: int, size: int) -> None:
    parts = numbered(rows).split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert numbers_of(DataProto.concat(parts)) == list(range(rows))


@pytest.mark.parametrize("auto_padding", [False, True])
def test_an_uneven_chunk_is_refused_and_says_what_to_do(auto_padding: bool) -> None:
    data = DataProto.from_dict({"x": torch.ones(5)}, auto_padding=auto_padding)
    with pytest.raises(UsageError, match=r"5 rows .* 2 equal chunks.*uneven='allow'"):
        data.chunk(2)


def test_chunks_are_views() -> None:
    data = numbered(4)
    chunk = data.chunk(2)[1]
    assert chunk.batch is not None
    assert data.batch is not None
    assert chunk.batch["n"].untyped_storage().data_ptr() == (
        data.batch["n"].untyped_storage().data_ptr()
    )


def test_chunks_of_meta_info_alone_are_copies_of_it() -> None:
    assert [part.meta_info for part in DataProto(meta_info={"k": 1}).chunk(2)] == [{"k": 1}] * 2


@pytest.mark.parametrize("parts", [0, -1, 1.0])
def test_a_number_of_chunks_is_a_positive_integer(parts: Any) -> None:
    with pytest.raises((UsageError, TypeError), match="chunks"):
        numbered(4).chunk(parts)


def test_concat_keeps_the_subclass_of_the_first_part() -> None:
    assert type(DataProto.concat([numbered(1, Rollout), numbered(1, Rollout)])) is Rollout


def test_concat_copies() -> None:
    data = numbered(2)
    joined = DataProto.concat([data])
    assert joined.batch is not None
    joined.batch["n"][0] = 9
    assert numbers_of(data) == [0, 1]


def test_concat_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        DataProto.concat([])


def test_concat_of_rows_is_refused() -> None:
    with pytest.raises(TypeError, match="part 0 is a DataProtoItem"):
        DataProto.concat(numbered(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"tensors": {"a": torch.ones(1)}}, {"tensors": {"b": torch.ones(1)}}, r"batch\['a'\]"),
        ({"tensors": {"a": torch.ones(1)}}, {"non_tensors": {"a": ["x"]}}, "only one of parts"),
        ({"non_tensors": {"a": ["x"]}}, {"non_tensors": {"b": ["x"]}}, r"non_tensor_batch\['a'\]"),
        (
            {"tensors": {"a": torch.ones(1, 2)}},
            {"tensors": {"a": torch.ones(1, 3)}},
            r"batch\['a'\] has shape \(1, 2\)",
        ),
        (
            {"non_tensors": {"a": np.ones((1, 2))}},
            {"non_tensors": {"a": np.ones((1, 3))}},
            r"non_tensor_batch\['a'\]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_key(
    first: dict[str, Any], second: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        DataProto.concat([DataProto.from_dict(**first), DataProto.from_dict(**second)])


def test_jagged_tensors_are_joined_also_with_an_empty_part() -> None:
    rows = [torch.arange(i + 1.0) for i in range(3)]
    data = DataProto.from_dict({"x": torch.nested.nested_tensor(rows, layout=torch.jagged)})
    joined = DataProto.concat([data[:2], data[2:2], data[2:]])
    assert joined.batch is not None
    assert [row.tolist() for row in joined.batch["x"].unbind()] == [row.tolist() for row in rows]


def test_an_empty_part_does_not_decide_the_dtype() -> None:
    full = DataProto.from_dict({"x": torch.ones(1, dtype=torch.int32)}, {"a": np.ones(1, np.int8)})
    empty = DataProto.from_dict({"x": torch.ones(0)}, {"a": np.ones(0)})
    joined = DataProto.concat([empty, full])
    assert joined.batch is not None
    assert joined.batch["x"].dtype == torch.int32
    assert joined.non_tensor_batch["a"].dtype == np.int8


def test_numbers_and_strings_are_not_joined_to_strings() -> None:
    parts = [DataProto.from_dict(non_tensors={"a": np.asarray([value])}) for value in (1, "x")]
    with pytest.raises(UsageError, match=r"non_tensor_batch\['a'\]"):
        DataProto.concat(parts)


def test_joined_masked_arrays_keep_their_masks() -> None:
    masked = np.ma.masked_array([1, 2], mask=[True, False])
    data = DataProto.from_dict(non_tensors={"a": masked})
    joined: Any = DataProto.concat([data, data]).non_tensor_batch["a"]
    assert joined.mask.tolist() == [True, False, True, False]


def with_meta(**meta: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.ones(1)}, meta_info=meta)


def merged(*metas: dict[str, Any], **reducers: Any) -> dict[str, Any]:
    return DataProto.concat([with_meta(**meta) for meta in metas], meta=reducers).meta_info


@pytest.mark.parametrize(
    "make",
    [
        lambda: 1,
        lambda: float("nan"),
        lambda: torch.tensor([1.0, float("nan")]),
        lambda: np.asarray([1.0, 2.0]),
        lambda: {"deep": [np.ones(2), (torch.ones(2),)]},
    ],
)
def test_equal_meta_values_are_kept_once(make: Any) -> None:
    assert set(merged({"k": make()}, {"k": make()})) == {"k"}


@pytest.mark.parametrize(
    ("a", "b"),
    [(1.5, 2.5), (np.ones(2), np.zeros(2)), (torch.ones(2), torch.zeros(2)), ([1], [2]), (1, None)],
)
def test_unequal_meta_values_are_refused_by_key_with_the_right_call(a: Any, b: Any) -> None:
    with pytest.raises(UsageError, match=r"meta_info\['time'\].*meta=\{'time': fn\}"):
        merged({"time": a}, {"time": b})


def test_a_reducer_gets_the_values_in_order() -> None:
    assert merged({"t": 1}, {"t": 2}, {}, {"t": 3}, t=list) == {"t": [1, 2, 3]}


def test_a_key_that_some_parts_lack_is_kept() -> None:
    assert merged({}, {"k": 1}, {"j": 2}) == {"k": 1, "j": 2}


def test_metrics_become_a_dict_of_lists() -> None:
    metrics = merged(
        {"metrics": {"loss": 1.0}},
        {"metrics": None},
        {"metrics": [{"loss": 2.0, "extra": 5}, {"loss": 3.0}]},
        {},
    )
    assert metrics == {"metrics": {"loss": [1.0, 2.0, 3.0], "extra": [5]}}


def test_metrics_that_are_all_none_are_left_out() -> None:
    assert merged({"metrics": None}, {}) == {}


def test_metrics_do_not_nest_when_joined_again() -> None:
    once = merged({"metrics": {"loss": 1.0}}, {"metrics": {"loss": 2.0}})
    assert merged(once, once) == {"metrics": {"loss": [1.0, 2.0, 1.0, 2.0]}}


def test_joining_metrics_leaves_the_parts_as_they_are() -> None:
    metrics = {"loss": [1.0]}
    merged({"metrics": metrics}, {"metrics": metrics})
    assert metrics == {"loss": [1.0]}


def test_metrics_that_are_no_dict_are_refused() -> None:
    with pytest.raises(UsageError, match="dict or a list of dicts"):
        merged({"metrics": 1.0}, {"metrics": 1.0})


def test_a_reducer_for_metrics_replaces_the_gathering() -> None:
    assert merged({"metrics": 1.0}, {"metrics": 2.0}, metrics=sum) == {"metrics": 3.0}


def test_meta_info_alone_is_joined() -> None:
    parts = [DataProto(meta_info={"t": 1}), DataProto(meta_info={"t": 2})]
    assert DataProto.concat(parts, meta={"t": max}).meta_info == {"t": 2}


def test_padding_gives_a_new_one_and_leaves_the_callers_alone() -> None:
    data = numbered(2)
    batch = data.batch
    assert numbers_of(data.padding(2)) == [0, 1, 1, 1]
    assert data.batch is batch
    assert numbers_of(data) == [0, 1]


def test_padding_can_copy_the_first_row() -> None:
    assert numbers_of(numbered(2).padding(1, "first")) == [0, 1, 0]


def test_padding_by_nothing_is_not_the_same_object() -> None:
    data = numbered(2)
    assert data.padding(0) is not data
    assert numbers_of(data.padding(0)) == [0, 1]


@pytest.mark.parametrize(("rows", "size", "which"), [(0, 1, ""), (2, -1, ""), (2, 1, "middle")])
def test_padding_that_makes_no_sense_is_refused(rows: int, size: int, which: str) -> None:
    with pytest.raises(UsageError):
        numbered(rows).padding(size, which)


def test_padding_does_not_touch_metrics() -> None:
    data = DataProto.from_dict({"x": torch.ones(1)}, meta_info={"metrics": {"loss": 1.0}})
    assert data.padding(2).meta_info == {"metrics": {"loss": 1.0}}
    assert pad_dataproto_to_divisor(data, 2)[0].meta_info == {"metrics": {"loss": 1.0}}


@given(st.integers(0, 9), st.integers(1, 7))
def test_unpadding_undoes_padding_to_a_divisor(rows: int, divisor: int) -> None:
    data = numbered(rows)
    padded, size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert size < divisor
    assert numbers_of(unpad_dataproto(padded, size)) == list(range(rows))
    assert len(data) == rows


def test_padding_to_a_divisor_goes_round_from_the_first_row() -> None:
    padded, size = pad_dataproto_to_divisor(numbered(2), 7)
    assert size == 5
    assert numbers_of(padded) == [0, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("size", [3, -1])
def test_unpadding_more_than_there_is_is_refused(size: int) -> None:
    with pytest.raises(UsageError):
        unpad_dataproto(numbered(2), size)


DERIVED: dict[str, Callable[[DataProto], DataProto]] = {
    "select": lambda data: data.select(["x"]),
    "select without meta": lambda data: data.select(meta_info_keys=[]),
    "slice": lambda data: data[:1],
    "list": lambda data: data[[0]],
    "chunk": lambda data: data.chunk(2)[0],
    "concat": lambda data: DataProto.concat([data, data]),
}


@pytest.mark.parametrize("way", DERIVED)
def test_auto_padding_stays(way: str) -> None:
    data = DataProto.from_dict({"x": torch.ones(2)}, auto_padding=True)
    assert DERIVED[way](data).is_padding_enabled()


def test_auto_padding_comes_from_a_single_dict_too() -> None:
    data = DataProto.from_single_dict({"x": torch.ones(2)}, auto_padding=True)
    assert data.is_padding_enabled()


def test_auto_padding_is_off_by_default_and_not_in_meta_info() -> None:
    data = DataProto.from_dict({"x": torch.ones(2)}, auto_padding=True)
    assert data.meta_info == {}
    assert not DataProto.from_dict({"x": torch.ones(2)}).is_padding_enabled()


def test_the_iterator_gives_all_rows_each_epoch() -> None:
    batches = list(numbered(4).make_iterator(2, epochs=2))
    assert [numbers_of(batch) for batch in batches] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert batches[0].meta_info == {"k": 1}


def shuffled(seed: int) -> list[int]:
    data = numbered(32).make_iterator(4, 2, seed=seed, dataloader_kwargs={"shuffle": True})
    return [number for batch in data for number in numbers_of(batch)]


def test_one_seed_gives_one_order_and_each_epoch_its_own() -> None:
    order = shuffled(1)
    assert order == shuffled(1)
    assert order != shuffled(2)
    assert order[:32] != order[32:]
    assert sorted(order[:32]) == list(range(32))


def test_an_iterator_that_does_not_divide_the_rows_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="5 rows are not divisible by mini_batch_size=2"):
        numbered(5).make_iterator(2, 1)


def test_an_iterator_takes_no_options_that_its_arguments_stand_for() -> None:
    with pytest.raises(UsageError, match="batch_size"):
        numbered(4).make_iterator(2, 1, dataloader_kwargs={"batch_size": 1})


def test_an_iterator_over_no_rows_ends_at_once() -> None:
    assert list(numbered(0).make_iterator(2, 3, dataloader_kwargs={"shuffle": True})) == []
