"""The end of a host's process, as others wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from asyncwg._attach.connect import until_readable


class Watched:
    """A process whose end is waited for; none with pid 0."""

    def __init__(self, pid: int) -> None:
        self._fd = -1
        if pid:
            with contextlib.suppress(ProcessLookupError):
                self._fd = os.pidfd_open(pid)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def kill(self) -> None:
        """End it the hard way; its guardian ends all below it."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def ended(self, seconds: float) -> None:
        """Wait until it has ended; kill it after ``seconds``."""
        if self._fd < 0:
            return
        try:
            async with asyncio.timeout(seconds):
                await until_readable(asyncio.get_running_loop(), self._fd)
        except TimeoutError:
            self.kill()
        except asyncio.CancelledError:
            self.kill()
            raise
