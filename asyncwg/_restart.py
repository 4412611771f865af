"""Starting a broken group again: the policy, the saved state, and calls that may be repeated."""

from __future__ import annotations

import asyncio
import os
import pathlib
import pickle
import tempfile
from dataclasses import dataclass
from typing import Any

from asyncwg._wire import codec, sources
from asyncwg.errors import UsageError


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a group that broke is started again by itself, and what of its state is kept.

    Args:
        max_restarts: how often in all; 0 for never by itself.
        backoff: seconds before the first restart, twice as many before each further one.
        save_every: save the ranks' state after every so many calls; None for only when the user asks.
        directory: where to keep saved states, one file per rank, replaced as a whole; None for the
            controller's memory.
    """

    max_restarts: int = 3
    backoff: float = 1.0
    save_every: int | None = None
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.max_restarts < 0 or self.backoff < 0:
            raise UsageError("max_restarts and backoff must be 0 or more")
        if self.save_every is not None and self.save_every < 1:
            raise UsageError(f"save_every must be at least 1 call, not {self.save_every!r}")

    def delay(self, attempt: int) -> float:
        """Return the seconds before restart number ``attempt``, which counts from 0."""
        return self.backoff * 2.0**attempt


class SavedState:
    """What each rank's ``save_state()`` returned last."""

    def __init__(self, group: str, directory: str | os.PathLike[str] | None) -> None:
        self._directory = None if directory is None else pathlib.Path(directory)
        self._group = group
        self._values: list[Any] | None = None
        self._ranks = 0

    @property
    def exists(self) -> bool:
        """Whether anything was saved."""
        return self._ranks > 0

    async def put(self, values: list[Any]) -> None:
        """Keep the values of all ranks, in place of what was kept: all of them, or none."""
        if self._directory is None:
            self._values = values
        else:
            await asyncio.to_thread(self._write, self._directory, values)
        self._ranks = len(values)

    async def get(self) -> list[Any]:
        """Return the values by rank."""
        if self._directory is None:
            assert self._values is not None
            return self._values
        return await asyncio.to_thread(self._read, self._directory)

    def _path(self, directory: pathlib.Path, rank: int) -> pathlib.Path:
        return directory / f"{self._group}-{rank}.state"

    def _write(self, directory: pathlib.Path, values: list[Any]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        written: list[str] = []
        for value in values:
            fd, name = tempfile.mkstemp(dir=directory, prefix=f".{self._group}-")
            written.append(name)
            with open(fd, "wb") as file:
                stream, buffers = codec.encode(value)
                pickle.dump((stream, [bytes(b) for b in sources.inline(buffers)]), file)
                file.flush()
                os.fsync(file.fileno())
        # Every file is complete before the first old one goes.
        for rank, name in enumerate(written):
            os.replace(name, self._path(directory, rank))

    def _read(self, directory: pathlib.Path) -> list[Any]:
        values: list[Any] = []
        for rank in range(self._ranks):
            with self._path(directory, rank).open("rb") as file:
                stream, buffers = pickle.load(file)  # what this process has written
            values.append(codec.decode(stream, [bytearray(buffer) for buffer in buffers]))
        return values
