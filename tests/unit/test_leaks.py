"""The tests' own plumbing: a leak is seen, and what is clean is not blamed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.leaks import GUARDIAN, Snapshot, bounded, leaks_since, pending_tasks

WAIT_FOR_INPUT = [sys.executable, "-c", "input()"]


def test_an_open_descriptor_is_a_leak() -> None:
    before = Snapshot.take()
    reader, writer = os.pipe()
    left = leaks_since(before, settle=0.05)
    os.close(reader)
    os.close(writer)
    assert len(left) == 2
    assert all("pipe:" in line for line in left)


def test_a_running_child_is_a_leak_and_its_exit_status_is_not_taken_away() -> None:
    before = Snapshot.take()
    with subprocess.Popen(WAIT_FOR_INPUT, stdin=subprocess.PIPE) as child:
        left = leaks_since(before, settle=0.05)
        assert child.stdin is not None
        child.stdin.write(b"\n")
    assert any(f"process {child.pid}" in line for line in left)
    assert child.returncode == 0
    assert leaks_since(before) == []


def test_the_guardian_is_no_leak_but_a_child_of_it_is() -> None:
    """Its first appearance also excuses its descriptors; they are in the next snapshot."""
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    before = Snapshot.take()
    with subprocess.Popen(
        [sys.executable, "-c", "input()", GUARDIAN], stdin=subprocess.PIPE
    ) as guardian:
        assert leaks_since(before, settle=0.05) == []
        guardian.communicate(b"\n")
    with subprocess.Popen(
        [sys.executable, "-c", code, GUARDIAN], stdin=subprocess.PIPE
    ) as guardian:
        left: list[str] = []
        while not left:
            left = leaks_since(before, settle=0.05)
        guardian.communicate(b"\n")
    assert any(f"parent {guardian.pid}" in line for line in left)


def test_a_name_in_shared_memory_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tracker of multiprocessing would be a process that stays.
    monkeypatch.setattr(resource_tracker, "register", Mock())
    monkeypatch.setattr(resource_tracker, "unregister", Mock())
    before = Snapshot.take()
    block = shared_memory.SharedMemory(create=True, size=1)
    name = block.name
    block.close()
    left = leaks_since(before, settle=0.05)
    block.unlink()
    assert any(name in line for line in left)


async def test_a_pending_task_is_a_leak(loop_kind: str) -> None:
    never = asyncio.Event()
    task = asyncio.create_task(never.wait(), name="lost")
    left = await pending_tasks(settle=0.02)
    never.set()
    await task
    assert len(left) == 1
    assert "lost" in left[0]
    assert await pending_tasks() == []


async def test_loop_kind_names_the_loop_that_runs(loop_kind: str) -> None:
    assert type(asyncio.get_running_loop()).__module__.startswith(loop_kind)


async def test_bounded_gives_the_value(loop_kind: str) -> None:
    assert await bounded(asyncio.sleep(0, "value")) == "value"


async def test_bounded_fails_and_writes_the_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pytest.fail.Exception, match="not done after"):
        await bounded(asyncio.Event().wait(), 0.02)
    assert "test_bounded_fails_and_writes_the_stacks" in capfd.readouterr().err


def test_no_test_waits_in_a_thread_that_keeps_pytest_from_ending() -> None:
    """`in_thread` is for that."""
    name = "to_" + "thread("
    tests = Path(__file__).parents[1].rglob("*.py")
    assert [str(file) for file in tests if f"asyncio.{name}" in file.read_text()] == []
