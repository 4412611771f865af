"""A DataProto through pickle, through copies, and on disk."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from asyncwg.protocol import DataProto
from tests.unit.test_protocol_rows import Rollout, numbered, numbers_of


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("rows", [0, 3])
def test_pickle_keeps_everything(rows: int) -> None:
    data = numbered(rows, Rollout)
    data.auto_padding = True
    again = through_pickle(data)
    assert type(again) is Rollout
    assert numbers_of(again) == list(range(rows))
    assert again.meta_info == {"k": 1}
    assert again.is_padding_enabled()


def test_pickle_keeps_attributes_of_a_subclass() -> None:
    data = numbered(1, Rollout)
    vars(data)["source"] = "here"
    assert through_pickle(data).source == "here"


def test_an_item_goes_through_pickle() -> None:
    assert int(through_pickle(numbered(3)[2]).batch["n"]) == 2


def test_the_pickler_meets_each_tensor_by_itself() -> None:
    seen: list[torch.Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                seen.append(value)
                return len(seen)
            return None

    data = numbered(3)
    Pickler(io.BytesIO()).dump(data)
    assert data.batch is not None
    pointers = {tensor.data_ptr() for tensor in seen}
    assert pointers == {data.batch["n"].data_ptr(), data.batch["sub", "n"].data_ptr()}


def test_a_locked_batch_arrives_unlocked() -> None:
    data = numbered(2)
    assert data.batch is not None
    data.batch.lock_()
    again = through_pickle(data)
    assert not again.batch.is_locked
    assert numbers_of(again) == [0, 1]


def test_a_batch_arrives_with_device_names_and_nested_batch_size() -> None:
    batch = TensorDict(
        {"sub": TensorDict({"x": torch.ones(2, 3)}, batch_size=[2, 3])},
        batch_size=[2],
        device="cpu",
    )
    batch.names = ["rows"]
    again = through_pickle(DataProto(batch)).batch
    assert again.device == torch.device("cpu")
    assert again.names == ["rows"]
    assert again["sub"].batch_size == (2, 3)


def test_a_batch_follows_its_tensors_to_another_device() -> None:
    batch = TensorDict({"x": torch.ones(2)}, batch_size=[2], device="cpu")
    function, (cls, state) = DataProto(batch).__reduce__()
    state["batch"].fields["x"] = torch.ones(2, device="meta")
    again = function(cls, state)
    assert again.batch["x"].is_meta
    assert again.batch.device == torch.device("meta")


def test_jagged_tensors_and_data_that_is_no_tensor_go_through_pickle() -> None:
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    batch = TensorDict({"j": jagged, "k": NonTensorData(5, batch_size=[2])}, batch_size=[2])
    again = through_pickle(DataProto(batch)).batch
    assert [len(row) for row in again["j"].unbind()] == [1, 2]
    assert again.get("k").data == 5


def test_a_lazy_stack_goes_through_pickle() -> None:
    rows = [TensorDict({"x": torch.ones(i + 1)}, batch_size=[]) for i in range(2)]
    again = through_pickle(DataProto(LazyStackedTensorDict(*rows)))
    assert [len(item.batch["x"]) for item in again] == [1, 2]


def test_a_shallow_copy_has_dicts_of_its_own_and_shares_tensors() -> None:
    data = numbered(2)
    copied = copy.copy(data)
    copied.meta_info["k"] = 2
    copied.pop(["n"], ["n"])
    assert data.meta_info == {"k": 1}
    assert numbers_of(data) == [0, 1]


def test_a_deep_copy_shares_nothing() -> None:
    data = numbered(2)
    copied = copy.deepcopy(data)
    assert copied.batch is not None
    copied.batch["n"][0] = 9
    copied.non_tensor_batch["n"][0].append(9)
    assert numbers_of(data) == [0, 1]
    assert data.non_tensor_batch["n"][0] == [0]


def test_a_file_gives_the_data_again(tmp_path: Path) -> None:
    numbered(3, Rollout).save_to_disk(tmp_path / "data.pkl")
    again = DataProto.load_from_disk(tmp_path / "data.pkl")
    assert type(again) is Rollout
    assert numbers_of(again) == [0, 1, 2]


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def test_a_failing_save_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "data.pkl"
    numbered(3).save_to_disk(path)
    with pytest.raises(RuntimeError, match="not me"):
        DataProto(meta_info={"x": _Unpicklable()}).save_to_disk(path)
    assert list(tmp_path.iterdir()) == [path]
    assert numbers_of(DataProto.load_from_disk(str(path))) == [0, 1, 2]


def test_a_few_rows_of_much_make_a_small_file(tmp_path: Path) -> None:
    data = DataProto.from_dict({"x": torch.zeros(100_000)})
    data[:2].save_to_disk(tmp_path / "data.pkl")
    assert (tmp_path / "data.pkl").stat().st_size < 10_000


def test_saving_keeps_data_that_is_no_tensor_in_the_batch(tmp_path: Path) -> None:
    batch = TensorDict(
        {"x": torch.ones(2, requires_grad=True), "k": NonTensorData(5, batch_size=[2])},
        batch_size=[2],
        device="cpu",
    )
    DataProto(batch).save_to_disk(tmp_path / "data.pkl")
    again = DataProto.load_from_disk(tmp_path / "data.pkl").batch
    assert again is not None
    assert again.get("k").data == 5
    assert again.device == torch.device("cpu")
    assert not again["x"].requires_grad


def test_a_file_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.pkl").write_bytes(pickle.dumps([1]))
    with pytest.raises(TypeError, match="holds a list, not a DataProto"):
        DataProto.load_from_disk(tmp_path / "other.pkl")
