"""Plumbing of the tests with real workers."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_has_its_pipe() -> None:
    """Let the libuv inside torch open the pipe for signals that it keeps for the life of the process.

    Where no test has imported torch, no test makes a store.
    """
    if "torch" in sys.modules:
        import torch.distributed as dist

        make: Any = dist.TCPStore  # type: ignore[attr-defined]  # not in its stub's __all__
        make("127.0.0.1", 0, is_master=True, wait_for_workers=False)
