"""Questions about groups from who does not attach to them: the command line."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Final

from asyncwg._attach.client import RemoteGang
from asyncwg._attach.connect import greeting
from asyncwg._attach.registry import Folder, peer_of
from asyncwg._attach.watched import Watched
from asyncwg.errors import AsyncwgError, CallTimeoutError, UsageError

_PATIENCE: Final = 3.0
"""Seconds that a host has to say how its group is; a busy loop is no reason to keep others waiting."""


async def summaries(directory: str | None = None) -> list[dict[str, Any]]:
    """Return how every group of this user is, by name. What dead hosts have left is removed."""
    with Folder(directory) as folder:
        names = folder.names()
    found: list[dict[str, Any]] = []
    for name in names:
        try:
            found.append(await ask(name, "summary", None, directory=directory))
        except UsageError:
            continue  # its host has died, or has just ended
        except AsyncwgError as error:
            found.append({"name": name, "state": f"no answer: {error}"})
    return found


async def ask(
    name: str,
    request: str,
    argument: Any,
    *,
    directory: str | None = None,
    until_gone: float | None = None,
) -> Any:
    """Have the host of a group do something by name.

    Args:
        name: of the group.
        request: what.
        argument: of that.
        directory: where sockets are; None for the user's own folder.
        until_gone: wait until the host's process has ended, where it is there for the group alone, and
            kill it after so many seconds; None for no waiting.

    Raises:
        UsageError: there is no such group.
        CallTimeoutError: it has not answered.
    """
    loop = asyncio.get_running_loop()
    with Folder(directory) as folder:
        sock = folder.connect(name)
        path = folder.path
    if sock is None:
        raise UsageError(f"there is no group {name!r} in {path}")
    gang = RemoteGang(loop, name, 0, {})
    pid = peer_of(sock).pid
    opened = False
    try:
        async with asyncio.timeout(_PATIENCE):
            arena_fd = await greeting(loop, sock, name)
            gang.open(sock, arena_fd, pid)
            opened = True
            summary = await gang.ask("summary")
        if request == "summary":
            return summary
        with Watched(pid if summary["own_process"] else 0) as host:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_gone):
                    answer = await gang.ask(request, argument)
                    gang.close()
                    if until_gone is None:
                        return answer
            if until_gone is not None:
                await host.ended(until_gone)
            return None
    except TimeoutError:
        raise CallTimeoutError(
            f"the host of group {name!r}, process {pid}, has not answered within {_PATIENCE} s"
        ) from None
    finally:
        if opened:
            gang.close()
        else:
            sock.close()
