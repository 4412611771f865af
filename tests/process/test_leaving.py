"""What a worker still does when it leaves, and what it does not wait for."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
from pathlib import Path

import pytest

from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from tests.leaks import bounded


class Leaving(Worker):
    """Has an idle executor, and something to do at its end."""

    def __init__(self, folder: str) -> None:
        self.executor = concurrent.futures.ThreadPoolExecutor(2)
        mark = Path(folder) / f"left-{self.rank}"
        atexit.register(mark.touch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use_executor(self) -> int:
        return self.executor.submit(lambda: 7).result()


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
async def test_idle_threads_of_an_executor_do_not_keep_a_worker(
    tmp_path: Path, start_method: str
) -> None:
    spec = ClassWithInitArgs(Leaving, str(tmp_path))
    pool = ResourcePool([2], use_gpu=False)
    wg = await bounded(WorkerGroup.start(pool, spec, start_method=start_method), 60)
    assert await bounded(wg.use_executor()) == [7, 7]
    # A worker that waited for them would be ended by SIGTERM, and its marks would be missing.
    await bounded(wg.shutdown(grace=600))
    assert sorted(os.listdir(tmp_path)) == ["left-0", "left-1"]
