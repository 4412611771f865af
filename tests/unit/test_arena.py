"""The arena: places that are given out, and what processes see there."""

from __future__ import annotations

import asyncio
import gc
import itertools
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncwg import _linux as linux
from asyncwg._driver.arena import CONTROLLER, TRANSIT, Arena, Block, round_up
from asyncwg._wire.arena import GRANULE, Mapping
from asyncwg._wire.books import Books
from asyncwg._wire.frames import ARENA, HEADER_SIZE, NONE, Kind, Placed, pack, pack_placed
from asyncwg._wire.shipment import Shipment
from asyncwg._worker.blocks import Blocks, Grant
from asyncwg._worker.lanes import AsyncLane
from asyncwg.errors import ResourceError
from tests.leaks import exit_code_of

SIZE = 64 * GRANULE
OWNER = "g"


class Reader:
    """A process that reads a file of ours: its mapping, and what it has let go."""

    def __init__(self, fd: int) -> None:
        self.let_go: list[tuple[int, int]] = []
        self.mapping = Mapping(fd, SIZE, lambda offset, count: self.let_go.append((offset, count)))


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def reader(request: pytest.FixtureRequest, file: int) -> Iterator[Reader]:
    yield Reader(file)
    # pytest holds what a test asked for until after the look for leaks.
    del request.node.funcargs["reader"]


@pytest.fixture
def books(request: pytest.FixtureRequest) -> Iterator[Arena]:
    yield Arena()
    del request.node.funcargs["books"]


def write(fd: int, offset: int, data: bytes) -> None:
    os.pwrite(fd, data, offset)


def taken(arena: Arena, weight: int, owner: str = OWNER) -> Block:
    block = arena.allocate(weight, owner)
    assert block is not None
    return block


def in_child(act: Callable[[], bool]) -> bool:
    """Fork, and return what ``act`` gives in the child."""
    pid = os.fork()
    if not pid:
        good = False
        try:
            good = act()
        finally:
            os._exit(0 if good else 1)
    return exit_code_of(pid) == 0


# What a process sees, O-8


def test_a_block_is_received_with_what_was_written_where_it_was_granted(
    file: int, reader: Reader
) -> None:
    writer = Reader(file)
    writer.mapping.writable(GRANULE, 3)[:] = b"abc"
    assert bytes(reader.mapping.receive(GRANULE, GRANULE)[:3]) == b"abc"


def test_what_a_reader_writes_stays_its_own(file: int, reader: Reader) -> None:
    """O-8."""
    other = Reader(file)
    view = reader.mapping.receive(0, GRANULE)
    view[0] = 9
    assert other.mapping.receive(0, GRANULE)[0] == 0
    assert os.pread(file, 1, 0) == b"\0"


def test_a_block_is_let_go_when_the_last_view_is_gone_and_not_before(reader: Reader) -> None:
    """A-1."""
    view = reader.mapping.receive(0, GRANULE)
    part = view[10:20]
    del view
    assert reader.let_go == []
    del part
    assert reader.let_go == [(0, 1)]


def test_a_numpy_view_of_a_view_keeps_a_block(reader: Reader) -> None:
    """A-1: numpy skips arrays in between."""
    import numpy as np

    array: Any = np.frombuffer(reader.mapping.receive(0, GRANULE), np.uint8)[5:].reshape(-1, 1)[1:]
    gc.collect()
    assert reader.let_go == []
    del array
    assert reader.let_go == [(0, 1)]


def test_a_tensor_keeps_a_block(reader: Reader) -> None:
    """A-1."""
    import torch

    row = torch.frombuffer(reader.mapping.receive(0, GRANULE), dtype=torch.float32).view(-1, 4)[3]
    gc.collect()
    assert reader.let_go == []
    del row
    assert reader.let_go == [(0, 1)]


def test_what_was_written_to_a_block_is_not_seen_in_the_next_one_there(
    file: int, reader: Reader
) -> None:
    """A-2: a page of a private mapping that was written shows its old bytes for ever."""
    view = reader.mapping.receive(0, 4 * GRANULE)
    view[2 * GRANULE] = 7
    del view
    write(file, 0, b"\1" * 4 * GRANULE)
    assert bytes(reader.mapping.receive(0, 4 * GRANULE)) == b"\1" * 4 * GRANULE


