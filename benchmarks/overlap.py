"""How close a trainer that is one step off comes to perfect overlap.

A rollout group makes a batch in a given time, a trainer group works on it for the same time. In all
libraries alike a rollout makes a new tensor, as real ones do, and then sleeps for what is left of its
time; a trainer reads the batch, and sleeps likewise. So nothing but the runtime is measured, and what
waking up from a sleep takes: a loop that makes batches in this way without any runtime shows how much
that is. With perfect overlap a step takes as long as one of the two.

``python -m benchmarks.overlap LIBRARY WORKERS SECONDS MEGABYTES`` is one run in a process of its own.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import asyncwg
from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from benchmarks.process import missing

ALONE = "no runtime"
"""The rollout's steps in a loop, in one process: nobody is given the batches."""
LIBRARIES = (ALONE, "asyncwg", "asyncwg, one call after the other", "ray")
CASES = ((0.05, 16), (0.005, 1))
"""Seconds of a step, and megabytes of a batch."""
SIZES = (2, 4, 8)
"""Workers in both groups."""
AHEAD = 2
"""Batches that are asked for beyond the one that is trained on."""
WARM, SECONDS = 0.3, 3.0
"""Seconds that are not measured, and that are."""


class Side(Worker):
    """Rollout or trainer."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: torch.Tensor, seconds: float, columns: int) -> torch.Tensor:
        return _generate(len(prompts), columns, seconds)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def train(self, batch: torch.Tensor, seconds: float) -> float:
        return _train(batch, seconds)


def _generate(rows: int, columns: int, seconds: float) -> torch.Tensor:
    """Make a batch, which takes so many seconds in all."""
    end = time.perf_counter() + seconds
    torch.set_num_threads(1)  # as Ray's actors have by themselves
    batch = torch.ones(rows, columns)
    time.sleep(max(0.0, end - time.perf_counter()))
    return batch


def _train(batch: torch.Tensor, seconds: float) -> float:
    """Read a batch, which takes so many seconds in all."""
    end = time.perf_counter() + seconds
    last = float(batch[-1, -1])
    time.sleep(max(0.0, end - time.perf_counter()))
    return last


def _steps() -> Iterator[int]:
    """Count steps until the time is over."""
    end = time.perf_counter() + WARM + SECONDS
    step = 0
    while step < 10 or time.perf_counter() < end:
        yield step
        step += 1


class _Rate:
    """Steps per second, after the first few."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._from: float | None = None
        self._count = 0

    def step(self) -> None:
        now = time.perf_counter()
        if self._from is not None:
            self._count += 1
            self._last = now
        elif now - self._begin > WARM:
            self._from = self._last = now

    @property
    def per_second(self) -> float:
        assert self._from is not None
        return self._count / (self._last - self._from)


def _alone(seconds: float, columns: int) -> float:
    rate = _Rate()
    for _ in _steps():
        _generate(1, columns, seconds)
        rate.step()
    return rate.per_second


async def _ours(workers: int, seconds: float, columns: int, *, overlap: bool) -> float:
    side = workers // 2
    prompts = torch.zeros(side, 4)
    rate = _Rate()
    async with (
        WorkerGroup(ResourcePool([side], use_gpu=False), ClassWithInitArgs(Side)) as rollout,
        WorkerGroup(ResourcePool([side], use_gpu=False), ClassWithInitArgs(Side)) as trainer,
    ):
        if not overlap:
            for _ in _steps():
                batch = await rollout.generate(prompts, seconds, columns)
                await trainer.train(batch, seconds)
                rate.step()
            return rate.per_second
        # One batch is made while another is trained on, and the call for the next one waits in its lane.
        coming = collections.deque(
            rollout.generate(prompts, seconds, columns) for _ in range(AHEAD)
        )
        training = None
        for _ in _steps():
            # The trainer waits for the batch itself: nobody here wakes up in between.
            started = trainer.train(coming.popleft(), seconds)
            coming.append(rollout.generate(prompts, seconds, columns))
            if training is not None:
                await training
                rate.step()
            training = started
        await asyncio.gather(training, *coming, return_exceptions=True)
    return rate.per_second


def _rays(workers: int, seconds: float, columns: int) -> float:
    # Its own way to hand a tensor from its store to a reader without a copy.
    os.environ.setdefault("RAY_ENABLE_ZERO_COPY_TORCH_TENSORS", "1")
    import ray  # import here: only where it is measured

    ray.init(num_cpus=workers, log_to_driver=False, logging_level="ERROR")

    @ray.remote(num_cpus=1)
    class Actor:
        def generate(self, seconds: float, columns: int) -> torch.Tensor:
            return _generate(1, columns, seconds)

        def train(self, batch: torch.Tensor, seconds: float) -> float:
            return _train(batch, seconds)

    side = workers // 2
    rollout: list[Any] = [Actor.remote() for _ in range(side)]
    trainer: list[Any] = [Actor.remote() for _ in range(side)]
    rate = _Rate()

    def generate() -> list[Any]:
        return [actor.generate.remote(seconds, columns) for actor in rollout]

    coming = collections.deque(generate() for _ in range(AHEAD))
    training: list[Any] = []
    for _ in _steps():
        started = [
            actor.train.remote(part, seconds)
            for actor, part in zip(trainer, coming.popleft(), strict=True)
        ]
        coming.append(generate())
        if training:
            ray.get(training)
            rate.step()
        training = started
    ray.get(training)
    ray.shutdown()
    return rate.per_second


def measure() -> Iterator[str]:
    """Run everything, one process at a time, and yield lines of a table."""
    libraries = [name for name in LIBRARIES if name != "ray" or not missing("ray")]
    yield "| step, batch | workers | bound | " + " | ".join(libraries) + " |"
    yield "| --- " * (3 + len(libraries)) + "|"
    for seconds, megabytes in CASES:
        for workers in SIZES:
            cells: list[str] = []
            for name in libraries:
                rate = _in_a_process(name, workers, seconds, megabytes)
                cells.append(f"{rate:.1f}, {100 * rate * seconds:.1f} %")
            head = f"| {1e3 * seconds:g} ms, {megabytes} MB | {workers} | {1 / seconds:g} / s | "
            yield head + " | ".join(cells) + " |"


def _in_a_process(library: str, workers: int, seconds: float, megabytes: int) -> float:
    arguments = [library, str(workers), str(seconds), str(megabytes)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.overlap", *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(library: str, workers: int, seconds: float, megabytes: int) -> None:
    """Run one case and print steps per second."""
    columns = megabytes * (1 << 18) // (workers // 2)
    if library == "ray":
        rate = _rays(workers, seconds, columns)
    elif library == ALONE:
        rate = _alone(seconds, columns)
    else:
        rate = asyncwg.run(_ours(workers, seconds, columns, overlap=library == "asyncwg"))
    print(json.dumps(rate))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
