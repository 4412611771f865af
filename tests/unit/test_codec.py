"""Values to bytes and back: every kind of tensor and array, code by value, and what fails."""

from __future__ import annotations

import collections
import dataclasses
import enum
import pickle
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncwg._wire import codec, values
from asyncwg._wire.sources import inline
from asyncwg.protocol import DataProto
from tests.hostile import HOW, TEXT, Hostile, HostileBaseError, HostileError

Buffers = list[bytearray]


def buffers_of(encoded: codec.Encoded) -> Buffers:
    """Copy the buffers, as sending them does."""
    return [bytearray(buffer) for buffer in inline(encoded.buffers)]


def sent(value: Any) -> Any:
    """Send ``value`` and receive it."""
    encoded = codec.encode(value)
    return codec.decode(encoded.stream, buffers_of(encoded))


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _plain_dtypes() -> list[torch.dtype]:
    """Every dtype whose tensors are plain memory."""
    found = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    quantised = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    return sorted((d for d in found if str(d)[6:] not in quantised), key=str)


def filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a tensor of ``dtype`` in which every byte counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls some dtypes experimental
        count = int(np.prod(shape)) * dtype.itemsize
        raw = torch.arange(count, dtype=torch.int64).remainder(2 if dtype is torch.bool else 251)
        return raw.to(torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("size", [3, 1500], ids=["in-band", "out-of-band"])
@pytest.mark.parametrize("dtype", _plain_dtypes(), ids=lambda dtype: str(dtype)[6:])
def test_a_tensor_of_every_dtype_arrives_as_it_is(dtype: torch.dtype, size: int) -> None:
    tensor = filled(dtype, size, 2)
    back = sent(tensor)
    assert (back.dtype, back.shape, type(back)) == (dtype, tensor.shape, torch.Tensor)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", _plain_dtypes(), ids=lambda dtype: str(dtype)[6:])
def test_a_tensor_without_dimensions_arrives_without(dtype: torch.dtype) -> None:
    tensor = filled(dtype, 1).reshape(())
    back = sent(tensor)
    assert back.shape == ()
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("dtype", _plain_dtypes(), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2)])
@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_an_empty_tensor_keeps_its_shape_and_dtype(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """https://github.com/pytorch/pytorch/issues/5719: "bad file descriptor"."""
    back = sent(filled(dtype, *shape))
    assert (back.dtype, tuple(back.shape)) == (dtype, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[:, 1],
        lambda t: t[::3],
        lambda t: t[:1, 1],
        lambda t: t[0, ::200],
        lambda t: t[1:2, 1:2],
        lambda t: t[:1].expand(500, -1),
        lambda t: t[0, 0],
        lambda t: t.flip(0),
    ],
    ids=["T", "column", "steps", "one", "few", "corner", "expanded", "scalar", "flipped"],
)
@pytest.mark.parametrize("rows", [3, 400])
def test_a_tensor_that_is_not_contiguous_arrives_with_its_values(
    dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor], rows: int
) -> None:
    tensor = view(torch.arange(rows * 400).remainder(200).reshape(rows, 400).to(dtype))
    back = sent(tensor)
    assert back.dtype is dtype
    assert torch.equal(back, tensor)
    assert back.is_contiguous()


@pytest.mark.parametrize("part", [slice(0, 1), slice(5, 1500)], ids=["small", "large"])
def test_only_the_bytes_of_a_view_travel(part: slice) -> None:
    storage = torch.zeros(1_000_000)
    view = storage[part]
    assert codec.encode(view).size < view.nbytes + 500


def test_views_of_one_storage_arrive_apart() -> None:
    storage = torch.zeros(20000)
    first, second = sent([storage, storage[:1000]])
    first[0] = 1
    assert second[0] == 0


def test_the_same_tensor_twice_is_the_same_tensor_on_arrival() -> None:
    tensor = torch.zeros(20000)
    first, second = sent([tensor, tensor])
    assert first is second


def test_a_large_tensor_is_not_copied_while_it_is_encoded() -> None:
    tensor = torch.zeros(20000)
    [buffer] = inline(codec.encode(tensor).buffers)
    tensor[0] = 1
    assert bytes(buffer) == bits(tensor)


