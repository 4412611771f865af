"""A DataProto as the runtime cuts and joins it."""

from __future__ import annotations

from asyncwg import shards
from asyncwg.protocol import DataProto
from tests.unit.test_protocol_rows import Rollout, numbered, numbers_of


def test_the_runtime_sees_the_rows_of_a_subclass_too() -> None:
    assert shards.rows(numbered(3, Rollout)) == 3
    assert shards.rows(numbered(0)) == 0


def test_meta_info_alone_has_no_rows() -> None:
    assert shards.rows(DataProto(meta_info={"k": 1})) is None


def test_the_runtime_cuts_into_views() -> None:
    data = numbered(4)
    first, second = shards.cut(data, [(0, 1), (1, 4)])
    assert (numbers_of(first), numbers_of(second)) == ([0], [1, 2, 3])
    first.batch["n"][0] = 9
    assert data.batch is not None
    assert data.batch["n"][0] == 9


def test_the_runtime_pads_with_the_last_row_and_leaves_the_callers_alone() -> None:
    data = numbered(2)
    assert numbers_of(shards.pad(data, 2)) == [0, 1, 1, 1]
    assert numbers_of(data) == [0, 1]


def test_auto_padding_asks_the_runtime_for_padding() -> None:
    data = numbered(2)
    assert not shards.wants_padding(data)
    data.auto_padding = True
    assert shards.wants_padding(data)


def test_the_runtime_joins_with_empty_parts_and_without_copying_the_only_full_one() -> None:
    data = numbered(3)
    joined = shards.join([data[:0], data[:0], data])
    assert numbers_of(joined) == [0, 1, 2]
    assert data.batch is not None
    assert joined.batch["n"].data_ptr() == data.batch["n"].data_ptr()


def test_the_runtime_joins_meta_info_alone() -> None:
    parts = [DataProto(meta_info={"metrics": {"loss": i}}) for i in range(2)]
    assert shards.join(parts).meta_info == {"metrics": {"loss": [0, 1]}}
