"""Programs whose classes and functions live in ``__main__``: files, stdin, ``-c``; no guard needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

PROGRAM: Final = """
import asyncio, enum, json, sys, traceback
import asyncwg
from asyncwg import *

found = {}
print("main module runs", file=sys.stderr)

class Foo:
    n = 0

class Color(enum.Enum):
    RED = 1

class RowError(Exception):
    def __init__(self, row, *, hint):
        super().__init__(f"bad row {row}")
        self.hint = hint

def by_turns(group, items):
    return ([items[rank::group.world_size] for rank in range(group.world_size)],), {}

register_dispatch_mode("by_turns", by_turns, lambda group, outputs: sum(outputs, []))

OFFSET = 40

class Trainer(Worker):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, x):
        self.calls += 1
        return self.scale * x + OFFSET

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def apply(self, function, *args):
        return function(*args)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_up(self, value):
        type(value).n += 1
        return type(value).n

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def foo(self):
        return Foo()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def color(self, color):
        return color

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        raise RowError(7, hint="look there")

    @register(dispatch_mode=Dispatch.BY_TURNS)
    def dealt(self, items):
        return [(self.rank, item) for item in items]

    @register(dispatch_mode={"dispatch_fn": by_turns, "collect_fn": lambda group, out: len(out)})
    def dealt_by_dict(self, items):
        return items

class Twice(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def which(self):
        return "first"

First = Twice

class Twice(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def which(self):
        return "second"

def group(cls, *args):
    return WorkerGroup(ResourcePool([2], use_gpu=False), ClassWithInitArgs(cls, *args), preload=[])

async def main():
    captured = 3
    async with group(Trainer, 2) as wg:
        found["step"] = await wg.step(1)
        found["lambda"] = await wg.apply(lambda x: x + 1, 4)
        found["closure"] = await wg.apply(lambda: captured * OFFSET)
        found["counts"] = [await wg[0].count_up(Foo()) for _ in range(3)]
        found["count here"] = Foo.n
        found["instance"] = [isinstance(foo, Foo) for foo in await wg.foo()]
        found["member"] = [back is Color.RED for back in await wg.color(Color.RED)]
        found["dealt"] = await wg.dealt([1, 2, 3])
        found["dealt by dict"] = await wg.dealt_by_dict([1, 2, 3])
        try:
            await wg.fail()
        except* RowError as errors:
            found["errors"] = [[str(e), e.hint, e.rank] for e in errors.exceptions]
            found["traceback"] = "".join(traceback.format_exception(errors))
        found["main of a worker"] = await wg[0].apply(lambda: sorted(vars(sys.modules["__main__"])))
        found["argv"] = [await wg[0].apply(lambda: sys.argv), sys.argv]
    async with group(First) as wg:
        found["first"] = await wg.which()
    async with group(Twice) as wg:
        found["second"] = await wg.which()

asyncwg.run(main())
print(json.dumps(found))
"""

Found = dict[str, Any]


def run(*arguments: str, stdin: str | None = None, cwd: Path | None = None) -> Found:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    found: Found = json.loads(done.stdout)
    found["stderr"] = done.stderr
    return found


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "trainer.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def from_file(script: Path) -> Found:
    """What the program has found, run as a file."""
    return run(str(script))


@pytest.fixture(scope="module", params=["file", "module", "stdin", "command"])
def found(request: pytest.FixtureRequest, script: Path) -> Found:
    """What the program has found, in each way of running it; the last one on asyncio's own loop."""
    match request.param:
        case "file":
            result: Found = request.getfixturevalue("from_file")
            return result
        case "module":
            return run("-m", script.stem, cwd=script.parent)
        case "stdin":
            return run("-", stdin=PROGRAM)
        case _:
            return run("-c", PROGRAM.replace("asyncwg.run", "asyncio.run"))


def test_a_class_of_main_works_in_every_rank(found: Found) -> None:
    """Workers died in a loop: https://github.com/ipython/ipython/issues/10894."""
    assert found["step"] == [42, 42]


def test_lambdas_and_closures_of_main_work(found: Found) -> None:
    """https://github.com/ipython/ipython/issues/10894."""
    assert found["lambda"] == [5, 5]
    assert found["closure"] == [120, 120]


def test_the_main_module_runs_once(found: Found) -> None:
    """No guard is needed, because workers never run it."""
    assert found["stderr"].count("main module runs") == 1


def test_a_good_run_writes_nothing_else_to_stderr(found: Found) -> None:
    """Resource trackers complained: https://github.com/python/cpython/issues/82300."""
    assert found["stderr"] == "main module runs\n"


def test_a_class_keeps_its_state_in_the_worker(found: Found) -> None:
    """Every message reset it: https://github.com/cloudpipe/cloudpickle/issues/195."""
    assert found["counts"] == [1, 2, 3]


def test_what_a_worker_does_to_a_class_stays_there(found: Found) -> None:
    assert found["count here"] == 0


def test_classes_and_enums_are_themselves_when_they_come_home(found: Found) -> None:
    """By-value classes lost their identity: https://github.com/cloudpipe/cloudpickle/issues/195."""
    assert found["instance"] == [True, True]
    assert found["member"] == [True, True]


def test_an_exception_of_main_is_caught_by_its_own_class_with_its_fields(found: Found) -> None:
    assert sorted(found["errors"]) == [
        ["bad row 7", "look there", 0],
        ["bad row 7", "look there", 1],
    ]


def test_the_remote_traceback_names_file_and_line(found: Found) -> None:
    """https://github.com/ray-project/ray/pull/3208."""
    number = PROGRAM.splitlines().index('        raise RowError(7, hint="look there")') + 1
    assert f"line {number}, in fail" in found["traceback"]


def test_a_dispatch_mode_registered_in_main_works(found: Found) -> None:
    assert found["dealt"] == [[0, 1], [0, 3], [1, 2]]
    assert found["dealt by dict"] == 2


def test_a_class_that_was_defined_again_is_the_new_one_in_a_new_group(found: Found) -> None:
    """https://github.com/ipython/ipython/issues/10894."""
    assert found["first"] == ["first", "first"]
    assert found["second"] == ["second", "second"]


def test_a_worker_has_the_programs_arguments(found: Found) -> None:
    there, here = found["argv"]
    assert there == here


def test_names_of_main_are_not_in_the_main_module_of_a_worker(found: Found) -> None:
    assert "Trainer" not in found["main of a worker"]


def test_the_remote_traceback_shows_the_line_of_a_file(from_file: Found, script: Path) -> None:
    assert f'File "{script}"' in from_file["traceback"]
    assert 'raise RowError(7, hint="look there")' in from_file["traceback"]