@pytest.mark.parametrize("size", [3, 20000], ids=["in-band", "out-of-band"])
def test_a_tensor_arrives_writable(size: int) -> None:
    back = sent(torch.zeros(size))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about memory that it may not write to
        back += 1
    assert back.sum() == size


def test_a_conjugated_tensor_arrives_with_its_values() -> None:
    tensor = torch.randn(2000, dtype=torch.complex64)
    assert torch.equal(sent(tensor.conj()), tensor.conj())


def test_a_negated_view_arrives_with_its_values() -> None:
    tensor = torch.randn(2000, dtype=torch.complex64).conj().imag
    assert tensor.is_neg()
    assert torch.equal(sent(tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_needs_grad_arrives_detached(dtype: torch.dtype) -> None:
    """https://github.com/pytorch/pytorch/issues/36457: the pickler "cowardly refused"."""
    weight = torch.ones(3, dtype=dtype, requires_grad=True)
    for tensor in (weight, weight * 2):
        back = sent(tensor)
        assert not back.requires_grad
        assert back.grad_fn is None
        assert torch.equal(back, tensor.detach())


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_arrives_as_a_parameter(requires_grad: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/36457."""
    back = sent(torch.nn.Parameter(torch.ones(3), requires_grad))
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad is requires_grad
    assert torch.equal(back.detach(), torch.ones(3))


def test_attributes_of_a_parameter_arrive() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.shard = 5  # type: ignore[attr-defined]  # as tensor-parallel libraries do
    assert sent(parameter).shard == 5


class ShardedParameter(torch.nn.Parameter):
    """A parameter that is made with more than its data, as tensor-parallel libraries do."""

    shard_dim: int

    def __new__(  # pyright: ignore[reportInconsistentConstructor]  # as those libraries do
        cls, data: torch.Tensor, shard_dim: int
    ) -> ShardedParameter:
        made: ShardedParameter = super().__new__(cls, data, False)
        made.shard_dim = shard_dim
        return made


class SelfMadeParameter(torch.nn.Parameter):
    """One that says itself how it is pickled."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return str, ("made itself",)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_subclass_of_parameter_arrives_as_itself_with_its_attributes(requires_grad: bool) -> None:
    """Torch's own pickling makes a plain Parameter of it."""
    make: Any = ShardedParameter
    back = sent(make(torch.ones(2000), shard_dim=1).requires_grad_(requires_grad))
    assert type(back) is ShardedParameter
    assert back.shard_dim == 1
    assert back.requires_grad is requires_grad
    assert isinstance(back, torch.nn.Parameter)
    assert torch.equal(back.detach(), torch.ones(2000))


def test_a_subclass_of_parameter_that_pickles_itself_is_let() -> None:
    assert sent(SelfMadeParameter(torch.ones(3))) == "made itself"


def test_a_module_arrives_with_its_parameters() -> None:
    module = torch.nn.Linear(30, 40)
    back = sent(module)
    assert [type(p) for p in back.parameters()] == [torch.nn.Parameter] * 2
    assert torch.equal(back.weight, module.weight)


class Tagged(torch.Tensor):
    """A subclass with an attribute, as users write it."""

    tag: str


class SelfMade(torch.Tensor):
    """A subclass that says itself how it is pickled."""

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return str, ("made itself",)


def test_a_subclass_of_tensor_arrives_as_itself_with_its_attributes() -> None:
    tensor = torch.ones(2000).as_subclass(Tagged)
    tensor.tag = "x"
    back = sent(tensor)
    assert type(back) is Tagged
    assert back.tag == "x"
    assert torch.equal(back.as_subclass(torch.Tensor), torch.ones(2000))


def test_a_subclass_of_tensor_that_pickles_itself_is_let() -> None:
    assert sent(torch.ones(3).as_subclass(SelfMade)) == "made itself"


_SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda dense: dense.to_sparse(),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
    "bsc": lambda dense: dense.to_sparse_bsc((1, 1)),
}


@pytest.mark.parametrize("make", _SPARSE.values(), ids=_SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_tensor_keeps_its_layout(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """They have no storage: https://github.com/pytorch/pytorch/issues/20248."""
    sparse = make(torch.eye(3))
    back = sent(sparse)
    assert back.layout == sparse.layout
    assert torch.equal(back.to_dense(), torch.eye(3))


def test_a_sparse_tensor_that_needs_grad_arrives_detached() -> None:
    assert not sent(torch.eye(3).to_sparse().requires_grad_()).requires_grad


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_quantised_tensor_arrives_with_its_scale() -> None:
    tensor = torch.quantize_per_tensor(torch.eye(3), 0.1, 2, torch.quint8)
    back = sent(tensor)
    assert (back.q_scale(), back.q_zero_point()) == (0.1, 2)
    assert torch.equal(back.dequantize(), tensor.dequantize())


def test_a_jagged_tensor_arrives_with_its_rows() -> None:
    rows = [torch.ones(2), torch.ones(3)]
    back = sent(torch.nested.nested_tensor(rows, layout=torch.jagged))
    assert [tuple(row.shape) for row in back.unbind()] == [(2,), (3,)]


def test_a_meta_tensor_arrives_without_data() -> None:
    back = sent(torch.empty(5, 2, device="meta"))
    assert back.device.type == "meta"
    assert back.shape == (5, 2)


def test_an_inference_tensor_arrives() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2000)
    assert torch.equal(sent(tensor), torch.ones(2000))


_STRUCTURED = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")])
_ARRAYS: dict[str, Any] = {
    "floats": np.arange(4.0),
    "many": np.arange(5000),
    "none": np.empty((0, 3)),
    "no dimensions": np.array(3.5),
    "bool": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "half": np.arange(4, dtype=np.float16),
    "big endian": np.arange(4, dtype=">i4"),
    "strings": np.array(["a", "long one"]),
    "bytes": np.array([b"a", b"bc"]),
    "dates": np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
    "spans": np.array([1, 2], dtype="timedelta64[s]"),
    "objects": np.array([{"a": 1}, None, [1]], dtype=object),
    "structured": _STRUCTURED,
    "many structured": np.tile(_STRUCTURED, 500),
    "records": _STRUCTURED.view(np.recarray),
    "masked": np.ma.masked_array(np.arange(3.0), mask=[False, True, False]),
    "Fortran order": np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "column": np.arange(6.0).reshape(2, 3)[:, 1],
    "steps": np.arange(60000.0)[::2],
    "backwards": np.arange(60000.0)[::-1],
    "expanded": np.broadcast_to(np.arange(300.0), (200, 300)),
    "no bytes": np.zeros(3, dtype="V0"),
}


@pytest.mark.parametrize("read_only", [False, True], ids=["own", "read-only"])
@pytest.mark.parametrize("name", _ARRAYS)
def test_an_array_of_every_kind_arrives_writable_with_its_values(
    name: str, read_only: bool
) -> None:
    """Arrays from the store were read-only: https://github.com/ray-project/ray/issues/5592."""
    array = _ARRAYS[name]
    if read_only:
        array = array.view()
        array.flags.writeable = False
    back = sent(array)
    assert (type(back), back.dtype, back.shape) == (type(array), array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable
    if back.size and back.dtype.itemsize:
        back[...] = back.flat[-1]  # does not raise


@pytest.mark.parametrize(
    "scalar", [np.float32(1.5), np.int64(3), np.bool_(True), np.str_("x"), np.datetime64("2024")]
)
def test_a_numpy_scalar_keeps_its_type(scalar: Any) -> None:
    back = sent(scalar)
    assert type(back) is type(scalar)
    assert back == scalar


def test_random_generators_go_on_where_they_were() -> None:
    generator = np.random.default_rng(5)
    assert sent(generator).random() == generator.random()


def test_a_tensordict_arrives_with_its_batch_size_and_nesting() -> None:
    batch = TensorDict(
        {"a": torch.arange(4000.0), "b": {"c": torch.zeros(4000, 2)}}, batch_size=[4000]
    )
    back = sent(batch)
    assert back.batch_size == batch.batch_size
    assert bool((back == batch).all())


def test_a_data_proto_arrives_with_all_its_parts() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(4)}, {"name": np.array(list("abcd"), object)}, {"step": 7}
    )
    back = sent(data)
    assert torch.equal(back.batch["x"], torch.arange(4))
    assert list(back.non_tensor_batch["name"]) == list("abcd")
    assert back.meta_info == {"step": 7}


class Point(NamedTuple):
    x: int
    y: Any


@dataclasses.dataclass
class Box:
    content: Any


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        b"",
        [],
        None,
        {"a": [1, (2, {3})], 5: frozenset({6})},
        Point(1, {"deep": [Point(2, None)]}),
        Box({"box": Box(1)}),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        collections.deque([1, 2], maxlen=5),
        10**400,
        float("inf"),
        "\ud800 and \0",
        b"x" * 5000,
        range(5),
        slice(1, 2),
        len,
        Point,
        torch.float32,
        torch.device("cpu"),
        torch.Size([2, 3]),
        np.dtype("f4"),
    ],
    ids=repr,
)
def test_a_value_of_python_arrives_equal(value: Any) -> None:
    back = sent(value)
    assert type(back) is type(value)
    assert back == value