def test_what_was_written_to_a_block_is_not_seen_in_the_next_one_on_old_kernels(
    file: int, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A-2, where the kernel can't tell which pages were written."""
    monkeypatch.setattr(linux, "written_pages", lambda _address, _size: None)
    view = reader.mapping.receive(0, GRANULE)
    view[5] = 7
    del view
    write(file, 0, b"\1" * GRANULE)
    assert bytes(reader.mapping.receive(0, GRANULE)) == b"\1" * GRANULE


def test_a_block_that_is_received_again_beside_an_earlier_view_is_apart_from_it(
    reader: Reader,
) -> None:
    """O-8 within one process: sent twice, it is two values."""
    first, second = (reader.mapping.receive(0, GRANULE) for _ in range(2))
    first[0] = 9
    assert second[0] == 0
    del first
    del second
    assert reader.let_go == [(0, 1), (0, 1)]


def test_parts_of_one_block_share_their_bytes_and_are_let_go_together(reader: Reader) -> None:
    """A joined result comes in parts."""
    half = 2 * GRANULE
    first = reader.mapping.receive(0, 2 * half, part=(0, half))[:half]
    second = reader.mapping.receive(0, 2 * half, part=(half, 2 * half))
    first[0] = 9
    assert second[0] == 9
    del first
    assert reader.let_go == []
    del second
    assert reader.let_go == [(0, 2)]


def test_a_part_that_arrives_after_its_page_was_written_beside_it_is_right(
    file: int, reader: Reader
) -> None:
    """The page is this process's own since then, and would not show what the other rank wrote."""
    first = reader.mapping.receive(0, GRANULE, part=(0, 100))[:100]
    first[99] = 9  # the user writes to the first rank's value
    write(file, 100, b"\5" * 100)  # the second rank writes its own
    second = reader.mapping.receive(0, GRANULE, part=(100, 200))
    assert bytes(second[100:200]) == b"\5" * 100
    assert first[99] == 9


def test_a_part_that_arrives_after_the_block_was_owned_is_right(file: int, reader: Reader) -> None:
    first = reader.mapping.receive(0, 4 * GRANULE, part=(0, GRANULE))
    assert reader.mapping.own(0)
    write(file, 2 * GRANULE, b"\5" * GRANULE)
    second = reader.mapping.receive(0, 4 * GRANULE, part=(2 * GRANULE, 3 * GRANULE))
    assert second[2 * GRANULE] == 5
    assert first[2 * GRANULE] == 0


def test_an_owned_block_is_let_go_at_once_and_keeps_its_bytes(file: int, reader: Reader) -> None:
    """A worker that keeps what it received does not keep the room."""
    write(file, 0, b"\1" * GRANULE)
    view = reader.mapping.receive(0, GRANULE)
    assert reader.mapping.own(0)
    assert reader.let_go == [(0, 1)]
    write(file, 0, b"\2" * GRANULE)
    assert bytes(view) == b"\1" * GRANULE


def test_an_owned_block_is_not_let_go_a_second_time(reader: Reader) -> None:
    view = reader.mapping.receive(0, GRANULE)
    reader.mapping.own(0)
    del view
    reader.mapping.own(0)
    assert reader.let_go == [(0, 1)]


def test_a_block_is_received_where_an_owned_one_stands(file: int, reader: Reader) -> None:
    kept = reader.mapping.receive(0, 2 * GRANULE)
    kept[0] = 1
    reader.mapping.own(0)
    write(file, GRANULE, b"\2" * GRANULE)
    assert reader.mapping.receive(GRANULE, 2 * GRANULE)[0] == 2
    assert kept[0] == 1


def test_the_place_of_an_owned_block_that_is_gone_shows_the_file_again(
    file: int, reader: Reader
) -> None:
    """A-2."""
    kept = reader.mapping.receive(0, GRANULE)
    reader.mapping.own(0)
    kept[0] = 9
    del kept
    write(file, 0, b"\2" * GRANULE)
    assert reader.mapping.receive(0, GRANULE)[0] == 2


def test_500_blocks_that_are_kept_cost_no_descriptor(reader: Reader) -> None:
    """Python's own mmap keeps one for each."""
    views: list[memoryview] = []
    reader.mapping.receive(0, GRANULE)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(500):
        views.append(reader.mapping.receive(0, GRANULE))
        reader.mapping.own(0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_mapping_of_its_own_is_gone_with_its_last_view(reader: Reader) -> None:
    def maps() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:test" in line for line in file)

    views = [reader.mapping.receive(0, GRANULE)]
    before = maps()
    views += [reader.mapping.receive(0, GRANULE) for _ in range(5)]
    assert maps() > before
    del views[1:]
    assert maps() == before


def test_bytes_that_nobody_wrote_are_found_where_they_stand(reader: Reader) -> None:
    import numpy as np

    view = reader.mapping.receive(4 * GRANULE, 4 * GRANULE)
    address: int = np.frombuffer(view, np.uint8).ctypes.data
    assert reader.mapping.untouched(address + 10, 20) == (4 * GRANULE, 10)
    view[3 * GRANULE] = 1
    assert reader.mapping.untouched(address + 10, 20) == (4 * GRANULE, 10)
    assert reader.mapping.untouched(address + 3 * GRANULE, 1) is None


def test_bytes_that_are_owned_or_strange_are_not_found(reader: Reader) -> None:
    import numpy as np

    own = reader.mapping.receive(0, GRANULE)
    address: int = np.frombuffer(own, np.uint8).ctypes.data
    assert reader.mapping.untouched(address, GRANULE + 1) is None
    reader.mapping.own(0)
    assert reader.mapping.untouched(address, 1) is None
    assert reader.mapping.untouched(np.zeros(10).ctypes.data, 1) is None


def test_a_forked_child_keeps_what_was_received_when_the_block_is_used_again(
    file: int, reader: Reader
) -> None:
    """A-3: what data loaders that fork read."""
    write(file, 0, b"\1" * GRANULE)
    view = reader.mapping.receive(0, GRANULE)
    told, tell = os.pipe()

    def child() -> bool:
        os.read(told, 1)
        return bytes(view) == b"\1" * GRANULE

    pid = os.fork()
    if not pid:
        os._exit(0 if child() else 1)
    assert reader.let_go == [(0, 1)]
    write(file, 0, b"\2" * GRANULE)
    os.write(tell, b"x")
    assert exit_code_of(pid) == 0
    assert bytes(view) == b"\1" * GRANULE
    os.close(told)
    os.close(tell)


def test_a_forked_child_lets_nothing_go_in_its_parents_books(reader: Reader) -> None:
    views = [reader.mapping.receive(0, GRANULE)]

    def drop() -> bool:
        reader.let_go.clear()
        views.clear()
        gc.collect()
        return reader.let_go == []

    assert in_child(drop)


def test_a_fork_while_another_thread_receives_and_owns_does_not_stop_the_child(
    reader: Reader,
) -> None:
    """A lock that another thread holds at the fork is held for ever in the child."""
    over = threading.Event()

    def churn() -> None:
        while not over.is_set():
            view = reader.mapping.receive(0, GRANULE)
            reader.mapping.own(0)
            del view

    thread = threading.Thread(target=churn, daemon=True)
    thread.start()
    try:
        for _ in range(20):
            assert in_child(lambda: len(reader.mapping.receive(8 * GRANULE, GRANULE)) == GRANULE)
    finally:
        over.set()
        thread.join(30)
    assert not thread.is_alive()


def test_views_outlive_their_mapping(file: int) -> None:
    found = Reader(file)
    write(file, 0, b"\1")
    views = [found.mapping.receive(0, GRANULE), found.mapping.receive(0, GRANULE)]
    del found
    gc.collect()
    assert [view[0] for view in views] == [1, 1]


def test_a_finaliser_in_the_middle_of_a_change_waits_for_its_end() -> None:
    order: list[str] = []
    lock = Books()
    with lock:
        lock.later(lambda: order.append("note"))
        order.append("change")
    assert order == ["change", "note"]


def test_what_follows_a_note_is_done_without_the_lock() -> None:
    order: list[str] = []
    lock = Books()

    def follow() -> None:
        with lock:
            order.append("followed")

    lock.later(lambda: follow)
    assert order == ["followed"]


def test_a_collection_in_the_middle_of_any_look_at_the_books_does_no_harm(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view in a reference cycle goes when the collector likes."""
    import numpy as np

    def cycle(offset: int) -> None:
        node: list[Any] = [reader.mapping.receive(offset, GRANULE)]
        node.append(node)

    kept = [reader.mapping.receive(i * GRANULE, GRANULE) for i in range(0, 32, 2)]
    for i in range(1, 32, 2):
        cycle(i * GRANULE)
    written = linux.written_pages

    def collecting(address: int, size: int) -> list[tuple[int, int]] | None:
        monkeypatch.undo()
        gc.collect()
        return written(address, size)

    monkeypatch.setattr(linux, "written_pages", collecting)
    address: int = np.frombuffer(kept[-1], np.uint8).ctypes.data
    assert reader.mapping.untouched(address, 1) == (30 * GRANULE, 0)
    assert len(reader.let_go) == 16


# A worker's dealings with it


class Offers:
    """`Blocks` of an async lane's service: takes offers, and notes what is given back."""

    def __init__(self) -> None:
        self.blocks = self
        self.answer: Callable[[Grant], None] | None = None
        self.back: list[Grant] = []

    def offer(self, _id: int, _large: Shipment, answer: Callable[[Grant], None], _: int) -> Any:
        self.answer = answer
        return []

    def give_back(self, grant: Grant) -> None:
        self.back.append(grant)


@pytest.mark.parametrize("order", ["grant first", "cancel first"])
async def test_a_place_that_comes_in_the_turn_in_which_its_call_is_cancelled_is_given_back(
    order: str,
) -> None:
    lane: Any = AsyncLane.__new__(AsyncLane)
    lane._loop = asyncio.get_running_loop()
    lane._send = lambda _pieces: None
    offers: Any = Offers()
    task = asyncio.create_task(lane._placed(offers, 1, Shipment(b"", [b"x"], [1]), Kind.RESULT))
    await asyncio.sleep(0)
    grant = Grant(Placed([(0, GRANULE)], [(1, 0, 0)]), "")
    offers.answer(grant)
    if order == "grant first":
        lane._loop.call_soon(task.cancel)
    else:
        task.cancel()
    await asyncio.wait([task])
    assert offers.back == [grant]
    assert task.result() == pack(Kind.RESULT, 1, flags=NONE)


def test_a_place_for_a_call_that_is_not_known_is_given_back(file: int) -> None:
    blocks = Blocks(os.dup(file), SIZE)
    frame = b"".join(pack_placed(Kind.GRANT, 9, b"", Placed([(GRANULE, GRANULE)], [(1, 0, 0)])))
    blocks.granted(9, ARENA, 1, memoryview(frame)[HEADER_SIZE:])
    told = blocks.let_go()
    assert told is not None
    assert b"".join(told)[HEADER_SIZE:] == GRANULE.to_bytes(8, "little") + (1).to_bytes(8, "little")
    os.close(blocks.woken)


def test_two_threads_that_tell_what_was_let_go_tell_all_of_it_once(file: int) -> None:
    """The compute lane and the control lane may be at it together."""
    blocks = Blocks(os.dup(file), SIZE)
    told: list[bytes] = []
    failures: list[BaseException] = []
    over = threading.Event()

    def tell() -> None:
        try:
            while not over.is_set() or blocks._gone:
                frame = blocks.let_go()
                if frame is not None:
                    told.append(b"".join(frame)[HEADER_SIZE:])
        except BaseException as error:  # noqa: BLE001  # shown below
            failures.append(error)

    threads = [threading.Thread(target=tell, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(5000):
        blocks._gone.append((i, 1))
    over.set()
    for thread in threads:
        thread.join(30)
    assert [thread.is_alive() for thread in threads] == [False] * 2
    assert failures == []
    assert sum(len(each) for each in told) == 5000 * 16
    os.close(blocks.woken)


# The books: B-1, B-2


def test_a_block_is_of_whole_pages_and_at_least_of_the_size_asked_for() -> None:
    for weight in (1, 4095, 4096, 4097, 65536, 100_000, 5_000_000, 12_345_678_901):
        size = round_up(weight)
        assert size >= weight
        assert size % mmap.PAGESIZE == 0
        assert size <= weight * 1.125 + GRANULE


def test_a_place_is_given_out_again_when_every_holder_has_let_go(books: Arena) -> None:
    """B-2."""
    block = taken(books, GRANULE)
    books.hold(block, (OWNER, 0))
    books.hold(block, (OWNER, 1), 2)
    books.release(block.offset, (OWNER, TRANSIT))
    books.release(block.offset, (OWNER, 0))
    books.release(block.offset, (OWNER, 1))
    assert taken(books, GRANULE).offset != block.offset
    books.release(block.offset, (OWNER, 1))
    assert taken(books, GRANULE).offset == block.offset


def test_a_holder_that_has_let_go_can_not_do_so_for_another(books: Arena) -> None:
    block = taken(books, GRANULE)
    books.release(block.offset, ("other", 0))
    books.release(block.offset, (OWNER, 3), 5)
    assert books.in_use(OWNER) == block.size


def test_what_a_dead_process_held_is_taken_back(books: Arena) -> None:
    blocks = [taken(books, GRANULE) for _ in range(3)]
    for block in blocks:
        books.hold(block, (OWNER, 0), 7)
        books.release(block.offset, (OWNER, TRANSIT))
    books.hold(blocks[1], (OWNER, 1))
    books.release_all((OWNER, 0))
    assert books.in_use() == GRANULE
    assert books.held_by((OWNER, 1)) == [blocks[1]]


def test_a_hold_is_passed_on_without_a_moment_between(books: Arena) -> None:
    block = taken(books, GRANULE)
    books.move(block.offset, (OWNER, TRANSIT), CONTROLLER)
    assert books.held_by(CONTROLLER) == [block]
    assert books.in_use() == GRANULE


def test_either_all_blocks_of_a_call_are_given_out_or_none(
    books: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is told of room, or who waits would try again for ever."""
    monkeypatch.setattr(linux, "available_memory", lambda: 3 * GRANULE)
    told: list[None] = []
    books.listen(lambda: told.append(None))
    assert books.allocate_all([2 * GRANULE, 2 * GRANULE], OWNER) is None
    assert books.in_use() == 0
    assert told == []
    assert books.allocate_all([2 * GRANULE, GRANULE], OWNER) is not None


def test_no_block_is_given_out_beyond_the_memory_that_is_free(
    books: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "available_memory", lambda: 10 * GRANULE)
    assert books.allocate(16 * GRANULE, OWNER) is None
    assert not books.fits(16 * GRANULE)
    assert taken(books, 8 * GRANULE).size == 8 * GRANULE


def test_memory_that_blocks_given_out_will_need_is_not_given_out_again(
    books: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls at once, each of which fits, must not bring the machine down."""
    monkeypatch.setattr(linux, "available_memory", lambda: 10 * GRANULE)
    assert taken(books, 8 * GRANULE).size == 8 * GRANULE
    assert books.allocate(8 * GRANULE, OWNER) is None


def test_memory_that_was_used_before_can_be_used_again_however_little_is_free(
    books: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = taken(books, 8 * GRANULE)
    books.release(block.offset, (OWNER, TRANSIT))
    monkeypatch.setattr(linux, "available_memory", lambda: 0)
    assert books.fits(8 * GRANULE)
    assert taken(books, 8 * GRANULE).size == 8 * GRANULE


def test_who_listens_is_told_of_room(books: Arena) -> None:
    told: list[None] = []

    def listener() -> None:
        told.append(None)

    books.listen(listener)
    books.release(taken(books, GRANULE).offset, (OWNER, TRANSIT))
    assert told
    told.clear()
    books.unlisten(listener)
    books.release(taken(books, GRANULE).offset, (OWNER, TRANSIT))
    assert not told


def memory_behind(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_memory_of_free_places_is_given_back_while_a_block_stays(books: Arena) -> None:
    """One value that somebody keeps does not keep the rest."""
    kept, large = taken(books, GRANULE), taken(books, 64 * GRANULE)
    for block in (kept, large):
        books.mapping.writable(block.offset, block.size)[:] = b"\1" * block.size
    books.release(large.offset, (OWNER, TRANSIT))
    assert memory_behind(books) == 65 * GRANULE
    books.trim_if_idle(books.allocations)
    assert memory_behind(books) == GRANULE
    assert bytes(books.mapping.writable(kept.offset, 1)) == b"\1"


def test_memory_is_not_given_back_when_there_was_a_block_since(books: Arena) -> None:
    since = books.allocations
    block = taken(books, GRANULE)
    books.mapping.writable(block.offset, 1)[:] = b"\1"
    books.release(block.offset, (OWNER, TRANSIT))
    books.trim_if_idle(since)
    assert memory_behind(books) == GRANULE


def test_a_result_that_is_sent_on_by_reference_stays_when_it_is_owned_meanwhile(
    books: Arena,
) -> None:
    """Its block would else be given to another while the call that refers to it waits for room."""
    block = taken(books, GRANULE)
    books.move(block.offset, (OWNER, TRANSIT), CONTROLLER)
    view = books.mapping.receive(block.offset, block.size)
    assert books.locate(view[:100], (OWNER, TRANSIT)) == (block, 0)
    books.mapping.own_all()
    assert books.held_by(CONTROLLER) == []
    assert taken(books, GRANULE).offset != block.offset
    assert books.locate(view[:100], (OWNER, TRANSIT)) is None


def test_a_shared_tensor_is_found_where_it_stands_and_gives_its_room_back(books: Arena) -> None:
    array = books.share(1000)
    found = books.locate(memoryview(array).cast("B")[10:20], (OWNER, 0))
    assert found is not None
    assert found[1] == 10
    books.release(found[0].offset, (OWNER, 0))
    del array, found
    assert books.in_use() == 0


def test_a_shared_tensor_that_does_not_fit_is_a_resource_error(
    books: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "available_memory", lambda: GRANULE)
    with pytest.raises(ResourceError, match="don't fit"):
        books.share(100 * GRANULE)


def test_a_result_that_is_collected_in_the_middle_of_an_allocation_does_no_harm(
    books: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B-1. The collector may run wherever memory is asked for."""

    def received(offset: int) -> memoryview:
        return books.mapping.receive(offset, GRANULE)

    blocks = [taken(books, GRANULE) for _ in range(16)]
    for block in blocks:
        books.move(block.offset, (OWNER, TRANSIT), CONTROLLER)
    views = [received(block.offset) for block in blocks]

    def collecting() -> int:
        del views[::2]
        return 1 << 30

    monkeypatch.setattr(linux, "available_memory", collecting)
    new = taken(books, 2 * GRANULE)
    assert new.offset == 16 * GRANULE
    assert books.in_use() == 10 * GRANULE
    assert {taken(books, GRANULE).offset for _ in range(8)} == {b.offset for b in blocks[::2]}


@pytest.mark.parametrize("seed", range(5))
def test_no_two_blocks_overlap_whatever_is_taken_and_let_go(books: Arena, seed: int) -> None:
    """B-1."""
    dice = random.Random(seed)
    held: list[Block] = []
    for _ in range(400):
        if held and dice.random() < 0.5:
            block = held.pop(dice.randrange(len(held)))
            books.release(block.offset, (OWNER, TRANSIT))
        else:
            held.append(taken(books, dice.choice([1, 5000, 70_000, 300_000])))
        places = sorted((block.offset, block.size) for block in held)
        assert all(
            start + size <= following
            for (start, size), (following, _) in itertools.pairwise(places)
        )
    assert books.in_use() == sum(block.size for block in held)
    for block in held:
        books.release(block.offset, (OWNER, TRANSIT))
    assert taken(books, books._touched).offset == 0


def test_four_threads_that_take_and_let_go_at_once_leave_the_books_right(books: Arena) -> None:
    """B-1."""
    failures: list[str] = []

    def churn(number: int) -> None:
        dice = random.Random(number)
        for _ in range(300):
            block = taken(books, dice.choice([1, 70_000]), f"g{number}")
            place = books.mapping.writable(block.offset, 8)
            place[:] = number.to_bytes(8, "little")
            books.move(block.offset, (f"g{number}", TRANSIT), CONTROLLER)
            view = books.mapping.receive(block.offset, block.size)
            if int.from_bytes(view[:8], "little") != number:
                failures.append(f"{number} found another's bytes")
            del view

    threads = [threading.Thread(target=churn, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [thread.is_alive() for thread in threads] == [False] * 4
    assert failures == []
    assert books.in_use() == 0
