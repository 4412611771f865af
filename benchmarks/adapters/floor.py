"""What can't be undercut: bare sockets on the same event loop, one memcpy, the computing alone.

The echo is measured with children that block in ``recv`` and with children that run an event loop,
because either may be the faster one; comparing with the slower one would flatter us.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import adapter, work
from benchmarks.workloads import BIG, WORKERS

MESSAGE = bytes(32)  # about what an empty call takes


def child(*arguments: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a child that echoes; return our end and the process."""
    ours, theirs = socket.socketpair()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-m", "benchmarks.echo_child", str(fd), *arguments]
        return ours, subprocess.Popen(command, pass_fds=[fd])


class Echo:
    """Sockets to children; a message to some of them is one future, done when all have answered."""

    def __init__(self, kind: str, n: int) -> None:
        self.loop = asyncio.get_running_loop()
        name = "uvloop" if type(self.loop).__module__.startswith("uvloop") else "asyncio"
        self.sockets, self.children = [], []
        for _ in range(n):
            ours, theirs = socket.socketpair()
            command = [
                sys.executable,
                "-m",
                "benchmarks.echo_child",
                str(theirs.fileno()),
                kind,
                name,
            ]
            self.children.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
            theirs.close()
            self.sockets.append(ours)
        self.missing = 0
        self.future: asyncio.Future[None] = self.loop.create_future()
        for sock in self.sockets:
            sock.setblocking(False)
            self.loop.add_reader(sock, self.answered, sock)

    def answered(self, sock: socket.socket) -> None:
        sock.recv(64)
        self.missing -= 1
        if not self.missing:
            self.future.set_result(None)

    def send(self, sockets: Sequence[socket.socket]) -> asyncio.Future[None]:
        self.future = self.loop.create_future()
        self.missing = len(sockets)
        for sock in sockets:
            sock.send(MESSAGE)
        return self.future

    def close(self) -> None:
        for sock in self.sockets:
            self.loop.remove_reader(sock)
            sock.close()
        for child in self.children:
            child.wait()


class Computing:
    """Forked processes that do the workers' computing on values of their own: nothing travels."""

    def __init__(self, n: int) -> None:
        self.sockets = []
        for _ in range(n):
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                ours.close()
                self.work(theirs, BIG // n)
            theirs.close()
            self.sockets.append(ours)

    def work(self, sock: socket.socket, numel: int) -> None:
        chunk, target = torch.ones(numel), torch.ones(numel)
        jobs: dict[bytes, Callable[[], object]] = {
            b"e": lambda: work.times_one(chunk),
            b"g": lambda: work.ones(numel),
            b"E": lambda: torch.mul(chunk, 1, out=target),
            b"G": lambda: torch.ones(numel, out=target),
        }
        while job := sock.recv(1):
            result = jobs[job]()
            sock.send(b".")
            del result
        os._exit(0)

    def do(self, job: bytes) -> None:
        for sock in self.sockets:
            sock.send(job)
        for sock in self.sockets:
            sock.recv(1)


class Adapter(adapter.Adapter):
    async def start(self, n: int) -> None:
        # Forked first: nothing has run in torch yet, so the children inherit no thread pool.
        self.computing = Computing(n) if n == WORKERS else None
        self.blocking, self.looping = Echo("blocking", n), Echo("loop", n)
        self.source, self.target = torch.Tensor(), torch.Tensor()
        self.socket, self.child = child("blocking")
        for echo in (self.blocking, self.looping):
            await echo.send(echo.sockets)

    async def close(self, last: bool) -> None:
        self.blocking.close()
        self.looping.close()
        self.socket.close()
        self.child.wait()
        for sock in self.computing.sockets if self.computing else ():
            sock.close()

    async def pids(self) -> list[int]:
        return [child.pid for child in self.blocking.children]

    async def pair(self) -> None:
        self.socket.send(MESSAGE)
        self.socket.recv(64)

    async def one(self) -> None:
        await self.blocking.send(self.blocking.sockets[:1])

    async def one_loop(self) -> None:
        await self.looping.send(self.looping.sockets[:1])

    async def all(self) -> None:
        await self.blocking.send(self.blocking.sockets)

    async def all_loop(self) -> None:
        await self.looping.send(self.looping.sockets)

    async def broadcast(self, tensor: Tensor) -> list[float]:
        """Copy once: any number of readers can share one copy."""
        if self.target.numel() != tensor.numel():
            self.target = torch.ones(tensor.numel())
        ctypes.memmove(self.target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return []

    async def broadcast_two(self, tensor: Tensor) -> None:
        """Copy once, in two threads: faster where there are two CPUs to run them."""
        half = tensor.nbytes // 2
        target, source = self.target.data_ptr(), tensor.data_ptr()
        other = threading.Thread(target=ctypes.memmove, args=(target, source, half))
        other.start()
        ctypes.memmove(target + half, source + half, tensor.nbytes - half)
        other.join()

    async def scatter(self, chunks: Sequence[Tensor]) -> list[float]:
        start = 0
        for chunk in chunks:
            ctypes.memmove(self.target[start:].data_ptr(), chunk.data_ptr(), chunk.nbytes)
            start += chunk.numel()
        return []

    async def echo(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        assert self.computing is not None
        self.computing.do(b"e")
        return []

    async def echo_warm(self, chunks: Sequence[Tensor]) -> None:
        """Compute into memory that was used before, which ``*`` gets only from a tuned allocator."""
        assert self.computing is not None
        self.computing.do(b"E")

    async def gather_warm(self, numel: int) -> None:
        assert self.computing is not None
        self.computing.do(b"G")

    async def gather(self, numel: int) -> Tensor:
        assert self.computing is not None
        self.computing.do(b"g")
        return torch.Tensor()