def test_a_value_that_says_main_by_chance_arrives_equal() -> None:
    assert sent(["__main__", torch.ones(2000)])[0] == "__main__"


def test_tensors_deep_in_containers_go_out_of_band() -> None:
    encoded = codec.encode({"a": [Box(Point(1, torch.zeros(20000)))]})
    assert len(encoded.buffers) == 1
    assert len(encoded.stream) < 1000


def test_an_enum_member_is_itself_on_arrival() -> None:
    assert sent(Color.RED) is Color.RED


def test_a_value_that_holds_itself_arrives_so() -> None:
    ring: list[Any] = [torch.zeros(20000)]
    ring.append(ring)
    back = sent(ring)
    assert back[1] is back


def test_a_lambda_and_a_closure_arrive_working() -> None:
    offset = torch.tensor(5)

    def add(x: int) -> int:
        return int(x + offset)

    assert sent(add)(1) == 6
    assert sent(lambda x: x + 1)(1) == 2


def test_the_buffers_of_a_value_with_code_go_out_of_band_once() -> None:
    encoded = codec.encode([lambda: 1, torch.zeros(20000)])
    assert len(encoded.buffers) == 1


SCRIPT = """
import pickle, sys
from asyncwg._wire import codec

class Foo:
    n = 0
    def where(self): raise ValueError('here')

class Meta(type): pass
class Made(metaclass=Meta): n = 0

def bump(o):
    type(o).n += 1
    return type(o).n

streams = [codec.encode((bump, Foo())).stream for _ in range(3)]
streams += [codec.encode((bump, Made())).stream for _ in range(2)]
sys.stdout.buffer.write(pickle.dumps(streams))
"""


