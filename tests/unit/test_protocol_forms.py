"""What a DataProto is made from and turned into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from asyncwg.errors import UsageError
from asyncwg.protocol import DataProto, DataProtoItem


class Rollout(DataProto):
    """A subclass that users might write."""


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"ids": torch.arange(rows * 2).reshape(rows, 2)},
        non_tensors={"text": [f"row {i}" for i in range(rows)]},
        meta_info={"step": 7},
    )


def test_from_dict_leaves_the_callers_dicts_as_they_are() -> None:
    tensors = {"x": torch.ones(2)}
    non_tensors: dict[str, Any] = {"s": ["a", "b"]}
    meta = {"k": 1}
    data = DataProto.from_dict(tensors, non_tensors, meta)
    data.meta_info["new"] = 2
    data.non_tensor_batch["more"] = np.zeros(2)
    assert non_tensors == {"s": ["a", "b"]}
    assert meta == {"k": 1}
    assert set(tensors) == {"x"}


def test_the_constructor_does_not_keep_the_callers_dicts() -> None:
    arrays = {"s": np.zeros(2)}
    meta = {"k": 1}
    data = DataProto(None, arrays, meta)
    data.pop(non_tensor_batch_keys=["s"], meta_info_keys=["k"])
    assert set(arrays) == {"s"}
    assert meta == {"k": 1}


def test_a_list_of_lists_becomes_one_object_per_row() -> None:
    data = DataProto.from_dict(non_tensors={"turns": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["turns"].shape == (2,)
    assert data.non_tensor_batch["turns"].tolist() == [[1, 2], [3, 4]]


def test_from_dict_shares_tensors_and_arrays() -> None:
    tensor, array = torch.zeros(2), np.zeros(2)
    data = DataProto.from_dict({"x": tensor}, {"a": array})
    assert data.batch is not None
    assert data.batch["x"].data_ptr() == tensor.data_ptr()
    assert data.non_tensor_batch["a"] is array


def test_tensors_with_different_rows_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"tensors\['b'\] has 3 rows, tensors\['a'\] has 2"):
        DataProto.from_dict({"a": torch.ones(2), "b": torch.ones(3)})


def test_arrays_without_a_batch_must_have_equal_rows() -> None:
    with pytest.raises(UsageError, match=r"non_tensor_batch\['b'\] has 1 rows"):
        DataProto.from_dict(non_tensors={"a": ["x", "y"], "b": ["z"]})


def test_an_array_and_a_batch_must_have_equal_rows() -> None:
    with pytest.raises(UsageError, match=r"\['a'\] has 3 rows, batch has 2"):
        DataProto.from_dict({"x": torch.ones(2)}, {"a": np.zeros(3)})


def test_a_tensor_without_rows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"tensors\['x'\] has no rows"):
        DataProto.from_dict({"x": torch.tensor(1.0)})


def test_an_array_without_rows_is_refused() -> None:
    with pytest.raises(UsageError, match="no rows"):
        DataProto.from_dict(non_tensors={"x": np.asarray(1.0)})


@pytest.mark.parametrize("value", ["text", 3, torch.ones(2), {"a": 1}])
def test_what_is_neither_array_nor_list_is_refused_among_non_tensors(value: Any) -> None:
    with pytest.raises(TypeError, match=r"non_tensors\['x'\]"):
        DataProto.from_dict(non_tensors={"x": value})


def test_what_is_no_tensor_is_refused_among_tensors() -> None:
    with pytest.raises(TypeError, match=r"tensors\['x'\] is a list"):
        DataProto.from_dict({"x": [1, 2]})


def test_two_batch_dimensions_are_refused() -> None:
    with pytest.raises(UsageError, match="num_batch_dims=2"):
        DataProto.from_dict({"x": torch.ones(2, 3)}, num_batch_dims=2)


def test_a_batch_with_two_batch_dimensions_is_refused() -> None:
    with pytest.raises(UsageError, match="one batch dimension"):
        DataProto(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2, 3]))


def test_a_plain_dict_as_batch_is_refused_with_the_right_call() -> None:
    with pytest.raises(TypeError, match="from_dict"):
        DataProto({"x": torch.ones(2)})  # type: ignore[arg-type]


def test_a_list_as_array_is_refused_with_the_right_call() -> None:
    with pytest.raises(TypeError, match="from_dict"):
        DataProto(None, {"x": [1, 2]})  # type: ignore[dict-item]


def test_from_single_dict_sorts_by_type() -> None:
    data = DataProto.from_single_dict({"x": torch.ones(2), "a": np.zeros(2)}, {"k": 1})
    assert data.batch is not None
    assert set(data.batch.keys()) == {"x"}
    assert set(data.non_tensor_batch) == {"a"}
    assert data.meta_info == {"k": 1}


def test_from_single_dict_refuses_anything_else() -> None:
    with pytest.raises(ValueError, match=r"data\['x'\] is a list"):
        DataProto.from_single_dict({"x": [1, 2]})


def test_all_ways_of_making_one_keep_the_subclass() -> None:
    made = [
        Rollout.from_dict({"x": torch.ones(2)}),
        Rollout.from_single_dict({"x": torch.ones(2)}),
        Rollout.from_tensordict(TensorDict({"x": torch.ones(2)}, batch_size=[2])),
    ]
    assert [type(one) for one in made] == [Rollout] * 3


def test_from_tensordict_sorts_stacks_into_arrays_and_data_into_meta() -> None:
    stack = NonTensorStack(*[NonTensorData(o) for o in ("a", [1, 2])])
    source = TensorDict(
        {"x": torch.ones(2), "s": stack, "k": NonTensorData(5, batch_size=[2])}, batch_size=[2]
    )
    data = DataProto.from_tensordict(source, {"more": 1})
    assert data.batch is not None
    assert set(data.batch.keys()) == {"x"}
    assert data.non_tensor_batch["s"].tolist() == ["a", [1, 2]]
    assert data.meta_info == {"k": 5, "more": 1}
    assert set(source.keys()) == {"x", "s", "k"}


def test_from_tensordict_keeps_one_of_several_batch_dimensions() -> None:
    data = DataProto.from_tensordict(TensorDict({"x": torch.ones(2, 3)}, batch_size=[2, 3]))
    assert data.batch is not None
    assert data.batch.batch_size == (2,)


def test_from_tensordict_refuses_one_without_rows() -> None:
    with pytest.raises(UsageError, match="no batch dimension"):
        DataProto.from_tensordict(TensorDict({"x": torch.ones(2)}, batch_size=[]))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_tensordict_gives_the_same_data_again(rows: int) -> None:
    data = batch_of(rows)
    again = DataProto.from_tensordict(data.to_tensordict())
    assert again.batch is not None
    assert data.batch is not None
    assert torch.equal(again.batch["ids"], data.batch["ids"])
    assert again.non_tensor_batch["text"].tolist() == data.non_tensor_batch["text"].tolist()
    assert again.meta_info == data.meta_info


@pytest.mark.parametrize(
    "array", [np.arange(4), np.ones((4, 2), np.float32), np.asarray(["a", "b", "c", "d"])]
)
def test_a_numeric_array_keeps_dtype_and_shape_through_a_tensordict(array: Any) -> None:
    data = DataProto.from_dict(non_tensors={"a": array})
    again = DataProto.from_tensordict(data.to_tensordict()).non_tensor_batch["a"]
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)


def test_to_tensordict_does_not_change_the_data() -> None:
    data = batch_of(2)
    data.to_tensordict()
    assert data.batch is not None
    assert set(data.batch.keys()) == {"ids"}


def test_to_tensordict_works_without_tensors() -> None:
    made = DataProto.from_dict(non_tensors={"s": ["a", "b"]}).to_tensordict()
    assert made.batch_size == (2,)


def test_to_tensordict_names_a_key_that_stands_twice() -> None:
    data = DataProto.from_dict({"x": torch.ones(2)}, meta_info={"x": 1})
    with pytest.raises(UsageError, match="'x' is in batch and in meta_info"):
        data.to_tensordict()


def test_get_data_info_names_all_parts() -> None:
    info = batch_of(2).get_data_info()
    assert "batch['ids']: (2, 2) torch.int64 cpu" in info
    assert "non_tensor_batch['text']: (2,) object" in info
    assert "meta_info['step']: int" in info


def test_print_size_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    batch_of(2).print_size("rollout")
    assert capsys.readouterr().out.startswith("rollout, tensors: 0.0")


def test_to_moves_in_place_and_returns_self() -> None:
    data = batch_of(2)
    assert data.to("meta") is data
    assert data.batch is not None
    assert data.batch["ids"].is_meta


def test_to_does_nothing_without_tensors() -> None:
    data = DataProto(meta_info={"k": 1})
    assert data.to("cpu") is data


def test_an_item_holds_one_row() -> None:
    item = batch_of(3)[1]
    assert isinstance(item, DataProtoItem)
    assert item.batch is not None
    assert item.batch["ids"].tolist() == [2, 3]
    assert item.non_tensor_batch == {"text": "row 1"}
    assert item.meta_info == {"step": 7}
