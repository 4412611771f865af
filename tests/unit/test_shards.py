from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, tensorclass

from asyncwg import shards
from asyncwg.errors import DispatchError
from asyncwg.shards import Handler


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    words: list[str]
    scale: float


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    count: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.x)


@dataclasses.dataclass
class WithInitVar:
    x: torch.Tensor
    factor: dataclasses.InitVar[int]

    def __post_init__(self, factor: int) -> None:
        self.x = self.x * factor


@tensorclass
class Rows:
    x: torch.Tensor


class Pages:
    """A type of somebody else's, with rows."""

    def __init__(self, pages: Sequence[int], greedy: bool = False) -> None:
        self.pages, self.greedy = tuple(pages), greedy


PAGES = Handler(
    rows=lambda value: len(value.pages),
    cut=lambda value, bounds: [Pages(value.pages[a:b]) for a, b in bounds],
    pad=lambda value, count: Pages(value.pages + value.pages[-1:] * count),
    join=lambda parts: Pages([page for part in parts for page in part.pages]),
    wants_padding=lambda value: bool(value.greedy),
)


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shards, "_registry", dict(shards._registry))
    shards.register_shardable(Pages, PAGES)
    yield
    shards._found.clear()


def batches(rows: int) -> dict[str, Any]:
    """One value of each kind, with so many rows."""
    numbers = torch.arange(rows * 2).reshape(rows, 2)
    structured = np.zeros(rows, dtype=[("a", "i4"), ("b", "U3")])
    structured["a"] = np.arange(rows)
    objects = np.empty(rows, dtype=object)
    objects[:] = [{"row": i} for i in range(rows)]
    return {
        "tensor": numbers,
        "bfloat16": numbers.to(torch.bfloat16),
        "bool": numbers % 3 == 0,
        "sparse": numbers.to_sparse(),
        "strided view": torch.arange(rows * 4).reshape(4, rows).t(),
        "array": np.arange(rows * 3).reshape(rows, 3),
        "strings": np.array([f"w{i}" for i in range(rows)], dtype="U4"),
        "objects": objects,
        "structured": structured,
        "masked": np.ma.array(np.arange(rows), mask=np.arange(rows) % 2 == 1),
        "list": [f"w{i}" for i in range(rows)],
        "tensordict": TensorDict({"x": numbers, "in": {"y": numbers[:, 0]}}, [rows]),
        "tensorclass": Rows.from_dict({"x": numbers}, batch_size=[rows]),  # type: ignore[attr-defined]
        "dict": {"x": numbers, "in": {"y": np.arange(rows)}, "l": list(range(rows)), "k": 2},
        "dataclass": Frozen(numbers, [f"w{i}" for i in range(rows)], 0.5),
    }


KINDS = sorted(batches(1))


