"""Plumbing of the tests with real workers."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.workers_life import Fifo


@pytest.fixture(scope="session")
def torch_with_its_pipe() -> None:
    """Let the libuv inside torch open the pipe for signals that it keeps for the life of the process.

    For tests whose controller makes a store.
    """
    import torch.distributed as dist

    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # not in its stub's __all__
    make("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(scope="session", autouse=True)
def torch_has_its_pipe(request: pytest.FixtureRequest) -> None:
    """The same for all tests, where some module of them has imported torch."""
    if "torch" in sys.modules:
        request.getfixturevalue("torch_with_its_pipe")


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Callable[[], Fifo]]:
    """Make FIFOs that workers and the test wait on, as many as are asked for."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def make() -> Fifo:
            made = Fifo.make(tmp_path / f"fifo-{next(numbers)}")
            stack.callback(made.close)
            return made

        yield make
