"""The page about asynchronous trainers quotes programs that run, and prints what they print."""

from __future__ import annotations

import re
import textwrap
from typing import Final, NamedTuple

import pytest

from tests.process.test_examples import ROOT, run

PAGE: Final = ROOT / "docs" / "async-trainers.md"
FOLDER: Final = "docs/examples/async_trainers"
PROGRAMS: Final = sorted(path.name for path in (ROOT / FOLDER).glob("*.py"))
QUOTED: Final = re.compile(
    rf'^```python title="{FOLDER}/(?P<name>\w+\.py)"\n(?P<code>.*?)^```$'
    r"\s*^```text\n(?P<output>.*?)^```$",
    re.M | re.S,
)
DECIMAL: Final = re.compile(r"-?\d+\.\d+")
CLOSE: Final = 0.05
"""By how much a decimal may differ from what the page says: sums are not equal on every machine."""


class Quoted(NamedTuple):
    """What the page has of a program."""

    code: str
    output: str


PARTS: Final = {
    found["name"]: Quoted(found["code"], found["output"])
    for found in QUOTED.finditer(PAGE.read_text())
}


@pytest.fixture(params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    """Each program's file name."""
    return str(request.param)


def test_the_page_quotes_every_program_once_and_no_other_code() -> None:
    assert sorted(PARTS) == PROGRAMS
    assert PAGE.read_text().count("```python") == len(PROGRAMS)


def test_what_the_page_quotes_is_the_programs_own_text(name: str) -> None:
    """Whole functions and methods, each with the indentation that it has there or without."""
    text = (ROOT / FOLDER / name).read_text()
    functions = re.split(r"\n{2,3}(?=async def|def|@)", PARTS[name].code.rstrip())
    for function in functions:
        indented = textwrap.indent(function, "    ")
        assert f"\n{function}\n" in text or f"\n{indented}\n" in text


def test_a_program_is_short(name: str) -> None:
    lines = (ROOT / FOLDER / name).read_text().splitlines()
    assert len([line for line in lines if line]) <= 75


def test_a_program_prints_what_the_page_says(name: str) -> None:
    printed, said = run([f"{FOLDER}/{name}"]), PARTS[name].output
    assert DECIMAL.sub("#", printed) == DECIMAL.sub("#", said)
    numbers = [float(number) for number in DECIMAL.findall(printed)]
    assert numbers == pytest.approx([float(number) for number in DECIMAL.findall(said)], abs=CLOSE)