def plain(value: Any) -> Any:
    """Return rows and dtypes in a form that ``==`` understands."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.to_dense().tolist()
    if isinstance(value, np.ndarray):
        return type(value), value.dtype, value.shape, value.tolist()
    if isinstance(value, Rows):
        return plain(value.x)
    if isinstance(value, TensorDict):
        return {key: plain(entry) for key, entry in sorted(value.to_dict().items())}
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, Frozen | Derived):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    return value


def without_whole(value: Any) -> Any:
    """Leave out the entries without rows, which become lists when joined."""
    if not isinstance(value, dict):
        return value
    return {key: entry for key, entry in value.items() if key not in ("k", "scale")}


@st.composite
def cuts(draw: st.DrawFn) -> list[tuple[int, int]]:
    inner = sorted(draw(st.lists(st.integers(0, 7), max_size=4)))
    edges = [0, *inner, 7]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(bounds=cuts())
def test_cut_then_join_is_the_identity(kind: str, bounds: list[tuple[int, int]]) -> None:
    value = batches(7)[kind]
    joined = shards.join(shards.cut(value, bounds))
    assert without_whole(plain(joined)) == without_whole(plain(value))
    assert type(joined) is type(value)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_rows_between_their_bounds(kind: str) -> None:
    value = batches(7)[kind]
    parts = shards.cut(value, [(0, 3), (3, 3), (3, 7)])
    assert [shards.rows(part) for part in parts] == [3, 0, 4]
    assert plain(parts[2]) == plain(shards.cut(value, [(3, 7)])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_padding_repeats_the_last_row_and_trimming_takes_it_away(kind: str) -> None:
    value = batches(3)[kind]
    padded = shards.pad(value, 2)
    assert shards.rows(padded) == 5
    assert plain(shards.trim(padded, 3)) == plain(value)
    last = shards.cut(value, [(2, 3)])[0]
    assert plain(shards.cut(padded, [(4, 5)])[0]) == plain(last)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_leaves_the_value_as_it_was(kind: str) -> None:
    value = batches(3)[kind]
    before = plain(copy.deepcopy(value))
    assert shards.pad(value, 2) is not value
    assert plain(value) == before


@pytest.mark.parametrize("kind", KINDS)
def test_empty_shards_join_to_no_rows_of_the_right_dtype(kind: str) -> None:
    value = batches(0)[kind]
    joined = shards.join(shards.cut(value, [(0, 0), (0, 0)]))
    assert without_whole(plain(joined)) == without_whole(plain(value))


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_can_not_be_padded(kind: str) -> None:
    with pytest.raises(DispatchError, match="without rows can't be padded"):
        shards.pad(batches(0)[kind], 1)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(1), np.array(1), "ab", b"ab", (1, 2), 1, None, {}, {"a": 1}, TensorDict()],
)
def test_what_has_no_first_dimension_has_no_rows(value: Any) -> None:
    assert shards.rows(value) is None
    with pytest.raises(DispatchError, match="has no rows"):
        shards.cut(value, [(0, 1)])


def test_tensors_and_arrays_are_cut_into_views() -> None:
    tensor, array = torch.arange(4), np.arange(4)
    assert shards.cut(tensor, [(2, 4)])[0].data_ptr() == tensor[2:].data_ptr()
    assert np.shares_memory(shards.cut(array, [(2, 4)])[0], array)


def test_joining_one_part_copies_nothing() -> None:
    tensor = torch.arange(4)
    assert shards.join([tensor[:0], tensor]) is tensor


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.jagged])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_layout_that_has_no_rows_to_cut_is_refused(layout: torch.layout) -> None:
    dense = torch.ones(2, 2)
    value = (
        dense.to_sparse_csr()
        if layout is torch.sparse_csr
        else torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=layout)
    )
    with pytest.raises(DispatchError, match=r"make it dense or sparse_coo.*Replicate"):
        shards.cut(value, [(0, 1), (1, 2)])


def test_an_empty_part_does_not_decide_the_dtype() -> None:
    assert shards.join([torch.tensor([]), torch.tensor([1, 2])]).dtype == torch.int64
    assert shards.join([np.array([]), np.array([1, 2])]).dtype == np.int64


def test_an_empty_tensordict_keeps_its_words() -> None:
    value = TensorDict({"x": torch.arange(2), "w": NonTensorStack("a", "b")}, [2])
    assert list(shards.join(shards.cut(value, [(0, 0), (0, 1), (1, 2)]))["w"]) == ["a", "b"]


def test_the_mask_of_an_array_survives() -> None:
    value = np.ma.array([1, 2, 3], mask=[False, True, False])
    assert shards.join([value[:2], value[2:]]).mask.tolist() == [False, True, False]
    assert shards.pad(value[:2], 1).mask.tolist() == [False, True, True]


def test_numbers_and_strings_are_not_joined_to_strings() -> None:
    with pytest.raises(DispatchError, match="dtypes differ: int64, <U1"):
        shards.join([np.array([1]), np.array(["a"])])


def test_entries_with_different_rows_are_refused_by_name() -> None:
    with pytest.raises(DispatchError, match=r"\['x'\] has 2 rows and \['in'\]\['y'\] has 3 rows"):
        shards.rows({"x": torch.ones(2), "in": {"y": [1, 2, 3]}})


def test_a_list_in_a_dict_with_a_tensor_is_rows() -> None:
    value = {"x": torch.arange(2), "words": ["a", "b"], "name": "n", "pair": (1, 2)}
    assert shards.batch_rows(value) == 2
    assert shards.cut(value, [(1, 2)])[0] == {
        "x": torch.tensor([1]),
        "words": ["b"],
        "name": "n",
        "pair": (1, 2),
    }


@pytest.mark.parametrize(
    "value",
    [{"words": ["a", "b"]}, {"in": {"words": []}}, Derived(x=[1])],  # type: ignore[arg-type]
)
def test_lists_without_a_tensor_are_ambiguous(value: Any) -> None:
    with pytest.raises(DispatchError, match=r"say Shard\(x\) or Replicate\(x\)"):
        shards.batch_rows(value)


def test_lists_in_a_dict_inside_a_batch_are_ambiguous() -> None:
    with pytest.raises(DispatchError, match=r"the dict at \['stop'\] holds lists"):
        shards.batch_rows({"x": torch.ones(2), "stop": {"words": ["a", "b"]}})


def test_rows_of_a_dict_of_lists_are_counted_when_asked_for() -> None:
    value = {"words": ["a", "b"], "name": "n"}
    assert shards.rows(value) == 2
    assert shards.cut(value, [(0, 1), (1, 2)])[1] == {"words": ["b"], "name": "n"}


def test_a_dict_without_rows_is_no_batch() -> None:
    assert shards.batch_rows({"lr": 0.1, "shape": (1, 2), "loss": torch.tensor(1.0)}) is None


def test_a_tensordict_without_batch_dimension_is_refused() -> None:
    with pytest.raises(DispatchError, match=r"batch_size=\[rows\]"):
        shards.batch_rows(TensorDict({"x": torch.ones(3)}))


def test_a_tensordict_of_scalars_is_no_batch() -> None:
    assert shards.batch_rows(TensorDict({"x": torch.tensor(1.0)})) is None


def test_what_post_init_derives_fits_the_shard() -> None:
    parts = shards.cut(Derived(torch.arange(5)), [(0, 3), (3, 5)])
    assert [part.count for part in parts] == [3, 2]
    assert shards.join(parts).count == 5


def test_a_dataclass_with_an_initvar_is_not_initialised_again() -> None:
    value = WithInitVar(torch.arange(2), 10)
    assert shards.cut(value, [(1, 2)])[0].x.tolist() == [10]


def test_a_subclass_of_dict_stays_one() -> None:
    value = OrderedDict(x=torch.arange(2))
    part = shards.cut(value, [(1, 2)])[0]
    assert type(part) is OrderedDict
    assert value["x"].tolist() == [0, 1]


def test_all_none_joins_to_none() -> None:
    assert shards.join([None, None]) is None


def test_an_entry_without_rows_becomes_a_list_by_rank() -> None:
    joined = shards.join([{"x": [1], "loss": 0.5, "n": None}, {"x": [2], "loss": 0.25, "n": None}])
    assert joined == {"x": [1, 2], "loss": [0.5, 0.25], "n": [None, None]}


def test_containers_in_containers_are_joined_key_by_key() -> None:
    parts = [{"in": {"x": [i], "loss": i}, "info": {"loss": i}} for i in range(2)]
    expected = {"in": {"x": [0, 1], "loss": [0, 1]}, "info": [{"loss": 0}, {"loss": 1}]}
    assert shards.join(parts) == expected


def test_dataclasses_join_field_by_field() -> None:
    parts = [Frozen(torch.tensor([i]), ["w"], 0.5) for i in range(2)]
    joined = shards.join(parts)
    assert plain(joined) == plain(Frozen(torch.tensor([0, 1]), ["w", "w"], [0.5, 0.5]))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.5, "text", (1, 2), torch.tensor(1.0)])
def test_results_without_rows_are_refused_and_the_way_out_is_named(value: Any) -> None:
    with pytest.raises(DispatchError, match=r"rank 4 returned a .* no rows.*DP_COMPUTE_METRIC"):
        shards.join([value, value], [4, 5])


def test_results_of_different_types_are_refused() -> None:
    with pytest.raises(DispatchError, match="rank 1 returned a NoneType and rank 0 a Tensor"):
        shards.join([torch.ones(1), None])
    with pytest.raises(DispatchError, match="rank 0 returned a list and rank 1 a Tensor"):
        shards.join([[1], torch.ones(1)])


def test_an_entry_that_one_rank_lacks_rows_for_is_refused_by_name() -> None:
    with pytest.raises(DispatchError, match=r"rank 1 returned a NoneType at \['x'\]"):
        shards.join([{"x": torch.ones(1)}, {"x": None}])


def test_different_keys_are_refused_by_name() -> None:
    with pytest.raises(DispatchError, match=r"rank 7 has \['extra'\]"):
        shards.join([{"x": [1]}, {"x": [1], "extra": 2}], [3, 7])
    with pytest.raises(DispatchError, match=r"lacks \['y'\]"):
        shards.join([TensorDict({key: torch.ones(1) for key in keys}, [1]) for keys in ("xy", "x")])


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(DispatchError, match=r"results at \['x'\] don't fit together"):
        shards.join([{"x": torch.ones(1, 2)}, {"x": torch.ones(1, 3)}])


def test_a_padded_result_is_cut_to_its_real_rows_whatever_the_multiple() -> None:
    result = {"x": torch.arange(3), "twice": list(range(6)), "loss": 0.5}
    cut = shards.unpad(result, 3, 2)
    assert (cut["x"].tolist(), cut["twice"], cut["loss"]) == ([0, 1], [0, 1, 2, 3], 0.5)
    assert len(result["twice"]) == 6  # type: ignore[arg-type]


def test_a_result_of_nothing_but_padding_is_cut_to_nothing() -> None:
    assert shards.unpad(torch.ones(4, 2), 2, 0).shape == (0, 2)


@pytest.mark.parametrize("found", [0, 1, 3])
def test_a_result_that_is_no_multiple_of_its_shard_is_refused(found: int) -> None:
    with pytest.raises(
        DispatchError, match=rf"\['x'\] has {found} rows, and not a multiple of the 2"
    ):
        shards.unpad({"x": [0] * found}, 2, 1)


def test_a_result_of_an_empty_shard_must_be_empty() -> None:
    assert shards.unpad([], 0, 0) == []
    with pytest.raises(DispatchError, match="has 1 rows"):
        shards.unpad([1], 0, 0)


@pytest.mark.usefixtures("pages")
def test_a_registered_type_and_its_subclasses_are_split_and_joined() -> None:
    class Book(Pages):
        pass

    value = {"book": Book([1, 2, 3])}
    assert shards.batch_rows(value) == 3
    parts = shards.cut(value, [(0, 2), (2, 3)])
    assert shards.join(parts)["book"].pages == (1, 2, 3)
    assert shards.pad(value, 1)["book"].pages == (1, 2, 3, 3)


@pytest.mark.usefixtures("pages")
def test_a_container_wants_padding_if_something_in_it_does() -> None:
    assert shards.wants_padding({"in": {"book": Pages([1], greedy=True)}})
    assert not shards.wants_padding({"in": {"book": Pages([1])}, "x": torch.ones(1)})


def test_a_type_that_was_unknown_can_be_registered_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shards, "_registry", dict(shards._registry))
    assert shards.rows(Pages([1])) is None
    shards.register_shardable(Pages, PAGES)
    assert shards.rows(Pages([1])) == 1
    shards._found.clear()


@pytest.mark.usefixtures("pages")
def test_parts_without_rows_are_joined_if_their_type_says_so() -> None:
    def no_rows(_value: object) -> None:
        return None

    meta_only = dataclasses.replace(PAGES, rows=no_rows, joins_rowless=True)
    shards.register_shardable(Pages, meta_only)
    assert shards.join([Pages([1]), Pages([2])]).pages == (1, 2)
