"""The few calls of Linux that Python does not offer, and what ``/proc`` says of processes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import struct
import tempfile
from typing import Final, NamedTuple

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36
_libc: Final = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, whether or not the GIL is held."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Inherit every orphan below this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Set what ``ps -o comm`` and ``nvidia-smi`` show; 15 bytes count."""
    _prctl(_PR_SET_NAME, name.encode()[:15])


class ProcessInfo(NamedTuple):
    """What ``/proc/<pid>/stat`` says."""

    pid: int
    parent: int
    session: int
    state: str


def processes() -> dict[int, ProcessInfo]:
    """Return every process that exists now, by pid."""
    found: dict[int, ProcessInfo] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                text = file.read()
        except OSError:
            continue  # it has just ended
        # The name stands in parentheses and may hold any byte, so what follows its end counts.
        fields = text[text.rindex(b")") + 2 :].split()
        pid = int(entry)
        found[pid] = ProcessInfo(pid, int(fields[1]), int(fields[3]), fields[0].decode())
    return found


def descendants(root: int, table: dict[int, ProcessInfo]) -> list[int]:
    """Return the pids below ``root``, nearest first."""
    children: dict[int, list[int]] = {}
    for info in table.values():
        children.setdefault(info.parent, []).append(info.pid)
    below: list[int] = []
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop(0)
        below.append(pid)
        queue += children.get(pid, ())
    return below


def environment_has(pid: int, entry: bytes) -> bool:
    """Tell whether ``pid`` was started with ``NAME=value`` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except OSError:
        return False


_RLIMIT_LOCKS: Final = 10
"""A limit that Linux has not used for twenty years, and that every child inherits: also one that has
made a session of its own and thrown its environment away."""


def set_mark(number: int) -> int:
    """Mark this process, and so all that it starts, with a number; return the one it had."""
    before, hard = resource.getrlimit(_RLIMIT_LOCKS)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse it: there are other marks
        resource.setrlimit(_RLIMIT_LOCKS, (number, hard))
    return before


def has_mark(pid: int, number: int) -> bool:
    """Tell whether ``pid`` comes from a process that was marked so."""
    try:
        with open(f"/proc/{pid}/limits", "rb") as file:
            text = file.read()
    except OSError:
        return False
    _, _, limits = text.partition(b"Max file locks")
    return limits.split(maxsplit=1)[:1] == [b"%d" % number]


def kill(pid: int) -> None:
    """SIGKILL ``pid`` if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def close_all_but(keep: set[int]) -> None:
    """Close every descriptor of this process that is not in ``keep``."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) not in keep:
            try:
                os.close(int(entry))
            except OSError:
                pass  # the one that listed the folder


_MADV_DONTNEED: Final = 4
_MADV_POPULATE_WRITE: Final = 23
_PAGEMAP_SCAN: Final = (3 << 30) | (96 << 16) | (ord("f") << 8) | 16
_PAGE_IS_FILE: Final = 1 << 2
_PAGE_IS_PRESENT: Final = 1 << 3
_PAGE_IS_SWAPPED: Final = 1 << 4
_SCAN_REGIONS: Final = 512
_PM_FILE: Final = 1 << 61
_PM_SWAP: Final = 1 << 62
_PM_PRESENT: Final = 1 << 63
_MAP_NORESERVE: Final = 0x4000
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_mmap: Final = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
)  # fmt: skip


def drop_pages(address: int, size: int) -> None:
    """Forget what this process has written to a private mapping; the file shows through again."""
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_DONTNEED)


def own_pages(address: int, size: int) -> bool:
    """Give this process its own copy of every page of a private mapping.

    The contents don't change, whoever reads or writes them meanwhile. Returns False on kernels
    before 5.14, which can't.
    """
    return not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)


def drop_written_pages(address: int, size: int) -> None:
    """As `drop_pages`, but pages that were only read stay mapped: touching them again is free.

    On kernels before 6.7, which can't tell which are which, all go.
    """
    ranges = written_pages(address, size)
    for start, end in [(address, address + size)] if ranges is None else ranges:
        drop_pages(start, end - start)


def written_pages(address: int, size: int) -> list[tuple[int, int]] | None:
    """Return the ranges of a private mapping that this process has written, as start and end.

    None where the kernel can't tell.
    """
    found: list[tuple[int, int]] = []
    start, end = address, address + size
    try:
        pagemap = _own_pagemap()
        while start < end:
            regions = (ctypes.c_uint64 * (3 * _SCAN_REGIONS))()
            # Pages that are there or swapped out, and are not the file's: written by us.
            request = bytearray(
                struct.pack(
                    "<12Q", 96, 0, start, end, 0, ctypes.addressof(regions), _SCAN_REGIONS, 0,
                    _PAGE_IS_FILE, _PAGE_IS_FILE, _PAGE_IS_PRESENT | _PAGE_IS_SWAPPED,
                    _PAGE_IS_PRESENT,
                )
            )  # fmt: skip
            count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, request, True)
            found += [(regions[3 * i], regions[3 * i + 1]) for i in range(count)]
            walked: int = struct.unpack_from("<Q", request, 32)[0]
            if walked <= start:
                break
            start = walked
    except OSError:
        return None
    return found


def is_written(address: int) -> bool:
    """Tell whether this process has written to the page at ``address``, in a private mapping of a file.

    True where that can't be told.
    """
    try:
        (entry,) = struct.unpack("<Q", os.pread(_own_pagemap(), 8, address // mmap.PAGESIZE * 8))
    except OSError:
        return True
    return bool(entry & (_PM_PRESENT | _PM_SWAP)) and not entry & _PM_FILE


def map_private(fd: int, offset: int, size: int) -> int:
    """Map a part of a file, writable for this process alone, and return the address.

    `mmap.mmap` would keep a descriptor for every mapping.

    Raises:
        OSError: there is no room.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    address: int | None = _mmap(None, size, protection, flags, fd, offset)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    assert address is not None
    return address


