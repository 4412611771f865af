"""Choosing rows of a DataProto: indexing, repeating, reordering, folding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from asyncwg.errors import UsageError
from asyncwg.protocol import (
    DataProto,
    DataProtoItem,
    collate_fn,
    fold_batch_dim,
    unfold_batch_dim,
)


class Rollout(DataProto):
    """A subclass with an attribute of its own."""

    source = "unset"


def numbered(rows: int, cls: type[DataProto] = DataProto) -> DataProto:
    """Rows whose tensor, nested tensor and array all hold the row's number."""
    numbers = torch.arange(rows)
    return cls.from_dict(
        tensors={"n": numbers, "sub": TensorDict({"n": numbers[:, None]}, batch_size=[rows])},
        non_tensors={"n": [[i] for i in range(rows)]},
        meta_info={"k": 1},
    )


def numbers_of(data: DataProto) -> list[int]:
    """The rows' numbers, after checking that all parts agree on them."""
    assert data.batch is not None
    numbers: list[int] = data.batch["n"].tolist()
    assert data.batch["sub", "n"].flatten().tolist() == numbers
    assert [row[0] for row in data.non_tensor_batch["n"]] == numbers
    assert data.batch.batch_size == (len(numbers),)
    data.check_consistency()
    return numbers


def test_length_is_the_number_of_rows() -> None:
    assert len(numbered(3)) == 3
    assert len(DataProto.from_dict(non_tensors={"s": ["a", "b"]})) == 2
    assert len(DataProto(meta_info={"k": 1})) == 0


def test_iterating_gives_items_and_ends() -> None:
    items = list(numbered(3))
    assert all(isinstance(item, DataProtoItem) for item in items)
    assert [int(item.batch["n"]) for item in items if item.batch is not None] == [0, 1, 2]


@pytest.mark.parametrize("index", [1, -2, np.int64(1), torch.tensor(1), np.asarray(1)])
def test_an_integer_gives_an_item(index: Any) -> None:
    assert numbered(3)[index].non_tensor_batch["n"] == [1]


@pytest.mark.parametrize("index", [3, -4])
def test_a_row_that_does_not_exist_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match="3 rows"):
        numbered(3)[index]


@pytest.mark.parametrize("index", [(0, 1), "n", 1.0, None, True])
def test_other_indices_are_type_errors(index: Any) -> None:
    with pytest.raises(TypeError):
        numbered(3)[index]


@given(st.integers(0, 6), st.slices(6))
def test_a_slice_gives_the_rows_that_a_list_would(rows: int, index: slice) -> None:
    data = numbered(rows)
    assert numbers_of(data[index]) == list(range(rows))[index]


def test_a_slice_gives_views() -> None:
    data = numbered(4)
    part = data[1:3]
    assert part.batch is not None
    part.batch["n"][0] = 9
    part.non_tensor_batch["n"][0] = [9]
    part.batch["sub", "n"][0] = 9
    assert numbers_of(data) == [0, 9, 2, 3]


@pytest.mark.parametrize(
    "index",
    [
        [2, 0, -1],
        np.asarray([2, 0, -1]),
        torch.tensor([2, 0, -1]),
        torch.tensor([2, 0, 2], dtype=torch.uint8),
    ],
)
def test_rows_are_chosen_by_lists_arrays_and_tensors(index: Any) -> None:
    assert numbers_of(numbered(3)[index]) == [2, 0, 2]


@pytest.mark.parametrize(
    "mask",
    [
        [True, False, True],
        np.asarray([True, False, True]),
        torch.tensor([True, False, True]),
    ],
)
def test_rows_are_chosen_by_masks(mask: Any) -> None:
    assert numbers_of(numbered(3)[mask]) == [0, 2]


@pytest.mark.parametrize("index", [[], np.asarray([], bool), torch.tensor([], dtype=torch.long)])
def test_an_empty_index_gives_no_rows(index: Any) -> None:
    assert numbers_of(numbered(0)[index]) == []


def test_a_mask_of_another_length_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="mask has 2 entries"):
        numbered(3)[[True, False]]


@pytest.mark.parametrize("index", [[0.5], torch.tensor([0.5]), [[0, 1]], [[0], [1, 2]]])
def test_rows_are_not_chosen_by_anything_else(index: Any) -> None:
    with pytest.raises(TypeError):
        numbered(3).select_idxs(index)


