"""Where the bytes of large values come from, what goes through the arena, and where joined results stand."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from asyncwg._wire import codec, sources
from asyncwg._wire.frames import FrameError, Placed, pack_placed, unpack_placed
from asyncwg._wire.joined import joined
from asyncwg._wire.shipment import joined_places, shipment
from asyncwg._wire.sources import Source, Strided

LARGE = 100_000


def buffer_of(value: Any) -> Source:
    [source] = codec.encode(value).buffers
    return source


def copied(source: Source) -> bytes:
    place = bytearray(sources.size_of(source))
    sources.copy(source, memoryview(place))
    return bytes(place)


def test_the_bytes_of_what_is_contiguous_are_not_copied_before_they_are_sent() -> None:
    tensor = torch.zeros(LARGE)
    source = buffer_of(tensor)
    assert not isinstance(source, Strided)
    assert sources.address_of(source) == tensor.data_ptr()


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.bool, torch.complex64, torch.complex128, torch.int8, torch.uint8,
        torch.uint16, torch.uint32, torch.uint64, torch.int64,
    ],
    ids=str,
)  # fmt: skip
def test_a_strided_tensor_of_any_type_is_copied_as_its_contiguous_twin(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (300, 1000)).to(dtype)
    for view in (tensor.T, tensor[:, ::2], tensor[0].expand(300, 1000)):
        source = buffer_of(view)
        assert isinstance(source, Strided)
        raw: Any = view.contiguous().view(torch.uint8).numpy()
        assert copied(source) == raw.tobytes()


def test_a_channels_last_tensor_arrives_with_its_values_in_place() -> None:
    image = torch.arange(2 * 3 * 100 * 100.0).view(2, 3, 100, 100)
    odd = image.to(memory_format=torch.channels_last)
    assert copied(buffer_of(odd)) == image.numpy().tobytes()


def test_lazily_conjugated_and_negated_tensors_are_copied_with_their_values() -> None:
    tensor = torch.randn(LARGE, dtype=torch.complex64)
    for lazy in (tensor.conj(), tensor.conj().imag, tensor.conj()[::2]):
        encoded = codec.encode(lazy)
        back = codec.decode(encoded.stream, [bytearray(copied(s)) for s in encoded.buffers])
        assert torch.equal(back, lazy.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "view",
    [
        np.arange(4 * LARGE).reshape(-1, 4)[:, 1],
        np.arange(LARGE)[::-1],
        np.broadcast_to(np.arange(1000), (500, 1000)),
        np.arange(LARGE).reshape(10, 100, 100).transpose(1, 0, 2),
        np.zeros(LARGE, [("a", "i4"), ("b", "f8")])[::2],
    ],
    ids=["column", "reversed", "broadcast", "transposed", "records"],
)
def test_a_strided_array_is_copied_in_its_order(view: Any) -> None:
    source = buffer_of(view)
    assert isinstance(source, Strided)
    assert copied(source) == np.ascontiguousarray(view).tobytes()


def test_an_array_in_the_order_of_fortran_arrives_with_its_values() -> None:
    array = np.asfortranarray(np.arange(LARGE).reshape(100, -1))
    encoded = codec.encode(array)
    back = codec.decode(encoded.stream, [bytearray(copied(s)) for s in encoded.buffers])
    assert np.array_equal(back, array)


# Whose writes are seen: O-7


def test_a_tensor_has_a_counter_that_moves_with_every_write_through_torch() -> None:
    tensor = torch.zeros(LARGE)
    for view in (tensor, tensor[:50_000], tensor[::2], tensor.bfloat16(), tensor.detach()):
        source = buffer_of(view)
        before = sources.version_of(source)
        view.add_(1)
        assert sources.version_of(source) != before


def test_a_parameter_has_a_counter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(LARGE))
    source = buffer_of(parameter)
    before = sources.version_of(source)
    with torch.no_grad():
        parameter.add_(1)
    assert sources.version_of(source) != before


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(LARGE),
        np.zeros((100, 1000)).T,
        np.zeros(LARGE)[::2],
        torch.zeros(LARGE).numpy(),
        torch.zeros(LARGE).numpy()[::2],
        torch.zeros(100, 1000).numpy().T,
        np.frombuffer(bytearray(LARGE), np.uint8),
    ],
    ids=[
        "plain",
        "fortran",
        "strided",
        "of tensor",
        "of tensor strided",
        "of tensor T",
        "of bytes",
    ],
)
def test_an_array_has_no_counter_whatever_it_was_made_of(array: Any) -> None:
    """What numpy writes to the array of a tensor does not move the tensor's counter."""
    assert sources.version_of(buffer_of(array)) is None


def test_an_inference_tensor_has_no_counter() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(LARGE)
    assert sources.version_of(buffer_of(tensor)) is None


def test_what_has_no_counter_is_made_steady_by_a_copy() -> None:
    array = np.zeros(LARGE)
    steady = sources.steady(buffer_of(array))
    array[:] = 1
    assert copied(steady) == bytes(8 * LARGE)


def test_what_has_a_counter_is_steady_as_it_is_unless_a_copy_is_asked_for() -> None:
    source = buffer_of(torch.zeros(LARGE))
    assert sources.steady(source) is source
    assert copied(sources.steady(source, always=True)) == copied(source)


# What goes through the arena


def test_a_value_goes_through_the_pipe_below_the_threshold_and_through_the_arena_above() -> None:
    encoded = codec.encode([np.zeros(LARGE), np.zeros(LARGE)])
    assert shipment(encoded, 17 * LARGE) is None
    large = shipment(encoded, 16 * LARGE)
    assert large is not None
    assert large.sizes == [8 * LARGE, 8 * LARGE]
    assert large.stream == encoded.stream


