"""Groups that other programs call, for code without an event loop."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from asyncwg import ClassWithInitArgs, GroupClosedError, ResourcePool, UsageError, blocking
from tests.process.workers_attach import Plain, command


def detached(name: str) -> blocking.WorkerGroup:
    return blocking.WorkerGroup.start(
        ResourcePool([2], use_gpu=False),
        ClassWithInitArgs(Plain),
        detached=True,
        name=name,
        preload=[],
    )


def test_a_detached_group_is_let_go_of_and_attached_to_without_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with detached("plain") as wg:
        assert wg.add(1) == [1, 1]
    assert wg.state == "closed"
    with blocking.WorkerGroup.attach("plain") as wg:
        assert wg.add(1) == [2, 2]
        # A group travels to its own workers, and a view of it.
        assert wg[0].ask(wg, "twice", 3) == [6, 6]
        assert wg[0].ask(wg[1], "echo", 3) == 3
    dropped = blocking.WorkerGroup.from_detached(name_prefix="plain")
    assert dropped.add(1) == [3, 3]
    del dropped
    gc.collect()
    wg = blocking.WorkerGroup.attach("plain")
    wg.detach()
    with pytest.raises(GroupClosedError):
        wg.add(1)
    last = blocking.WorkerGroup.attach("plain")
    assert last.add(1) == [4, 4]
    last.shutdown()
    assert command("list").stdout.strip() == "no groups"
    with pytest.raises(UsageError, match="no group"):
        blocking.WorkerGroup.attach("plain")
