"""The columns of a DataProto: select, pop, rename and union."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncwg.errors import UsageError
from asyncwg.protocol import (
    DataProto,
    list_of_dict_to_dict_of_list,
    union_numpy_dict,
    union_tensor_dict,
)


class Rollout(DataProto):
    """A subclass that users might write."""


def sample(cls: type[DataProto] = DataProto) -> DataProto:
    return cls.from_dict(
        {
            "a": torch.ones(2),
            "b": torch.zeros(2),
            "sub": TensorDict({"x": torch.ones(2), "y": torch.ones(2)}, batch_size=[2]),
        },
        {"s": ["p", "q"]},
        {"k": 1, "l": [1]},
    )


def keys(data: DataProto) -> set[Any]:
    return set() if data.batch is None else set(data.batch.keys())


def test_select_keeps_what_is_named_and_all_of_what_is_not() -> None:
    data = sample().select(batch_keys=["a"], meta_info_keys=["k"])
    assert keys(data) == {"a"}
    assert set(data.non_tensor_batch) == {"s"}
    assert data.meta_info == {"k": 1}


def test_select_of_no_tensors_keeps_the_rows() -> None:
    assert len(sample().select(batch_keys=[], non_tensor_batch_keys=[])) == 2


def test_select_reaches_into_nested_tensordicts() -> None:
    data = sample().select(batch_keys=[("sub", "x")])
    assert data.batch is not None
    assert set(data.batch["sub"].keys()) == {"x"}


@pytest.mark.parametrize("argument", ["batch_keys", "non_tensor_batch_keys", "meta_info_keys"])
@pytest.mark.parametrize("method", ["select", "pop"])
def test_a_missing_key_is_a_key_error_that_names_it(method: str, argument: str) -> None:
    with pytest.raises(KeyError, match=f"{argument} names 'missing'"):
        getattr(sample(), method)(**{argument: ["missing"]})


def test_a_string_instead_of_a_list_of_keys_is_refused() -> None:
    with pytest.raises(TypeError, match="list of keys"):
        sample().select(batch_keys="ab")


def test_what_is_popped_from_a_selection_stays_in_its_source() -> None:
    data = sample()
    data.select().pop(["a"], ["s"], ["k"])
    assert "a" in keys(data)
    assert "s" in data.non_tensor_batch
    assert "k" in data.meta_info


def test_select_shares_tensors_unless_a_deep_copy_is_asked_for() -> None:
    data = sample()
    assert data.batch is not None
    shared, copied = data.select().batch, data.select(deepcopy=True).batch
    assert shared is not None
    assert copied is not None
    data.batch["a"][0] = 9
    assert shared["a"][0] == 9
    assert copied["a"][0] == 1


def test_a_deep_copy_has_its_own_arrays_and_meta_values() -> None:
    data = sample()
    copied = data.select(deepcopy=True)
    data.non_tensor_batch["s"][0] = "changed"
    data.meta_info["l"].append(2)
    assert copied.non_tensor_batch["s"][0] == "p"
    assert copied.meta_info["l"] == [1]


def test_pop_removes_in_place_and_returns_the_subclass() -> None:
    data = sample(Rollout)
    popped = data.pop(["a"], ["s"], ["k"])
    assert type(popped) is Rollout
    assert (keys(popped), set(popped.non_tensor_batch), popped.meta_info) == (
        {"a"},
        {"s"},
        {"k": 1},
    )
    assert (keys(data), set(data.non_tensor_batch), data.meta_info) == (
        {"b", "sub"},
        set(),
        {"l": [1]},
    )


def test_a_failing_pop_removes_nothing() -> None:
    data = sample()
    with pytest.raises(KeyError):
        data.pop(["a"], ["s"], ["missing"])
    assert "a" in keys(data)
    assert "s" in data.non_tensor_batch


def test_pop_of_everything_keeps_the_number_of_rows() -> None:
    data = sample()
    data.pop(["a", "b", "sub"], ["s"])
    assert len(data) == 2


def test_pop_leaves_the_callers_tensordict_as_it_is() -> None:
    source = TensorDict({"a": torch.ones(2)}, batch_size=[2])
    DataProto(source).pop(["a"])
    assert set(source.keys()) == {"a"}


def test_rename_is_in_place_and_returns_self() -> None:
    data = sample()
    assert data.rename("a", "c") is data
    assert keys(data) == {"c", "b", "sub"}


def test_rename_can_swap() -> None:
    data = sample().rename(["a", "b"], ["b", "a"])
    assert data.batch is not None
    assert data.batch["b"].tolist() == [1, 1]
    assert data.batch["a"].tolist() == [0, 0]


def test_rename_does_not_overwrite() -> None:
    with pytest.raises(UsageError, match=r"overwrite batch\['b'\]"):
        sample().rename("a", "b")


def test_rename_names_a_missing_key() -> None:
    with pytest.raises(KeyError, match="'z'"):
        sample().rename(["z"], ["y"])


def test_rename_needs_one_new_name_per_key() -> None:
    with pytest.raises(UsageError, match="one new name"):
        sample().rename(["a", "b"], ["c"])


def test_union_is_in_place_and_returns_self() -> None:
    data = sample()
    other = DataProto.from_dict({"c": torch.ones(2)}, {"t": ["u", "v"]}, {"m": 2})
    assert data.union(other) is data
    assert keys(data) == {"a", "b", "sub", "c"}
    assert set(data.non_tensor_batch) == {"s", "t"}
    assert data.meta_info == {"k": 1, "l": [1], "m": 2}


def test_union_takes_equal_values_twice() -> None:
    assert keys(sample().union(sample())) == {"a", "b", "sub"}


NAN = float("nan")


@pytest.mark.parametrize(
    "parts",
    [
        {"tensors": {"x": torch.tensor([1.0, NAN])}},
        {"tensors": {"x": torch.tensor([NAN, 1.0]).bfloat16()}},
        {"tensors": {"x": torch.tensor([NAN, 1.0]).to(torch.float8_e4m3fn)}},
        {"tensors": {"x": torch.tensor([complex(NAN, 1.0), 1.0])}},
        {"non_tensors": {"x": np.asarray([1.0, NAN])}},
        {"non_tensors": {"x": [[NAN], {"y": NAN}]}},
        {"meta_info": {"x": NAN, "y": [np.float32("nan")]}},
    ],
)
def test_nan_is_the_same_as_nan_in_a_union(parts: dict[str, Any]) -> None:
    one, other = DataProto.from_dict(**parts), DataProto.from_dict(**parts)
    if one.batch is not None and other.batch is not None:
        other.batch = other.batch.clone()  # else the tensors are not only equal but the same
    one.union(other)


@pytest.mark.parametrize(
    ("parts", "others"),
    [
        (
            {"tensors": {"x": torch.tensor([1.0, NAN])}},
            {"tensors": {"x": torch.tensor([NAN, 1.0])}},
        ),
        ({"tensors": {"x": torch.ones(2)}}, {"tensors": {"x": torch.ones(2, 1)}}),
        ({"tensors": {"x": torch.ones(2)}}, {"tensors": {"x": torch.ones(2).long()}}),
        ({"non_tensors": {"x": [[1], [2]]}}, {"non_tensors": {"x": [[1], [3]]}}),
        ({"meta_info": {"x": np.ones(2)}}, {"meta_info": {"x": np.zeros(2)}}),
        ({"meta_info": {"x": torch.ones(2)}}, {"meta_info": {"x": [1.0, 1.0]}}),
    ],
)
def test_other_values_under_one_key_are_refused_by_name(
    parts: dict[str, Any], others: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=r"\['x'\] is in both"):
        DataProto.from_dict(**parts).union(DataProto.from_dict(**others))


def test_a_failing_union_changes_nothing() -> None:
    data = sample()
    with pytest.raises(UsageError):
        data.union(DataProto.from_dict({"c": torch.ones(2)}, meta_info={"k": 2}))
    assert keys(data) == {"a", "b", "sub"}


def test_union_compares_values_that_contain_themselves() -> None:
    def looped() -> list[Any]:
        value: list[Any] = [1]
        value.append(value)
        return value

    DataProto(meta_info={"x": looped()}).union(DataProto(meta_info={"x": looped()}))


def test_union_needs_equal_rows() -> None:
    with pytest.raises(UsageError, match="2 rows here and 3 in the other"):
        sample().union(DataProto.from_dict({"c": torch.ones(3)}))


def test_union_gives_tensors_to_one_without() -> None:
    data = DataProto(meta_info={"m": 1}).union(sample())
    assert keys(data) == {"a", "b", "sub"}


def test_union_takes_only_a_dataproto() -> None:
    with pytest.raises(TypeError, match="dict"):
        sample().union({})  # type: ignore[arg-type]


def test_a_locked_batch_can_be_changed_through_its_dataproto() -> None:
    data = sample()
    assert data.batch is not None
    data.batch.lock_()
    data.rename("a", "c").union(DataProto.from_dict({"d": torch.ones(2)})).pop(["b"])
    assert keys(data) == {"c", "d", "sub"}


def test_tensordicts_are_united_in_place() -> None:
    first = TensorDict({"a": torch.arange(2)}, [2])
    second = TensorDict({"a": torch.arange(2), "b": torch.ones(2)}, [2])
    assert union_tensor_dict(first, second) is first
    assert set(first.keys()) == {"a", "b"}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (TensorDict({"b": torch.ones(2), "a": torch.ones(2)}, [2]), r"tensor_dict\['a'\]"),
        (TensorDict({"b": torch.ones(3)}, [3]), "batch sizes differ"),
    ],
    ids=["values", "rows"],
)
def test_tensordicts_that_do_not_fit_are_not_united(other: TensorDict, told: str) -> None:
    first = TensorDict({"a": torch.zeros(2)}, [2])
    with pytest.raises(UsageError, match=told):
        union_tensor_dict(first, other)
    assert set(first.keys()) == {"a"}


def test_dicts_of_arrays_are_united_in_place_and_nan_is_the_same_as_nan() -> None:
    first = {"a": np.array([1.0, np.nan])}
    assert union_numpy_dict(first, {"a": np.array([1.0, np.nan]), "b": np.ones(2)}) is first
    assert set(first) == {"a", "b"}
    with pytest.raises(UsageError, match=r"non_tensor_batch\['a'\]"):
        union_numpy_dict(first, {"a": np.zeros(2), "c": np.ones(2)})
    assert set(first) == {"a", "b"}


def test_a_list_of_dicts_becomes_a_dict_of_lists() -> None:
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"b": 3, "a": 4}]) == {
        "a": [1, 4],
        "b": [2, 3],
    }
    assert list_of_dict_to_dict_of_list([]) == {}


@pytest.mark.parametrize(
    ("second", "told"), [({"a": 1, "b": 2}, "has the key 'b'"), ({}, "lacks the key 'a'")]
)
def test_dicts_with_other_keys_are_refused_by_key(second: dict[str, int], told: str) -> None:
    with pytest.raises(UsageError, match=f"dict 1 {told}"):
        list_of_dict_to_dict_of_list([{"a": 1}, second])
