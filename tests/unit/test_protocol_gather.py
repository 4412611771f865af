"""`all_gather_data_proto`: a world of one in this process, and its decisions without any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from asyncwg._data import gather
from asyncwg.errors import UsageError
from asyncwg.protocol import DataProto, all_gather_data_proto


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def odd_batch() -> DataProto:
    rows = 3
    wide = torch.arange(24.0).reshape(4, 6)[:rows]
    return DataProto.from_dict(
        {
            "column": wide.T[:rows],
            "strided": wide[:, ::2],
            "bf16": wide.bfloat16(),
            "fp8": wide.to(torch.float8_e4m3fn),
            "bool": wide > 5,
            "complex": torch.complex(wide, wide).conj(),
            "grad": torch.ones(rows, requires_grad=True),
            "no columns": torch.ones(rows, 0),
            "jagged": torch.nested.nested_tensor(
                [torch.ones(i + 1) for i in range(rows)], layout=torch.jagged
            ),
            "sub": TensorDict({"x": wide.reshape(rows, 3, 2)}, batch_size=[rows, 3]),
        },
        {"text": ["a", [1], None], "number": np.arange(rows)},
        {"k": 1},
    )


@pytest.mark.usefixtures("world")
def test_a_world_of_one_gets_its_own_rows_in_place() -> None:
    data, expected = odd_batch(), odd_batch()
    all_gather_data_proto(data)
    assert data.batch is not None
    assert expected.batch is not None
    assert list(data.batch.keys()) == list(expected.batch.keys())
    assert data.batch["sub"].batch_size == (3, 3)
    assert not data.batch["grad"].requires_grad
    data.check_consistency()
    data.union(expected)  # raises where a value differs


@pytest.mark.usefixtures("world")
def test_no_rows_are_gathered_to_no_rows() -> None:
    data = odd_batch()[:0]
    all_gather_data_proto(data, size=1)
    assert len(data) == 0
    assert data.batch is not None
    assert data.batch["bf16"].dtype == torch.bfloat16
    assert data.batch["bf16"].shape == (0, 6)


@pytest.mark.usefixtures("world")
def test_arrays_alone_are_gathered() -> None:
    data = DataProto.from_dict(non_tensors={"s": ["a", "b"]})
    all_gather_data_proto(data)
    assert data.non_tensor_batch["s"].tolist() == ["a", "b"]


@pytest.mark.usefixtures("world")
def test_a_wrong_size_is_refused() -> None:
    with pytest.raises(UsageError, match="size=2, but the process group has 1 ranks"):
        all_gather_data_proto(odd_batch(), size=2)


@pytest.mark.usefixtures("world")
def test_what_can_not_be_pickled_is_refused_and_changes_nothing() -> None:
    data = DataProto.from_dict({"x": torch.ones(1)}, {"s": [lambda: None]})
    batch = data.batch
    with pytest.raises(UsageError, match="the data of rank 0 can't travel"):
        all_gather_data_proto(data)
    assert data.batch is batch


def test_without_a_process_group_it_is_refused() -> None:
    with pytest.raises(UsageError, match="init_process_group"):
        all_gather_data_proto(odd_batch())


def described(data: DataProto) -> Any:
    batch = data.batch
    dense: dict[Any, Any] = {} if batch is None else dict(batch.items())
    return gather._describe(batch, dense, data.non_tensor_batch)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tensors": {"y": torch.ones(2)}}, r"rank 0 has batch\['x'\], 1 has not"),
        ({"tensors": {"x": torch.ones(2, 1)}}, r"a row of batch\['x'\] is .* on rank 1"),
        ({"tensors": {"x": torch.ones(2).long()}}, r"int64"),
        ({"non_tensors": {"x": ["a"]}}, "only one of ranks 0 and 1 has tensors"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(other: dict[str, Any], message: str) -> None:
    first = DataProto.from_dict({"x": torch.ones(3)})
    with pytest.raises(UsageError, match=message):
        gather._check_alike([described(first), described(DataProto.from_dict(**other))])
