"""Plumbing of all tests: what one leaves behind fails it, and the kinds of event loop.

Ask for `loop_kind` to run an asynchronous test on asyncio's own loop and on uvloop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import pytest
import pytest_asyncio
import uvloop

from tests.leaks import SETTLE, no_leaks, pending_tasks

LOOPS: Final[Mapping[str, Callable[[], asyncio.AbstractEventLoop]]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}


def pytest_sessionstart() -> None:
    """Let libuv open the pipe for signals that it keeps for the life of the process."""
    uvloop.new_event_loop().close()


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Give a test both loops if it asks for ``loop_kind``, else asyncio's own."""
    if isinstance(item, pytest.Function) and "loop_kind" in item.fixturenames:
        return LOOPS
    return {"asyncio": LOOPS["asyncio"]}


@pytest.fixture
async def loop_kind() -> str:
    """``"asyncio"`` or ``"uvloop"``: the test runs once on each."""
    is_uvloop = isinstance(asyncio.get_running_loop(), uvloop.Loop)
    return "uvloop" if is_uvloop else "asyncio"


@pytest.fixture(autouse=True)
def leaves_nothing() -> Iterator[None]:
    """Fail a test that leaves a process, a descriptor or shared memory.

    It is set up before, and so torn down after, every other fixture and the event loop.
    """
    with no_leaks():
        yield


@pytest.fixture(autouse=True)
def leaves_no_task(request: pytest.FixtureRequest, leaves_nothing: None) -> Iterator[None]:
    """Fail an asynchronous test that leaves a task on its loop.

    The look must come after the test's own fixtures, which may run tasks for the whole test, and
    before the loop closes, which cancels what is left. So the loop has to be set up right here.
    """
    if not pytest_asyncio.is_async_test(request.node):
        yield
        return
    runner: asyncio.Runner = request.getfixturevalue("_function_scoped_runner")
    yield
    left = runner.run(pending_tasks(SETTLE))
    if left:
        pytest.fail("left behind:\n" + "\n".join(f"  {line}" for line in left))