@pytest.fixture(scope="module")
def from_main() -> list[bytes]:
    """What another program sends of functions and classes of its ``__main__``."""
    done = subprocess.run(
        [sys.executable, "-"], input=SCRIPT.encode(), capture_output=True, timeout=60, check=True
    )
    streams: list[bytes] = pickle.loads(done.stdout)
    return streams


def test_a_class_of_main_is_set_up_once_and_keeps_its_state(from_main: list[bytes]) -> None:
    """Each message reset its attributes: https://github.com/cloudpipe/cloudpickle/issues/195."""
    counts: list[int] = []
    for stream in from_main[:3]:
        bump, value = codec.decode(stream)
        counts.append(bump(value))
    assert counts == [1, 2, 3]


def test_a_class_with_a_metaclass_is_set_up_once_too(from_main: list[bytes]) -> None:
    counts: list[int] = []
    for stream in from_main[3:]:
        bump, value = codec.decode(stream)
        counts.append(bump(value))
    assert counts == [1, 2]


def test_code_of_main_keeps_the_name_of_its_file(from_main: list[bytes]) -> None:
    _, value = codec.decode(from_main[0])
    with pytest.raises(ValueError, match="here") as caught:
        value.where()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].filename == "<stdin>"


def test_a_class_made_in_a_function_comes_home_as_itself() -> None:
    class Local:
        n = 0

    Local.n = 5
    there = codec.encode(Local())
    Local.n = 6
    back = codec.decode(there.stream)
    assert type(back) is Local
    assert Local.n == 6


