"""The page for those who come from verl names what exists: names of asyncwg, and tests."""

from __future__ import annotations

import ast
import builtins
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

import asyncwg

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "from-verl.md"
TEST: Final = re.compile(r"`(tests/[\w/]+\.py)::([\w:]+)`")
NAME: Final = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?")
"""A name as code, maybe with the arguments of a call; anything else in backticks is no name."""
OTHERS: Final = frozenset({"asyncio", "inspect", "tensordict", "torch"})
"""Modules of others whose names the page uses."""
REASON: Final = "None"
"""How the cell of a name begins that has no form here, and says why."""


class Row(NamedTuple):
    """What a table says of a thing of verl's."""

    section: str
    verl: str
    here: str
    held_by: str


def rows() -> Iterator[Row]:
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        if not line.startswith("|") or re.match(r"\|(---|.*\| held by \|$)", line):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, line
        yield Row(section, *cells)


ROWS: Final = list(rows())


def stand_ins() -> dict[str, Any]:
    """What the page calls ``wg``, ``call`` and so on."""
    return {
        "wg": asyncwg.WorkerGroup,
        "call": asyncwg.Call,
        "pool": asyncwg.ResourcePool,
        "worker": asyncwg.Worker,
        "data": asyncwg.DataProto(),  # its attributes are not on the class
    }


def find(name: str) -> Any:
    """Return what ``name`` is in the page.

    Raises:
        AttributeError: nothing has this name.
    """
    first, *rest = name.split(".")
    found: Any
    if first == "asyncwg" or first in OTHERS:
        found = importlib.import_module(first)
    elif first in stand_ins():
        found = stand_ins()[first]
    else:
        found = getattr(asyncwg if hasattr(asyncwg, first) else builtins, first)
    for part in rest:
        found = getattr(found, part)
    return found


@cache
def known_tests(path: str) -> frozenset[str]:
    """Names of all tests in a file, as pytest writes them."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {node.name for node in tree.body if isinstance(node, functions)}
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        names |= {f"{cls.name}::{node.name}" for node in cls.body if isinstance(node, functions)}
    return frozenset(name for name in names if name.split("::")[-1].startswith("test_"))


def setup_module() -> None:
    for module in pkgutil.iter_modules(asyncwg.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"asyncwg.{module.name}")


@pytest.mark.parametrize("section", sorted({row.section for row in ROWS}))
def test_every_name_that_the_page_gives_exists(section: str) -> None:
    missing: list[str] = []
    for row in ROWS:
        if row.section != section:
            continue
        for code in re.findall(r"`([^`]+)`", row.here):
            name = NAME.fullmatch(code)
            try:
                find(name[1]) if name else None
            except AttributeError:
                missing.append(code)
    assert missing == []


@pytest.mark.parametrize("path", sorted({path for path, _ in TEST.findall(PAGE.read_text())}))
def test_every_test_that_the_page_names_exists(path: str) -> None:
    named = {name for file, name in TEST.findall(PAGE.read_text()) if file == path}
    assert named - known_tests(path) == set()


def test_every_row_has_a_test_or_a_reason() -> None:
    bare = [row for row in ROWS if not TEST.search(row.held_by) and not row.here.startswith(REASON)]
    assert bare == []
    reasons = [row for row in ROWS if row.here.startswith(REASON)]
    assert [row for row in reasons if len(row.here.removeprefix(REASON)) < 40] == []


def test_the_table_has_a_section_for_each_part_of_verl() -> None:
    assert len({row.section for row in ROWS}) == 17
    assert len(ROWS) > 120
