"""One repetition of one workload, timed inside the process that makes the calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Coroutine
from functools import cached_property, partial
from time import perf_counter
from typing import Any

import torch

from benchmarks.adapter import Adapter
from benchmarks.workloads import BIG, BY_NAME, IN_FLIGHT, SMALL

BURST = 0.06
"""Seconds that a burst of short calls takes, so that all libraries get the same share of the noise."""
SINGLE = 1_000_000
"""Elements from which on one call is long enough to be timed by itself."""
FEWEST, MOST = 5, 2000


class Values:
    """The tensors that travel. They are made once, so sending never pays for their first touch."""

    def __init__(self, n: int, numel: int = BIG) -> None:
        self.n, self.numel = n, numel

    @cached_property
    def big(self) -> torch.Tensor:
        return torch.arange(self.numel, dtype=torch.float32)

    @cached_property
    def small(self) -> torch.Tensor:
        return torch.arange(SMALL, dtype=torch.float32)

    @cached_property
    def chunks(self) -> list[torch.Tensor]:
        return list(self.big.chunk(self.n))

    def arguments(self, method: str) -> tuple[Any, ...]:
        """Return what a method of an adapter is called with."""
        match method:
            case "pipelined":
                return (IN_FLIGHT,)
            case "small":
                return (self.small,)
            case "broadcast" | "broadcast_two":
                return (self.big,)
            case "scatter" | "echo" | "echo_warm":
                return (self.chunks,)
            case "gather" | "gather_warm":
                return (self.numel // self.n,)
            case _:
                return ()

    def check(self, method: str, answer: Any) -> None:
        """Raise if a library has not done what it was asked for."""
        match method:
            case "small":
                right = answer == [SMALL - 1.0] * self.n
            case "broadcast":
                right = answer == [self.big[-1].item()] * self.n
            case "scatter":
                right = answer == [chunk[-1].item() for chunk in self.chunks]
            case "echo":
                right = all(map(torch.equal, answer, self.chunks))
            case "gather":
                right = answer.numel() == self.numel and bool((answer == 1).all())
            case _:
                right = True
        if not right:
            raise AssertionError(f"{method} gave a wrong answer")


async def repetition(
    adapter: Adapter, workload: str, values: Values, *, check: bool
) -> tuple[float, float | None]:
    """Return the seconds of one call, and of big values also those of the call before it.

    Of short calls it is the median of a burst. The median and not the mean, because other programs
    run on the same machine. Of big values the first call after other libraries' turns may find
    memory that was given back meanwhile, so there are two: the first, and the one right after it.
    """
    spec = BY_NAME[workload]
    operation: Callable[[], Coroutine[Any, Any, Any]] = partial(
        getattr(adapter, spec.method), *values.arguments(spec.method)
    )
    if check:  # warm, and right
        answer = await operation()
        if type(adapter).__module__ != "benchmarks.adapters.floor":
            values.check(spec.method, answer)
        del answer
    if spec.large and values.numel > SINGLE:
        before = await _once(operation)
        return await _once(operation), before
    times: list[float] = []
    end = perf_counter() + BURST
    while len(times) < FEWEST or (len(times) < MOST and perf_counter() < end):
        started = perf_counter()
        await operation()
        times.append(perf_counter() - started)
    calls = IN_FLIGHT if spec.method == "pipelined" else 1
    return statistics.median(times) / calls, None


async def _once(operation: Callable[[], Coroutine[Any, Any, Any]]) -> float:
    started = perf_counter()
    answer = await operation()  # kept: giving its memory back is not part of the call
    took = perf_counter() - started
    del answer
    return took