def test_chosen_rows_are_copies() -> None:
    data = numbered(2)
    chosen = data[[0, 1]]
    assert chosen.batch is not None
    chosen.batch["n"][0] = 9
    assert numbers_of(data) == [0, 1]


DERIVED: dict[str, Callable[[DataProto], DataProto | DataProtoItem]] = {
    "slice": lambda data: data[1:],
    "list": lambda data: data[[0]],
    "select": lambda data: data.select(),
    "repeat": lambda data: data.repeat(2),
    "chunk": lambda data: data.chunk(2)[0],
    "padding": lambda data: data.padding(1),
    "item": lambda data: data[0],
    "concat": lambda data: DataProto.concat([data, data]),
}


@pytest.mark.parametrize("way", DERIVED)
def test_a_result_has_a_meta_info_of_its_own(way: str) -> None:
    data = numbered(2)
    DERIVED[way](data).meta_info["k"] = 2
    assert data.meta_info == {"k": 1}


def test_results_keep_the_subclass_and_its_attributes() -> None:
    data = numbered(4, Rollout)
    assert isinstance(data, Rollout)
    data.source = "here"
    results = [data[1:], data[[0]], data.repeat(2), data.select(), data.split(2)[1]]
    assert all(type(one) is Rollout and one.source == "here" for one in results)


def test_reorder_is_in_place() -> None:
    data = numbered(3)
    data.reorder(torch.tensor([2, 0, 1]))
    assert numbers_of(data) == [2, 0, 1]


@pytest.mark.parametrize("index", [[0, 1], [0, 0, 1], [0, 1, 2, 2]])
def test_reorder_takes_each_row_once(index: list[int]) -> None:
    data = numbered(3)
    with pytest.raises(UsageError, match="select_idxs"):
        data.reorder(index)
    assert numbers_of(data) == [0, 1, 2]


@given(st.integers(0, 4), st.integers(0, 3))
def test_repeat_puts_copies_side_by_side_or_behind_each_other(rows: int, times: int) -> None:
    data = numbered(rows)
    assert numbers_of(data.repeat(times)) == [i for i in range(rows) for _ in range(times)]
    assert numbers_of(data.repeat(times, interleave=False)) == list(range(rows)) * times


@pytest.mark.parametrize("times", [-1, True, 1.5])
def test_repeat_takes_a_count(times: Any) -> None:
    with pytest.raises((UsageError, TypeError), match="repeat_times"):
        numbered(2).repeat(times)


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, torch.tensor])
def test_each_row_can_have_its_own_count(kind: Any) -> None:
    assert numbers_of(numbered(3).sample_level_repeat(kind([2, 0, 1]))) == [0, 0, 2]


def test_sample_level_repeat_needs_one_count_per_row() -> None:
    with pytest.raises(UsageError, match="2 counts, the data 3 rows"):
        numbered(3).sample_level_repeat([1, 2])


@given(st.integers(0, 4), st.integers(1, 3))
def test_unfolding_undoes_folding(rows: int, per_row: int) -> None:
    data = numbered(rows * per_row)
    folded = fold_batch_dim(data, max(rows, 1))
    assert len(folded) == max(rows, 1)
    assert numbers_of(unfold_batch_dim(folded)) == numbers_of(data)


def test_folding_leaves_its_input_as_it_is() -> None:
    data = numbered(4)
    folded = fold_batch_dim(data, 2)
    assert folded.non_tensor_batch["n"].shape == (2, 2)
    assert folded.batch is not None
    assert folded.batch["sub", "n"].shape == (2, 2, 1)
    unfold_batch_dim(folded)
    assert folded.batch.batch_size == (2,)
    assert numbers_of(data) == [0, 1, 2, 3]


def test_a_folded_batch_can_be_indexed() -> None:
    assert numbers_of(unfold_batch_dim(fold_batch_dim(numbered(6), 3)[[2, 0]])) == [4, 5, 0, 1]


def test_folding_needs_divisible_rows() -> None:
    with pytest.raises(UsageError, match="5 rows can't be folded into 2"):
        fold_batch_dim(numbered(5), 2)


