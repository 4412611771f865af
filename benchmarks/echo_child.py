"""A child that sends back what it gets: ``python -m benchmarks.echo_child FD blocking|loop LOOP``."""

from __future__ import annotations

import asyncio
import socket
import sys

from benchmarks.loops import runner

SIZE = 64


def blocking(sock: socket.socket) -> None:
    while message := sock.recv(SIZE):
        sock.send(message)


async def loop(sock: socket.socket) -> None:
    done = asyncio.Event()
    sock.setblocking(False)

    def answer() -> None:
        message = sock.recv(SIZE)
        if message:
            sock.send(message)
        else:
            done.set()

    asyncio.get_running_loop().add_reader(sock, answer)
    await done.wait()


if __name__ == "__main__":
    end = socket.socket(fileno=int(sys.argv[1]))
    if sys.argv[2] == "blocking":
        blocking(end)
    else:
        with runner(sys.argv[3]) as run:
            run.run(loop(end))