def test_a_large_stream_goes_behind_the_buffers() -> None:
    encoded = codec.encode(["x" * LARGE, np.zeros(LARGE)])
    large = shipment(encoded, LARGE)
    assert large is not None
    assert large.stream == b""
    assert large.sizes == [8 * LARGE, len(encoded.stream)]


def test_thresholds_of_nothing_and_infinity_mean_all_and_none() -> None:
    small, large = codec.encode(1), codec.encode(np.zeros(LARGE))
    assert shipment(small, 0) is not None
    assert shipment(large, float("inf")) is None


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_places_of_all_ranks_are_side_by_side_and_do_not_overlap(ranks: int) -> None:
    sizes = [2048, 5000, 4097, 64]
    spans: list[tuple[int, int]] = []
    for position in range(ranks):
        places, weight = joined_places(sizes, position, ranks)
        spans += [(place, place + size) for place, size in zip(places, sizes, strict=True)]
        assert all(
            place % 64 == position * size % 64 for place, size in zip(places, sizes, strict=True)
        )
        assert max(end for _, end in spans) <= weight
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(spans)))


def test_the_table_of_a_placed_frame_comes_back() -> None:
    placed = Placed([(4096, 8192), (1 << 40, 4096)], [(10, 0, 64), (20, 1, 0), (0, 0, 8192)])
    [frame] = pack_placed(2, 7, b"stream", placed)
    stream, back = unpack_placed(memoryview(frame)[24:], 3)
    assert bytes(stream) == b"stream"
    assert back == placed


@pytest.mark.parametrize(
    "placed",
    [
        Placed([(0, 100)], [(101, 0, 0)]),
        Placed([(0, 100)], [(1, 0, 100)]),
        Placed([(0, 9)], [(1, 1, 0)]),
    ],
    ids=["too long", "too late", "no such block"],
)
def test_a_buffer_that_reaches_out_of_its_block_is_a_frame_error(placed: Placed) -> None:
    [frame] = pack_placed(2, 7, b"", placed)
    with pytest.raises(FrameError):
        unpack_placed(memoryview(frame)[24:], 1)


@pytest.mark.parametrize("size", [0, 7, 8, 31])
def test_a_table_that_is_cut_off_is_a_frame_error(size: int) -> None:
    [frame] = pack_placed(2, 7, b"", Placed([(0, 100)], [(1, 0, 0)]))
    with pytest.raises(FrameError):
        unpack_placed(memoryview(frame)[24 : 24 + size], 1)


# Joined results


class Block:
    """Memory in which results stand side by side, as in the arena."""

    def __init__(self, size: int) -> None:
        self.array = (ctypes.c_ubyte * size)()
        self.address = ctypes.addressof(self.array)

    def find(self, address: int) -> tuple[Any, int] | None:
        place = address - self.address
        return (self.array, place) if 0 <= place < len(self.array) else None

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        if not count:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self.array, dtype=torch.uint8, count=count, offset=start)
        return flat.view(dtype).view(shape)


def test_tensors_side_by_side_are_one_without_a_copy() -> None:
    block = Block(4000)
    parts = [block.tensor(40 * i, (2, 5), torch.float32).fill_(i) for i in range(3)]
    whole = joined(parts, block.find)
    assert whole.data_ptr() == parts[0].data_ptr()
    assert torch.equal(whole, torch.cat(parts))


def test_parts_with_different_numbers_of_rows_are_one_too() -> None:
    block = Block(4000)
    parts = [block.tensor(0, (3, 2), torch.int64), block.tensor(48, (1, 2), torch.int64)]
    assert joined(parts, block.find).shape == (4, 2)


@pytest.mark.parametrize(
    "second",
    [
        (48, (2, 5), torch.float32),
        (40, (2, 4), torch.float32),
        (40, (2, 5), torch.int32),
        (40, (), torch.float32),
        (40, (0, 5), torch.float32),
    ],
    ids=["a gap", "other columns", "another type", "no rows", "empty"],
)
def test_what_is_not_alike_or_not_side_by_side_is_left_to_be_copied(second: Any) -> None:
    block = Block(4000)
    parts = [block.tensor(0, (2, 5), torch.float32), block.tensor(*second)]
    assert joined(parts, block.find) is None


def test_parts_in_another_order_are_left_to_be_copied() -> None:
    block = Block(4000)
    parts = [block.tensor(40 * i, (10,), torch.float32) for i in (1, 0)]
    assert joined(parts, block.find) is None


def test_neighbours_in_different_blocks_are_left_to_be_copied() -> None:
    block = Block(80)
    parts = [block.tensor(40 * i, (10,), torch.float32) for i in range(2)]

    def find(address: int) -> tuple[Any, int] | None:
        found = block.find(address)
        return None if found is None else ((ctypes.c_ubyte * 40)(), found[1] % 40)

    assert joined(parts, find) is None


def test_parts_of_a_subclass_or_with_a_graph_are_left_to_be_copied() -> None:
    block = Block(80)
    parts = [block.tensor(40 * i, (10,), torch.float32) for i in range(2)]
    assert joined([torch.nn.Parameter(part) for part in parts], block.find) is None
    assert joined([part.requires_grad_() for part in parts], block.find) is None


def test_arrays_side_by_side_are_one_without_a_copy() -> None:
    block = Block(80)
    memory = memoryview(block.array).cast("B")
    parts: list[Any] = [np.frombuffer(memory, "f4", 10, 40 * i).reshape(2, 5) for i in range(2)]
    parts[1][:] = 7
    whole = joined(parts, block.find)
    assert whole.ctypes.data == block.address
    assert np.array_equal(whole, np.concatenate(parts))


def test_arrays_of_objects_are_left_to_be_copied() -> None:
    assert joined([np.array([1, None], object)] * 2, lambda _address: None) is None
