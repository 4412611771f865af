"""What the kernel tells of the out-of-memory killer, in each of the ways it has for that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from asyncwg._driver import postmortem
from asyncwg._driver.postmortem import oom_kills

EVENTS: Final = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"
CONTROL: Final = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"

Kernel = Callable[[str, str, str], None]


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Files in place of the kernel's: of which groups this process is, and one that counts."""
    monkeypatch.setattr(postmortem, "_OWN", tmp_path / "own")
    monkeypatch.setattr(postmortem, "_CONTROL_GROUPS", tmp_path / "groups")

    def tell(own: str, path: str, text: str) -> None:
        (tmp_path / "own").write_text(own)
        file = tmp_path / "groups" / path
        file.parent.mkdir(parents=True)
        file.write_text(text)

    return tell


@pytest.mark.parametrize(
    ("own", "path", "text"),
    [
        ("0::/user.slice/run.scope\n", "user.slice/run.scope/memory.events", EVENTS),
        ("0::/\n", "memory.events", EVENTS),
        ("4:memory:/box/1\n3:cpu,cpuacct:/\n", "memory/box/1/memory.oom_control", CONTROL),
        ("5:hugetlb,memory:/box\n", "memory/box/memory.oom_control", CONTROL),
        ("0::/box\n4:memory:/box/1\n", "memory/box/1/memory.oom_control", CONTROL),
        ("0::/run:1\n", "run:1/memory.events", EVENTS),
    ],
    ids=["version 2", "of a container", "version 1", "with others", "both", "a colon"],
)
def test_kills_are_counted_in_the_group_that_this_process_is_in(
    kernel: Kernel, own: str, path: str, text: str
) -> None:
    kernel(own, path, text)
    assert oom_kills() == 2


@pytest.mark.parametrize("text", ["", "low 0\n", "oom_kill\n", "oom_kill many\n"])
def test_a_file_that_says_nothing_of_kills_counts_none(kernel: Kernel, text: str) -> None:
    kernel("0::/box\n", "box/memory.events", text)
    assert oom_kills() == 0


def test_a_group_that_is_not_for_us_to_read_counts_none(kernel: Kernel) -> None:
    kernel("0::/elsewhere\n", "box/memory.events", EVENTS)
    assert oom_kills() == 0


def test_a_kernel_without_control_groups_counts_none(kernel: Kernel) -> None:
    """The fixture has named files that are not there."""
    assert oom_kills() == 0
