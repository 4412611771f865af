"""What the ranks print: whole lines with name and rank, as it is, or a file per rank.

A thread drains the pipes, so a busy event loop never blocks a worker's ``print``. The last lines of
each rank's stderr are kept for its post-mortem, whatever becomes of the rest.
"""

from __future__ import annotations

import codecs
import collections
import os
import pathlib
import selectors
import sys
import threading
import time
from typing import IO, Final

TAIL_LINES: Final = 50
"""Lines of a dead rank's stderr in its error: one screen; more only hides the cause."""
_KEPT_LINES: Final = 400
"""Lines kept, so that a crash report above the tail is found whole."""
_READ: Final = 64 * 1024
"""Bytes: what a pipe holds."""
_BAR_EVERY: Final = 1.0
"""Seconds between two states of a progress bar, which ends its lines with a carriage return."""
_CRASH: Final = "Fatal Python error"


class _Stream:
    """One pipe of one rank. The drain thread owns it, but for `drain`, which takes the lock."""

    def __init__(self, fd: int, label: str, name: str, tail: collections.deque[str] | None) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._label = label
        self._name = name
        self._tail = tail
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._bar = ""
        self._bar_shown = 0.0
        self._lock = threading.Lock()
        self._open = True

    def drain(self) -> bool:
        """Take what is there now; False at the end of the pipe."""
        with self._lock:
            while self._open:
                try:
                    data = os.read(self.fd, _READ)
                except BlockingIOError:
                    return True
                except OSError:
                    data = b""
                if not data:
                    self._finish()
                    return False
                self._take(self._decoder.decode(data))
            return False

    def close(self) -> None:
        """Take what is there and close the pipe."""
        self.drain()
        with self._lock:
            if self._open:
                self._finish()

    def _finish(self) -> None:
        self._open = False
        os.close(self.fd)
        if self._partial or self._bar:
            self._line(self._partial or self._bar)
        self._partial = self._bar = ""

    def _take(self, text: str) -> None:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            # What a carriage return has overwritten is not shown, as on a terminal.
            shown = line.rstrip("\r").rpartition("\r")[2] or self._bar
            self._bar = ""
            self._line(shown)
        if "\r" in self._partial:
            states = [state for state in self._partial.split("\r")[:-1] if state.strip()]
            self._partial = self._partial.rpartition("\r")[2]
            if states:
                self._bar = states[-1]
                if time.monotonic() - self._bar_shown >= _BAR_EVERY:
                    self._bar_shown = time.monotonic()
                    self._line(self._bar)

    def _line(self, line: str) -> None:
        if self._tail is not None:
            self._tail.append(line)
        out: IO[str] | None = getattr(sys, self._name)
        try:
            if out is not None:
                out.write(f"{self._label}{line}\n")
                out.flush()
        except (OSError, ValueError):
            pass  # the controller's own stream is closed: its words go with it


class Output:
    """Where the output of a group goes. Made per generation; closed when its processes are gone.

    Args:
        mode: ``"prefix"``, ``"inherit"``, or a folder for one file per rank.
        group: the group's name.
        world_size: number of ranks.
    """

    def __init__(self, mode: str | os.PathLike[str], group: str, world_size: int) -> None:
        self._mode = mode
        self._group = group
        self._tails: list[collections.deque[str]] = [
            collections.deque(maxlen=_KEPT_LINES) for _ in range(world_size)
        ]
        self._streams: list[list[_Stream]] = [[] for _ in range(world_size)]
        self._files: dict[int, pathlib.Path] = {}
        self._selector: selectors.BaseSelector | None = None
        self._thread: threading.Thread | None = None
        self._wake: int | None = None

    def descriptors(self, rank: int) -> tuple[int, int]:
        """Return stdout and stderr for a rank; the caller closes them when it has passed them on."""
        if self._mode == "inherit":
            return os.dup(1), os.dup(2)
        if self._mode != "prefix":
            folder = pathlib.Path(self._mode)
            folder.mkdir(parents=True, exist_ok=True)
            path = self._files[rank] = folder / f"{self._group}-{rank}.log"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            return fd, os.dup(fd)
        ends = []
        for name in ("stdout", "stderr"):
            read, write = os.pipe2(os.O_CLOEXEC)
            tail = self._tails[rank] if name == "stderr" else None
            stream = _Stream(read, f"[{self._group}:{rank}] ", name, tail)
            self._streams[rank].append(stream)
            ends.append(write)
        return ends[0], ends[1]

    def start(self) -> None:
        """Start to drain, once all ranks have their descriptors."""
        if not any(self._streams):
            return
        self._selector = selectors.DefaultSelector()
        read, self._wake = os.pipe2(os.O_CLOEXEC)
        self._selector.register(read, selectors.EVENT_READ, None)
        for stream in (s for streams in self._streams for s in streams):
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        self._thread = threading.Thread(
            target=self._drain, args=(self._selector, read), name="asyncwg-output", daemon=True
        )
        self._thread.start()

    def tail(self, rank: int) -> tuple[list[str], str]:
        """Return the last lines of a rank's stderr, and faulthandler's report if it crashed."""
        for stream in self._streams[rank]:
            stream.drain()
        lines = list(self._tails[rank])
        if rank in self._files:
            with self._files[rank].open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
                lines = file.read().decode("utf-8", "replace").splitlines()
        starts = [i for i, line in enumerate(lines) if line.startswith(_CRASH)]
        crash = "\n".join(lines[starts[-1] :]) if starts else ""
        return lines[-TAIL_LINES:], crash

    @property
    def note(self) -> str:
        """Why there is no tail, if there is none by design."""
        return "its stderr was not captured: output='inherit'" if self._mode == "inherit" else ""

    def close(self) -> None:
        """Print what is left and stop. Bounded: the pipes are not waited for."""
        if self._thread is not None and self._wake is not None:
            os.close(self._wake)
            self._thread.join()
            self._thread = None
        for stream in (s for streams in self._streams for s in streams):
            stream.close()

    @staticmethod
    def _drain(selector: selectors.BaseSelector, wake: int) -> None:
        with selector:
            while True:
                for key, _ in selector.select():
                    stream: _Stream | None = key.data
                    if stream is None:
                        os.close(wake)
                        return
                    if not stream.drain():
                        selector.unregister(key.fd)