def test_unfolding_names_the_part_that_does_not_fit() -> None:
    data = DataProto.from_dict({"a": torch.ones(2, 3), "b": torch.ones(2, 4)})
    with pytest.raises(UsageError, match=r"batch\['b'\] has shape \(2, 4\)"):
        unfold_batch_dim(data)


def test_unfold_column_chunks_cuts_columns_and_repeats_the_rest() -> None:
    data = DataProto.from_dict(
        {"pair": torch.arange(8).reshape(2, 4), "one": torch.tensor([5, 6])},
        {"pair": np.arange(4).reshape(2, 2), "s": ["a", "b"]},
    )
    unfolded = data.unfold_column_chunks(2, ["pair"])
    assert unfolded.batch is not None
    assert unfolded.batch["pair"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["one"].tolist() == [5, 5, 6, 6]
    assert unfolded.non_tensor_batch["pair"].tolist() == [[0], [1], [2], [3]]
    assert unfolded.non_tensor_batch["s"].tolist() == ["a", "a", "b", "b"]


def test_unfold_column_chunks_without_keys_repeats_all() -> None:
    assert numbers_of(numbered(2).unfold_column_chunks(2)) == [0, 0, 1, 1]


def test_unfold_column_chunks_names_what_it_can_not_cut() -> None:
    data = DataProto.from_dict({"x": torch.ones(2, 3)})
    with pytest.raises(UsageError, match=r"batch\['x'\] of shape \(2, 3\) into 2"):
        data.unfold_column_chunks(2, ["x"])


def test_unfold_column_chunks_names_a_missing_key() -> None:
    with pytest.raises(KeyError, match="split_keys names 'y'"):
        numbered(2).unfold_column_chunks(2, ["y"])


def test_jagged_tensors_are_sliced_chosen_and_repeated() -> None:
    rows = [torch.arange(i + 1.0) for i in range(3)]
    data = DataProto.from_dict({"x": torch.nested.nested_tensor(rows, layout=torch.jagged)})
    for part, expected in ((data[1:], [1, 2]), (data[[2, 0]], [2, 0]), (data.repeat(1), [0, 1, 2])):
        assert part.batch is not None
        assert [row.tolist() for row in part.batch["x"].unbind()] == [
            rows[i].tolist() for i in expected
        ]


def test_a_sparse_tensor_is_refused_by_name_when_rows_are_cut() -> None:
    data = DataProto.from_dict({"x": torch.eye(3).to_sparse()})
    with pytest.raises(TypeError, match=r"batch\['x'\] can't be split by rows"):
        data.slice(0, 1)


def test_collated_rows_are_those_of_the_data_with_the_dtypes_of_its_arrays() -> None:
    data = numbered(4)
    data.non_tensor_batch["weight"] = np.arange(4, dtype=np.float32)
    data.non_tensor_batch["pair"] = np.arange(8).reshape(4, 2)
    chosen = collate_fn([data[2], data[0]])
    assert numbers_of(chosen) == [2, 0]
    expected = data.select_idxs([2, 0])
    for key, array in chosen.non_tensor_batch.items():
        assert array.dtype == expected.non_tensor_batch[key].dtype
        assert array.tolist() == expected.non_tensor_batch[key].tolist()
    assert chosen.meta_info == {}


def test_collated_rows_are_copies() -> None:
    data = numbered(2)
    chosen = collate_fn(list(data))
    assert chosen.batch is not None
    chosen.batch["n"][:] = 7
    assert numbers_of(data) == [0, 1]


def test_rows_without_tensors_are_collated() -> None:
    data = DataProto.from_dict(non_tensors={"name": ["a", "b"]})
    assert list(collate_fn(list(data)).non_tensor_batch["name"]) == ["a", "b"]


def test_rows_that_do_not_fit_are_not_collated() -> None:
    other = DataProto.from_dict({"n": torch.arange(2)})
    with pytest.raises(UsageError, match="at least one row"):
        collate_fn([])
    with pytest.raises(UsageError, match="sub"):
        collate_fn([numbered(2)[0], other[1]])
    with pytest.raises(UsageError, match="rows 0 and 1 has a batch"):
        collate_fn([other[0], DataProto.from_dict(non_tensors={"a": [1]})[0]])
