"""Python stacks of all ranks, equal ones folded: where everybody is, also while they are stuck.

A rank's control lane tells them while a method runs or waits in a collective. One that does not answer holds
the GIL in C code, or has stopped: it gets a signal, whose handler is faulthandler's. That writes them in C,
without the GIL, to a pipe of their own.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

QUIET: Final = 0.03
"""Seconds of silence after which a rank's text is complete, if it has an end."""
_READ: Final = 64 * 1024
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_OUTERMOST: Final = ("...", " in <module>", " in _bootstrap")
"""How a text ends: frames that are not told, or the first one of a program or of a thread."""
_WRAPPERS: Final = frozenset(
    ["wrapper", "wrapped", "inner", "_fn", "_call_impl", "_wrapped_call_impl", "decorate_context"]
)
"""Names of functions that only pass a call on."""


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: str
    name: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither asyncwg's nor a library's."""
        return not self.file.startswith(_OURS) and not any(part in self.file for part in _LIBRARIES)

    def __str__(self) -> str:
        return f"{self.name} at {os.path.basename(self.file)}:{self.line}"


@dataclass(frozen=True, slots=True)
class RankStacks:
    """What one rank wrote.

    Attributes:
        rank: which one.
        text: faulthandler's whole text, "" if none came in time.
        frames: the main thread's stack down to the method, the most recent frame first.
    """

    rank: int
    text: str
    frames: tuple[Frame, ...]

    @property
    def where(self) -> str:
        """One line: the user's last line and what it has called."""
        if not self.text:
            return "no answer"
        if not self.frames:
            return "idle"
        for index, frame in enumerate(self.frames):
            if frame.is_users:
                called = [f.name for f in self.frames[:index] if f.name not in _WRAPPERS]
                name = called[-1] if called else frame.name
                return f"in {name} at {os.path.basename(frame.file)}:{frame.line}"
        return f"in {self.frames[0]}"


@dataclass(frozen=True, slots=True)
class Stacks:
    """Stacks of several ranks; ``str()`` is the report, equal stacks told once."""

    ranks: tuple[RankStacks, ...]

    @property
    def summary(self) -> str:
        """One line: ``ranks 0, 2, 3 in all_reduce at train.py:88; rank 1 in next_batch at data.py:12``."""
        places: dict[str, list[int]] = {}
        for each in self.ranks:
            places.setdefault(each.where, []).append(each.rank)
        ordered = sorted(places.items(), key=lambda item: (item[0] == "idle", -len(item[1])))
        return "; ".join(f"{_ranks(ranks)} {where}" for where, ranks in ordered)

    def __str__(self) -> str:
        """The summary, and each different stack with its ranks."""
        stacks: dict[tuple[Frame, ...], list[int]] = {}
        for each in self.ranks:
            if each.text:
                stacks.setdefault(each.frames, []).append(each.rank)
        lines = [self.summary]
        for frames, ranks in sorted(stacks.items(), key=lambda item: len(item[1])):
            if not frames:
                continue
            lines.append(f"{_ranks(ranks)}, most recent call first:")
            lines += [f'  File "{f.file}", line {f.line} in {f.name}' for f in frames]
        return "\n".join(lines)


class HangReport(NamedTuple):
    """A call that runs longer than it should; ``str()`` is the report."""

    group: str
    method: str
    call_id: int
    seconds: float
    """For how long at least."""
    silent: list[int]
    """The ranks that have not answered."""
    stacks: Stacks

    def __str__(self) -> str:
        return (
            f"{self.method} (call {self.call_id}) of group {self.group!r} has run for more than "
            f"{self.seconds:g} s; no answer from {_ranks(self.silent)}\n{self.stacks}"
        )


def parse(rank: int, text: str) -> RankStacks:
    """Read faulthandler's text: the stack of the thread that got the signal, which is the main one."""
    kept: list[Frame] = []
    for found in filter(None, map(_FRAME.match, text.splitlines())):
        frame = Frame(found["file"], found["line"], found["name"])
        if frame.file.startswith(_OURS + "_worker"):
            break  # below this is asyncwg's own loop
        kept.append(frame)
    if all(frame.file.startswith(_OURS) for frame in kept):
        kept = []  # it waits for a call, or answers one
    return RankStacks(rank, text, tuple(kept))


def _has_end(text: str) -> bool:
    """Whether a text that faulthandler writes has all that `parse` reads of it."""
    lines = text.splitlines()
    if not text.endswith("\n"):
        lines = lines[:-1]
    own_loop = f'  File "{_OURS}_worker'
    return bool(lines) and (
        lines[-1].endswith(_OUTERMOST) or any(line.startswith(own_loop) for line in lines)
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class StackPipe:
    """The controller's end of the pipe through which one rank's stacks come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._chunks: list[bytes] = []
        self._complete: asyncio.Future[None] | None = None
        self._quiet: asyncio.TimerHandle | None = None
        loop.add_reader(self._read, self._readable)

    def release(self) -> None:
        """Close our copy of the rank's end."""
        if self.write >= 0:
            os.close(self.write)
            self.write = -1

    def expect(self, ask: Callable[[], None]) -> asyncio.Future[None]:
        """Return what is done when the next text is complete.

        Args:
            ask: sends the signal. Whoever comes while a text is expected gets the same one: of two signals
                at once the kernel may give the second to another thread, which then takes both, and
                tells its own stack.
        """
        if self._complete is None:
            self._chunks.clear()
            self._complete = self._loop.create_future()
            ask()
        return self._complete

    @property
    def _text(self) -> str:
        return b"".join(self._chunks).decode("utf-8", "replace")

    async def take(self, complete: asyncio.Future[None], timeout: float) -> str:
        """Wait for an expected text; what there is of it after ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(complete)
        except TimeoutError:
            self._complete = None
        return self._text

    def close(self) -> None:
        """Stop listening."""
        self.release()
        if self._read >= 0:
            self._loop.remove_reader(self._read)
            os.close(self._read)
            self._read = -1
        if self._quiet is not None:
            self._quiet.cancel()
        self._done()

    def _readable(self) -> None:
        try:
            data = os.read(self._read, _READ)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._read)
            self._done()
            return
        self._chunks.append(data)
        if self._quiet is not None:
            self._quiet.cancel()
        self._quiet = self._loop.call_later(QUIET, self._fallen_silent)

    def _fallen_silent(self) -> None:
        """The handler writes piece by piece: on a busy machine it may fall silent in the middle."""
        if _has_end(self._text):
            self._done()

    def _done(self) -> None:
        complete, self._complete = self._complete, None
        if complete is not None and not complete.done():
            complete.set_result(None)
