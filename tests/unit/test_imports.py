"""Imports point down, and nothing heavy is loaded before it is needed.

The tables are the rule; AGENTS.md shows the first one. Imports for type checkers alone are free.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

import pytest

LAYERS: Final[Sequence[Sequence[str]]] = (
    ("errors", "_linux", "_registered"),
    ("_loop_thread",),
    ("mesh", "rows", "shards", "_devices", "_markers"),
    ("_predefined",),
    ("_modes",),
    ("_data", "decorator", "resource_pool", "distributed", "_worker.context"),
    ("protocol", "dispatch", "worker"),
    ("_wire",),
    ("_transport",),
    ("_worker", "_driver"),
    ("call", "_share"),
    ("_stream",),
    ("_map",),
    ("_job",),
    ("_waiting",),
    ("_sender",),
    ("_catalog", "_inline", "_restart", "_testing"),
    ("_generation",),
    ("_core",),
    ("_attach",),
    ("_surface", "_joint"),
    ("_roles", "_union"),
    ("worker_group", "_link"),
    ("_hold",),
    ("_handle",),
    ("_plain",),
    ("colocated", "blocking", "testing", "_host"),
    ("", "__main__"),
)
"""From the bottom up. A module imports from layers below its own, and from its own entry."""

EXTRA: Final[frozenset[tuple[str, str]]] = frozenset()
"""Edges (importing module, imported module) that LAYERS forbids and that have a reason here."""

ENTRY_POINTS: Final = frozenset({"asyncwg._worker.guardian", "asyncwg._worker.main"})
"""All of `_worker` that `_driver` may name, in strings too: it starts processes with them."""

HEAVY: Final = frozenset({"cloudpickle", "numpy", "tensordict", "torch"})
"""Not loaded by ``import asyncwg``."""

MAY_BE_HEAVY: Final = ("protocol", "_data")
"""Entries whose modules import HEAVY at their top; they are loaded when a batch is."""

LATE: Final = HEAVY | {"pynvml", "uvloop"}
"""What functions may import."""

LATE_EXTRA: Final[dict[str, frozenset[str]]] = {
    # Its `__getattr__` loads the batches, and with them torch, when they are first named.
    "": frozenset({"asyncwg.protocol"}),
    # It forks workers, and loads for all of them what each would load for itself.
    "_worker.guardian": frozenset({"asyncio", "asyncwg._worker.main", "fcntl"}),
}
"""More that the functions of one module may import."""

_SPEC: Final = find_spec(
    "asyncwg"
)  # found and not imported: the rules hold for a broken package too
assert _SPEC is not None
assert _SPEC.origin is not None
ROOT: Final = Path(_SPEC.origin).parent


class Import(NamedTuple):
    """One imported module, and where."""

    module: str
    """The importing module, without ``asyncwg.``; "" is the package's ``__init__``."""
    line: int
    target: str
    in_function: bool

    def __str__(self) -> str:
        return f"asyncwg.{self.module}:{self.line} imports {self.target}"

    @property
    def top(self) -> str:
        """Name of the package that is imported."""
        return self.target.partition(".")[0]

    @property
    def own(self) -> str | None:
        """The imported module without ``asyncwg.``, or None if it is not ours."""
        return self.target.removeprefix("asyncwg").lstrip(".") if self.top == "asyncwg" else None


@cache
def sources() -> dict[str, ast.Module]:
    """Every module of the package, by name without ``asyncwg.``."""
    found: dict[str, ast.Module] = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(path.read_text(), str(path))
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import of every module that happens at run time."""
    return tuple(
        found
        for module, tree in sources().items()
        for found in _imports_in(module, tree, in_function=False)
    )


def _imports_in(module: str, node: ast.AST, in_function: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(module, node.lineno, alias.name, in_function)
    elif isinstance(node, ast.ImportFrom):
        base = "" if node.level else node.module or ""  # relative ones are refused by a test
        for alias in node.names:
            name = f"{base}.{alias.name}"
            is_module = name.removeprefix("asyncwg.") in sources()
            yield Import(module, node.lineno, name if is_module else base, in_function)
    elif isinstance(node, ast.If) and _is_type_checking(node.test):
        for statement in node.orelse:
            yield from _imports_in(module, statement, in_function)
    else:
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _imports_in(module, child, in_function or inside)


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _entry(module: str) -> str | None:
    """The longest entry of LAYERS that ``module`` is in."""
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    entries = {entry for layer in LAYERS for entry in layer}
    return next((prefix for prefix in prefixes if prefix in entries), None)


def _level(entry: str) -> int:
    return next(level for level, layer in enumerate(LAYERS) if entry in layer)


def _points_down(edge: Import) -> bool:
    assert edge.own is not None
    above, below = _entry(edge.module), _entry(edge.own)
    if above is None or below is None:
        return False
    return above == below or _level(below) < _level(above) or (edge.module, edge.own) in EXTRA


def test_every_module_has_a_place_in_the_table() -> None:
    assert [module for module in sources() if _entry(module) is None] == []


def test_imports_point_down() -> None:
    edges = [edge for edge in imports() if edge.own]
    assert [str(edge) for edge in edges if not _points_down(edge)] == []


def test_no_module_inside_imports_the_package_itself() -> None:
    """The names of ``asyncwg`` are for users; inside, the defining module is imported."""
    assert [str(edge) for edge in imports() if edge.target in ("", "asyncwg")] == []


def test_the_driver_names_only_the_entry_points_of_the_worker() -> None:
    named = [
        f"asyncwg.{module}:{node.lineno} names {node.value}"
        for module, tree in sources().items()
        if module.startswith("_driver")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("asyncwg._worker")
        and node.value not in ENTRY_POINTS
    ]
    assert named == []


def test_heavy_modules_are_imported_at_the_top_only_where_batches_live() -> None:
    heavy = [
        str(edge)
        for edge in imports()
        if edge.top in HEAVY and not edge.in_function and _entry(edge.module) not in MAY_BE_HEAVY
    ]
    assert heavy == []


def test_functions_import_only_what_must_come_late() -> None:
    late = [
        str(edge)
        for edge in imports()
        if edge.in_function
        and edge.top not in LATE
        and edge.target not in LATE_EXTRA.get(edge.module, frozenset())
    ]
    assert late == []


@pytest.mark.parametrize("module", ["asyncwg", "asyncwg._worker.main"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({set(LATE)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == []
