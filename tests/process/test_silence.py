"""What asyncwg prints by itself: nothing, also where every warning is an error."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import asyncio
import torch
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register

class Peer(Worker):
    def __init__(self):
        self.init_process_group()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, x):
        return x * 2

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait(self):
        await asyncio.sleep(0.01)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        raise ValueError("expected")

def group():
    return WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Peer))

async def main():
    # How long a step takes is the machine's matter.
    asyncio.get_running_loop().slow_callback_duration = 1000
    async with group() as wg:
        for size in (4, 1 << 20):
            assert (await wg.double(torch.ones(size))).sum() == 2 * size
        await asyncio.gather(*(wg.wait() for _ in range(20)))
        try:
            await wg.fail()
        except* ValueError:
            pass
        try:
            await asyncio.wait_for(wg.wait(), 0.001)
        except TimeoutError:
            pass
        await wg.stacks()
        await wg.restart()
        await wg.wait()
    forgotten = await WorkerGroup.start(ResourcePool([2], use_gpu=False), ClassWithInitArgs(Peer))
    await forgotten.wait()

asyncio.run(main())
"""


def test_a_run_with_debug_mode_and_warnings_as_errors_is_silent() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-"],
        input=PROGRAM,
        env={**os.environ, "PYTHONASYNCIODEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
