"""Where groups that can be attached to are found: sockets in a folder that only its user can enter.

- R-1 The folder belongs to this user and is closed to everybody else, or nothing is done in it.
- R-2 A name has one host at a time. A socket whose host has died is removed by whoever looks for it.
- R-3 The user id of the other side is compared before a byte is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import time
from collections.abc import Generator
from typing import Final, NamedTuple

from asyncwg.errors import UsageError

_SUFFIX: Final = ".sock"
_LONGEST: Final = 80
"""Bytes of a group's name: the address of a socket has room for 107, with the way to the folder."""
_BACKLOG: Final = 128
_LOCK_WAIT: Final = 5.0
"""Seconds to wait for another program that looks at the folder; a look takes a millisecond."""


class Peer(NamedTuple):
    """Who is at the other end of a socket."""

    pid: int
    """0 where it is in another namespace."""
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """Ask the kernel who is at the other end."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _gid = struct.unpack("3i", data)
    return Peer(pid, uid)


def default_directory() -> str:
    """Return where this user's groups are: below ``XDG_RUNTIME_DIR``, or in ``/tmp``."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(base) and os.path.isdir(base):
        return os.path.join(base, "asyncwg")
    return f"/tmp/asyncwg-{os.geteuid()}"  # checked to be ours, and closed


class Folder:
    """The folder, open and checked. A context manager.

    Args:
        path: None for `default_directory`.

    Raises:
        UsageError: somebody else could enter it.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path: Final = default_directory() if path is None else path
        with contextlib.suppress(OSError):  # what follows says what is wrong
            os.mkdir(self.path, 0o700)
        try:
            self._fd = os.open(
                self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            )
        except OSError as error:
            raise UsageError(
                f"{self.path} can't be used for the sockets of groups: {error.strerror}"
            ) from error
        found = os.fstat(self._fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            os.close(self._fd)
            raise UsageError(
                f"{self.path} must belong to you and be closed to others (mode 0700); it belongs to user "
                f"{found.st_uid} and has mode {stat.S_IMODE(found.st_mode):04o}: groups are not put "
                "where others could reach them"
            )

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._fd)

    def names(self) -> list[str]:
        """Return the names of all groups that have a socket here, alive or not."""
        found = [name for name in os.listdir(self._fd) if name.endswith(_SUFFIX)]
        return sorted(name.removesuffix(_SUFFIX) for name in found)

    def claim(self, name: str) -> socket.socket:
        """Return a socket that listens for ``name``.

        Raises:
            UsageError: the name is taken by a group that lives.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with self._locked():
                found = self._look(name)
                if found is not None:
                    pid = peer_of(found).pid
                    found.close()
                    raise UsageError(
                        f"there is a group {name!r} already, in process {pid}: choose another name, "
                        f"or end it with 'python -m asyncwg stop {name}'"
                    )
                sock.bind(self._address(name))
                sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        return sock

    def give_up(self, name: str) -> None:
        """Take the socket of ``name`` away. For who has claimed it."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_file(name), dir_fd=self._fd)

    def connect(self, name: str) -> socket.socket | None:
        """Return a socket to the host of ``name``, or None; it does not block.

        Raises:
            UsageError: what listens there is another user's.
        """
        found = self._look(name, remove=False)
        if found is None:
            with self._locked():  # somebody may be taking the place of the dead one
                found = self._look(name)
        return found

    def log(self, name: str) -> int:
        """Return a descriptor of an empty file for what a host prints."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(f"{_file(name)}.log", flags, 0o600, dir_fd=self._fd)

    def log_path(self, name: str) -> str:
        """Return where that file is."""
        return os.path.join(self.path, f"{_file(name)}.log")

    def drop_log(self, name: str) -> None:
        """Remove that file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{_file(name)}.log", dir_fd=self._fd)

    def _address(self, name: str) -> str:
        # A socket's address has room for 107 bytes, and the folder's path may be longer.
        return f"/proc/self/fd/{self._fd}/{_file(name)}"

    def _look(self, name: str, *, remove: bool = True) -> socket.socket | None:
        """Connect to a host that lives; take away what a dead one has left."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self._address(name))
            peer = peer_of(sock)
            if peer.uid != os.geteuid():
                raise UsageError(f"the socket of group {name!r} is served by user {peer.uid}")
            if lives(peer.pid):
                return sock
        except FileNotFoundError:
            sock.close()
            return None
        except ConnectionRefusedError:
            pass
        except OSError as error:
            sock.close()
            if error.errno == errno.EAGAIN:
                raise UsageError(f"too many programs wait for group {name!r}") from error
            raise
        except BaseException:
            sock.close()
            raise
        sock.close()
        if remove:
            self.give_up(name)
        return None

    @contextlib.contextmanager
    def _locked(self) -> Generator[None, None, None]:
        fd = os.open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            give_up = time.monotonic() + _LOCK_WAIT
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise UsageError(
                            f"{self.path}/lock is held by another program for {_LOCK_WAIT} s"
                        ) from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(fd)


def lives(pid: int) -> bool:
    """Whether a process runs; True where that can't be told."""
    if pid <= 0:
        return True
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([fd], [], [], 0)[0]
    finally:
        os.close(fd)


def _file(name: str) -> str:
    if len(os.fsencode(name)) > _LONGEST:
        raise UsageError(
            f"the name of a group that can be attached to has at most {_LONGEST} bytes: {name!r}"
        )
    return name + _SUFFIX
