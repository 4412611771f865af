"""Values that do their worst: when pickled, unpickled, called or repr-ed.

``for when in WHEN: for how in HOW: Hostile(when, how)`` is every combination; `hostiles` gives
them to ``pytest.mark.parametrize``. They can be pickled themselves, at least until their moment
comes, so they reach a worker by every path that a user's value takes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, NoReturn, get_args

import pytest

When = Literal["pickled", "unpickled", "called", "repr-ed"]
How = Literal["raise", "raise base", "exit", "die", "crash", "block"]

WHEN: Final[Sequence[When]] = get_args(When)
HOW: Final[Sequence[How]] = get_args(How)

EXIT_STATUS: Final = 7
"""Exit status of ``"exit"`` and ``"die"``."""

TEXT: Final = "hostile on purpose"
"""What the exceptions say; look for it in reports."""

_never = threading.Event()


class HostileError(Exception):
    """An ordinary exception that survives pickling."""


class HostileBaseError(BaseException):
    """One that ``except Exception`` does not see."""


class UnpicklableError(Exception):
    """An exception that can't be pickled: it holds a lock."""

    def __init__(self, message: str = TEXT) -> None:
        super().__init__(message, threading.Lock())


class OneWayError(Exception):
    """An exception that is pickled without complaint and can't be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class UnprintableError(Exception):
    """An exception whose ``str`` and ``repr`` raise."""

    def __str__(self) -> str:
        raise HostileError(TEXT)

    __repr__ = __str__


class Hostile:
    """Does ``how`` at the moment ``when``, and is harmless before."""

    def __init__(self, when: When, how: How) -> None:
        self.when: Final = when
        self.how: Final = how

    def __reduce__(self) -> tuple[Any, ...]:
        if self.when == "pickled":
            act(self.how)
        return _unpickle, (self.when, self.how)

    def __call__(self, *_args: object, **_kwargs: object) -> Hostile:
        if self.when == "called":
            act(self.how)
        return self

    def __repr__(self) -> str:
        if self.when == "repr-ed":
            act(self.how)
        return f"Hostile({self.when!r}, {self.how!r})"


def _unpickle(when: When, how: How) -> Hostile:
    if when == "unpickled":
        act(how)
    return Hostile(when, how)


def act(how: How) -> NoReturn:
    """Do it, here and now. Does not return; ``"block"`` leaves only through a signal."""
    match how:
        case "raise":
            raise HostileError(TEXT)
        case "raise base":
            raise HostileBaseError(TEXT)
        case "exit":
            sys.exit(EXIT_STATUS)
        case "die":
            os._exit(EXIT_STATUS)
        case "crash":
            ctypes.string_at(0)
        case "block":
            _never.wait()
    raise AssertionError(f"survived {how!r}")


def hostiles(when: Iterable[When] = WHEN, how: Iterable[How] = HOW) -> list[Any]:
    """Return ``(when, how)`` parameters with readable ids.

    The values themselves are built in the test: pytest prints what it is given.
    """
    ways = list(how)
    return [pytest.param(w, h, id=f"{h}-when-{w}".replace(" ", "-")) for w in when for h in ways]
