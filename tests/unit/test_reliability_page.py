"""The page about reliability names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "reliability.md"
NAMED: Final = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text())))


ROWS: Final = [
    line
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.endswith("| held by |")
]
"""Of its tables, which all end in what holds a promise."""


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_every_test_that_is_named_exists(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text())
    there = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert [name for file, name in NAMED if file == path and name not in there] == []


def test_every_row_of_its_tables_names_a_test() -> None:
    assert len(ROWS) > 100
    assert [row for row in ROWS if not re.search(r"`tests/[\w/]+\.py::\w+` \|$", row)] == []
