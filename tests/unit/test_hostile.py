"""The hostile kit strikes at its moment and not before."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.hostile import (
    EXIT_STATUS,
    HOW,
    TEXT,
    WHEN,
    Hostile,
    HostileBaseError,
    HostileError,
    How,
    OneWayError,
    UnpicklableError,
    UnprintableError,
    When,
    hostiles,
)

MOMENTS: dict[When, Callable[[Hostile], object]] = {
    "pickled": pickle.dumps,
    "unpickled": lambda value: pickle.loads(pickle.dumps(value)),
    "called": lambda value: value(),
    "repr-ed": repr,
}


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    ("how", "error"),
    [("raise", HostileError), ("raise base", HostileBaseError), ("exit", SystemExit)],
)
def test_what_raises_does_so_at_its_moment_only(
    when: When, how: How, error: type[BaseException]
) -> None:
    value = Hostile(when, how)
    # Unpickling needs pickling first, which is the wrong moment for one that minds it.
    for moment in set(MOMENTS) - {when} - ({"unpickled"} if when == "pickled" else set()):
        MOMENTS[moment](value)
    with pytest.raises(error):
        MOMENTS[when](value)


@pytest.mark.parametrize(("how", "status"), [("die", EXIT_STATUS), ("crash", -signal.SIGSEGV)])
def test_what_ends_the_process_ends_it(how: How, status: int) -> None:
    code = f"from tests.hostile import act; act({how!r})"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == status
    )


def test_what_blocks_can_be_interrupted() -> None:
    code = (
        "import signal; from tests.hostile import act; "
        "signal.signal(signal.SIGALRM, signal.default_int_handler); "
        "signal.setitimer(signal.ITIMER_REAL, 0.05); act('block')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )
    assert b"KeyboardInterrupt" in done.stderr


def test_every_combination_is_a_parameter() -> None:
    assert len(hostiles()) == len(WHEN) * len(HOW)


def test_an_unpicklable_error_is_refused_by_pickle() -> None:
    with pytest.raises(TypeError, match="lock"):
        pickle.dumps(UnpicklableError())


def test_a_one_way_error_is_refused_by_unpickling_alone() -> None:
    stream = pickle.dumps(OneWayError("a", "b"))
    with pytest.raises(TypeError, match="second"):
        pickle.loads(stream)


def test_an_unprintable_error_raises_when_printed() -> None:
    with pytest.raises(HostileError, match=TEXT):
        str(UnprintableError())