def unmap(address: int, size: int) -> None:
    """Undo `map_private`."""
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))


_pagemap: tuple[int, int] | None = None
"""Of the process that opened it: its pid, and a descriptor that tells of its memory alone."""


def _own_pagemap() -> int:
    global _pagemap  # opening it costs as much as asking it
    if _pagemap is None or _pagemap[0] != os.getpid():
        _pagemap = (os.getpid(), os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))
    return _pagemap[1]


def memory_file(name: str) -> int:
    """Make a file in memory that nobody else can open and that is gone with its last descriptor.

    Where there is no memfd (an old kernel, a sandbox), a file that loses its name at once: in
    ``/dev/shm``, or in the folder for temporary files.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    shared = "/dev/shm"  # nothing keeps its name there
    folder = shared if os.access(shared, os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
    os.unlink(path)
    return descriptor


def room_in_file(fd: int) -> int | None:
    """Return how many bytes the file system of a `memory_file` has left; None where it has no bound."""
    if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
        return None
    stat = os.fstatvfs(fd)
    return stat.f_bavail * stat.f_frsize


def available_memory() -> int:
    """Return how many bytes this process could still use: of the machine, and of its control group."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    available = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        with open("/proc/self/cgroup") as file:
            path = next(line.split(":", 2)[2] for line in file if line.startswith("0::")).strip()
        with open(f"/sys/fs/cgroup{path}/memory.max") as file:
            limit = file.read().strip()
        with open(f"/sys/fs/cgroup{path}/memory.current") as file:
            current = int(file.read())
        if limit != "max":
            available = min(available, int(limit) - current)
    except (OSError, StopIteration, ValueError):
        pass  # no control groups of version 2
    return available


def punch_hole(fd: int, offset: int, size: int) -> None:
    """Give back the memory of a range of an anonymous file; it reads as zeros afterwards."""
    keep_size_and_punch = 0x01 | 0x02
    _libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(offset), ctypes.c_long(size))