def test_what_can_not_be_pickled_raises_and_the_next_value_is_fine() -> None:
    """A failing argument killed the feeder thread: https://github.com/noxdafox/pebble/issues/146."""
    with pytest.raises(TypeError, match="lock"):
        codec.encode([torch.zeros(20000), threading.Lock()])
    assert sent("next") == "next"


def test_what_a_reducer_raises_comes_through() -> None:
    with pytest.raises(HostileError, match=TEXT):
        codec.encode(Hostile("pickled", "raise"))
    with pytest.raises(HostileBaseError, match=TEXT):
        codec.encode(Hostile("pickled", "raise base"))


class Holder:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def _closure() -> Callable[[], Any]:
    lock = threading.Lock()
    return lambda: lock


_shared_lock = threading.Lock()


class Locked:
    lock = threading.Lock()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (threading.Lock(), "result (a _thread.lock)"),
        ([1, {"a": (2, threading.Lock())}], "result[1]['a'][1] (a _thread.lock)"),
        (Holder(a=1, b=Holder(c=threading.Lock())), "result.b.c (a _thread.lock)"),
        (_closure(), "result (its variable 'lock') (a _thread.lock)"),
    ],
    ids=["itself", "container", "attribute", "closure"],
)
def test_the_explanation_names_the_part_that_can_not_be_pickled(value: Any, told: str) -> None:
    assert codec.explain_failure(value, "result") == told


def test_the_explanation_of_a_ring_ends() -> None:
    ring: list[Any] = [threading.Lock()]
    ring.insert(0, ring)
    assert codec.explain_failure(ring, "ring").startswith("ring")


@pytest.mark.parametrize("how", [how for how in HOW if how.startswith(("raise", "exit"))])
def test_a_hostile_part_is_named_and_does_no_harm(how: Any) -> None:
    told = codec.explain_failure({"a": Hostile("pickled", how)}, "result")
    assert told == "result['a'] (a tests.hostile.Hostile)"


def test_a_part_that_can_not_be_shown_does_no_harm() -> None:
    told = codec.explain_failure({Hostile("repr-ed", "raise base"): threading.Lock()}, "result")
    assert told == "result (a dict)"


def test_encoding_in_several_threads_at_once_mixes_nothing_up() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for size in range(200):
            value = [number, torch.full((size,), number), lambda: number]
            back = sent(value)
            if back[0] != number or int(back[1].sum()) != size * number or back[2]() != number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [thread.is_alive() for thread in threads] == [False] * 4
    assert wrong == []


def test_encoding_within_a_reducer_is_allowed() -> None:
    class Nested:
        def __reduce__(self) -> Any:
            inner = codec.encode([torch.ones(2000), "inner"])
            return codec.decode, (inner.stream, buffers_of(inner))

    assert sent([torch.zeros(20000), Nested()])[1][1] == "inner"


def test_a_thread_that_meets_a_tensor_while_another_learns_the_dtypes_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It found some names there, and took them for all of them."""
    stream, buffers = codec.encode(torch.arange(1000, dtype=torch.int32))
    raw = [bytes(buffer) for buffer in inline(buffers)]
    failed: list[Exception] = []

    def read() -> None:
        try:
            codec.decode(stream, [bytearray(buffer) for buffer in raw])
        except Exception as error:  # noqa: BLE001  # told by the test
            failed.append(error)

    class Names(dict[str, Any]):
        def __setitem__(self, name: str, dtype: Any) -> None:
            super().__setitem__(name, dtype)
            if len(self) == 1:
                other = threading.Thread(target=read, daemon=True)
                other.start()
                other.join(30)
                assert not other.is_alive()

    monkeypatch.setattr(values, "_dtypes", Names())
    read()
    assert failed == []
