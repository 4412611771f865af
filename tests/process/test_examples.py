"""What README and docs show works as shown, and the example that people copy trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil
import pytest

from tests.times import PATIENCE

ROOT: Final = Path(__file__).parents[2]
EXAMPLES: Final = ROOT / "docs" / "examples"
PAGES: Final = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK: Final = "<!-- runs -->"
"""Stands above a block that must run, and print what the next block of text says."""
SHOWN: Final = re.compile(
    rf"^{MARK}\n```python\n(?P<code>.*?)^```$.*?^```text\n(?P<output>.*?)^```$", re.M | re.S
)
LIMIT: Final = 150.0
"""Seconds for one program. It takes a few; more only means that the machine is busy."""

UNEVEN: Final = """
import json, sys
import torch
sys.path.insert(0, sys.argv[1])
import asyncwg, train_digits

source = torch.Generator().manual_seed(0)
rows = asyncwg.DataProto.from_dict({
    "pixels": torch.rand(64, 1, 8, 8, generator=source),
    "digit": torch.randint(10, (64,), generator=source),
})
losses = {}
for workers in (1, 3):
    history, _ = asyncwg.run(train_digits.train(workers, rows.split(16), rows))
    losses[workers] = history[:, 0].tolist()
print(json.dumps(losses))
"""
"""Four steps of the example on 16 rows each, which are 6, 5 and 5 for three workers."""


class Shown(NamedTuple):
    """A program in a page, and what the page says it prints."""

    page: str
    code: str
    output: str


def shown() -> list[Shown]:
    return [
        Shown(page.name, found["code"], found["output"])
        for page in PAGES
        for found in SHOWN.finditer(page.read_text())
    ]


def run(arguments: Sequence[str], *, code: str | None = None, seconds: float = LIMIT) -> str:
    """Run Python to its end and return what it prints; nothing that it started may be left."""
    variable, value = "ASYNCWG_TEST_MARK", uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, *arguments],
        check=False,
        input=code,
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
        # Threads of several processes that spin on few cores would stand in each other's way.
        env={**os.environ, "OMP_NUM_THREADS": "1", variable: value},
    )
    assert done.returncode == 0, done.stderr
    # What outlives its parent is nobody's child here, so it is known by its environment.
    _, left = psutil.wait_procs(marked(f"{variable}={value}"), timeout=PATIENCE)
    assert left == []
    return done.stdout


def marked(entry: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:  # it has ended, or belongs to somebody else
            continue
        if entry.encode() in environment.split(b"\0"):
            found.append(process)
    return found


def test_every_marked_block_is_followed_by_its_output() -> None:
    assert len(shown()) == sum(page.read_text().count(f"{MARK}\n") for page in PAGES)


def test_the_readme_shows_a_program_of_about_twenty_lines() -> None:
    lines = [line for line in shown()[0].code.splitlines() if line.strip()]
    assert shown()[0].page == "README.md"
    assert len(lines) <= 20


@pytest.mark.parametrize("example", shown(), ids=lambda example: example.page)
def test_a_shown_program_prints_what_the_page_says(example: Shown) -> None:
    assert run(["-"], code=example.code) == example.output


def test_a_shown_program_runs_from_a_file_too(tmp_path: Path) -> None:
    example = shown()[0]
    file = tmp_path / "example.py"
    file.write_text(example.code)
    assert run([str(file)]) == example.output


def test_the_main_job_trains_and_leaves_no_process() -> None:
    output = run(
        [str(EXAMPLES / "train_digits.py"), "--epochs", "1", "--workers", "2", "--no-plot"]
    )
    assert re.search(r"^test accuracy \d+\.\d%, [\d,]+ rows per second$", output, re.M)


def test_the_main_job_fits_on_a_page_or_two() -> None:
    assert len((EXAMPLES / "train_digits.py").read_text().splitlines()) < 120


def test_uneven_shards_train_as_one_worker_does() -> None:
    losses = json.loads(run(["-c", UNEVEN, str(EXAMPLES)]).splitlines()[-1])
    assert losses["3"] == pytest.approx(losses["1"], rel=1e-3)
