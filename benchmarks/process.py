"""The runner's end of `benchmarks.serve`: ask, with a limit on how long an answer may take."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

MODULES = {
    "floor": "torch",
    "asyncwg": "asyncwg",
    "ray": "ray",
    "monarch": "monarch",
    "xoscar": "xoscar",
    "torch_pipes": "torch",
    "verl": "verl",
}
"""Every adapter, and the module it can't do without."""
OURS = ("floor", "asyncwg")
PEERS = tuple(name for name in MODULES if name not in OURS)


class NoAnswerError(Exception):
    """A library did not answer in time, said that it failed, or its process ended."""


def missing(name: str) -> bool:
    """Whether a library is not installed."""
    return find_spec(MODULES[name]) is None


class Process:
    """One library in a process of its own."""

    def __init__(self, name: str, loop: str, folder: Path) -> None:
        self.name, self.loop = name, loop
        self.log = folder / f"{name}-{loop}.log"
        self.process: asyncio.subprocess.Process | None = None

    async def spawn(self) -> None:
        # One thread for torch, here and in the workers, which inherit it: more would measure OpenMP.
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "benchmarks.serve", self.name, self.loop,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, env=env,
            )  # fmt: skip

    async def ask(self, op: str, limit: float, **request: Any) -> Any:
        """Return the answer.

        Raises:
            NoAnswerError: there is none, and why. After a silence the process is killed.
        """
        process = self.process
        if process is None or process.returncode is not None:
            raise NoAnswerError("its process has ended")
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"op": op, **request}).encode() + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), limit)
        except TimeoutError:
            await self.kill()
            raise NoAnswerError(f"no answer in {limit:.0f} s") from None
        if not line:
            await self.kill()
            raise NoAnswerError("its process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise NoAnswerError(answer["error"])
        return answer["value"]

    async def end(self) -> None:
        """Let it end by itself, within some seconds."""
        if self.process is not None and self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                await asyncio.wait_for(self.process.wait(), 10)
            except TimeoutError:
                pass  # killed below
        await self.kill()

    async def kill(self) -> None:
        """End it and all that it started."""
        process, self.process = self.process, None
        if process is None:
            return
        try:
            tree = psutil.Process(process.pid)
            victims = [*tree.children(recursive=True), tree]
        except psutil.NoSuchProcess:
            victims = []
        for victim in victims:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                pass  # it was faster
        await process.wait()
