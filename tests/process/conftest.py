"""Plumbing of the tests with real workers."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncwg._driver import process, watch
from tests.process.workers_life import Fifo
from tests.times import PATIENCE


@pytest.fixture(scope="session", autouse=True)
def no_hurry() -> Iterator[None]:
    """Let come what a caller is not kept waiting for: stacks for an error, a guardian's word on an end.

    They have fractions of a second, and may be left out. On a machine that is busy with others tests
    of what they say would be tests of that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_CODE_WAIT", PATIENCE)
        patch.setattr(watch, "_STACKS_WAIT", PATIENCE)
        yield


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
