"""Where groups that can be attached to are found, and how calls travel to their hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from asyncwg import UsageError, WorkerStartError
from asyncwg._attach import registry, wire
from asyncwg._attach.registry import Folder, peer_of
from asyncwg._wire.frames import HEADER, FrameError, Kind, pack


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "groups"


@pytest.fixture
def folder(path: Path) -> Iterator[Folder]:
    with Folder(str(path)) as opened:
        yield opened


def test_the_folder_is_made_for_its_user_alone(folder: Folder, path: Path) -> None:
    assert path.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o777, 0o750])
def test_a_folder_that_others_can_enter_is_refused(path: Path, mode: int) -> None:
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(UsageError, match="mode 0700"):
        Folder(str(path))


def test_a_link_to_a_folder_is_refused(path: Path, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir(mode=0o700)
    path.symlink_to(real)
    with pytest.raises(UsageError, match="can't be used"):
        Folder(str(path))


def test_a_folder_that_can_not_be_made_is_told(path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't be used.*No such file"):
        Folder(str(path / "deeper"))


def test_another_users_folder_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match="belongs to user"):
        Folder(str(path))


def test_the_folder_is_below_the_runtime_directory_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert registry.default_directory() == str(tmp_path / "asyncwg")
    for odd in ("", "not/absolute", str(tmp_path / "missing")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", odd)
        assert registry.default_directory() == f"/tmp/asyncwg-{os.geteuid()}"


def test_a_name_is_claimed_once(folder: Folder) -> None:
    with folder.claim("actor"):
        assert folder.names() == ["actor"]
        with pytest.raises(UsageError, match=f"'actor' already, in process {os.getpid()}"):
            folder.claim("actor")
        sock = folder.connect("actor")
        assert sock is not None
        with sock:
            assert peer_of(sock) == (os.getpid(), os.geteuid())


def test_a_socket_that_nobody_serves_is_removed(folder: Folder) -> None:
    folder.claim("actor").close()
    assert folder.connect("actor") is None
    assert folder.names() == []


def test_a_dead_name_is_free(folder: Folder) -> None:
    folder.claim("actor").close()
    with folder.claim("actor"):
        assert folder.names() == ["actor"]


def test_a_socket_that_a_child_of_a_dead_host_holds_is_no_host(folder: Folder) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        listening = folder.claim("actor")
        listening.set_inheritable(True)
        grandchild = os.fork()
        if grandchild:
            os._exit(0)
        os.close(writing)
        os.read(reading, 1)  # as long as the test runs
        os._exit(0)
    os.close(reading)
    try:
        os.waitpid(pid, 0)
        assert folder.connect("actor") is None
        assert folder.names() == []
    finally:
        os.close(writing)


@pytest.mark.parametrize("name", ["..", "a b", "größe", "x" * 80, "-v", "#!"])
def test_names_of_every_kind_work_below_long_paths(tmp_path: Path, name: str) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with Folder(str(deep / "groups")) as folder, folder.claim(name):
        assert folder.names() == [name]
        sock = folder.connect(name)
        assert sock is not None
        sock.close()


def test_a_name_that_no_file_can_have_is_refused(folder: Folder) -> None:
    with pytest.raises(UsageError, match="80 bytes"):
        folder.claim("x" * 81)


def test_another_users_socket_is_refused(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with folder.claim("actor"):
        monkeypatch.setattr(registry, "peer_of", lambda sock: peer_of(sock)._replace(uid=4242))
        with pytest.raises(UsageError, match="served by user 4242"):
            folder.connect("actor")


def bytes_of(pieces: Sequence[bytes | bytearray | memoryview]) -> memoryview:
    return memoryview(bytearray(b"".join(pieces)))


def test_one_frame_for_all_ranks_travels_as_it_is() -> None:
    frame = pack(Kind.CALL, 7, b"stream", aux=3)
    body = bytes_of(wire.relay_body([frame], None))
    assert bytes(body) == b"".join(frame)
    assert wire.readdress(body, 7) == 0
    assert bytes(body) == b"".join(frame)


def test_different_frames_travel_once_each() -> None:
    one, other = pack(Kind.CALL, 7, b"one"), pack(Kind.CALL, 7, b"other", [b"x" * 100])
    body = bytes_of(wire.relay_body([one, other], [0, 1, 0]))
    frames, index, kinds = wire.relayed(body, 7)
    assert (index, kinds) == ((0, 1, 0), 0)
    assert [bytes(each) for each in frames] == [b"".join(one), b"".join(other)]


def test_the_hosts_number_is_put_on_a_frame() -> None:
    frame = bytes_of(pack(Kind.CALL, 7, b"stream", flags=4, aux=3))
    assert wire.readdress(frame, 1 << 40) == 4
    assert HEADER.unpack_from(frame) == (6, 1 << 40, Kind.CALL, 4, 3, 0)


@pytest.mark.parametrize("cut", [0, 3, 8, 20, 30, 60])
def test_a_body_that_does_not_add_up_is_no_call(cut: int) -> None:
    whole = bytes_of(
        wire.relay_body([pack(Kind.CALL, 7, b"abc"), pack(Kind.CALL, 7, b"d")], [0, 1])
    )
    with pytest.raises(FrameError):
        wire.relayed(whole[:cut], 1)
    with pytest.raises(FrameError):
        wire.readdress(whole, 1)


def test_errors_arrive_as_they_were() -> None:
    inner = LookupError("odd")
    inner.add_note("from rank 3")
    cause = ValueError("why")
    inner.__cause__ = cause
    error = wire.unpack_error(wire.pack_error(inner))
    assert (type(error), error.args, error.__notes__) == (LookupError, ("odd",), ["from rank 3"])
    assert repr(error.__cause__) == repr(cause)
    group = wire.unpack_error(wire.pack_error(WorkerStartError("no start", [inner, cause])))
    assert isinstance(group, WorkerStartError)
    assert group.message == "no start"
    assert [type(each) for each in group.exceptions] == [LookupError, ValueError]


def test_nothing_is_left_open_by_a_folder(path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with Folder(str(path)) as folder:
        folder.claim("actor").close()
    assert os.listdir("/proc/self/fd") == before


def test_sockets_are_not_inherited(folder: Folder) -> None:
    with folder.claim("actor") as sock:
        assert not sock.get_inheritable()
        assert sock.family is socket.AF_UNIX
