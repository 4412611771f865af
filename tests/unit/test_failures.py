"""Exceptions as records: what arrives of them, whatever they are."""

from __future__ import annotations

import asyncio
import urllib.error
from dataclasses import dataclass
from email.message import Message
from typing import Any

import pytest

from asyncwg._wire import codec
from asyncwg._wire.failures import Failure, capture, restore
from asyncwg.errors import WorkerDiedError, WorkerError, WorkerGroupError
from tests.hostile import (
    TEXT,
    Hostile,
    HostileError,
    OneWayError,
    UnpicklableError,
    UnprintableError,
    act,
)


class OwnSignatureError(Exception):
    """Its args are not what its ``__init__`` takes."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}:{b}")
        self.a = a


class KeywordOnlyError(Exception):
    """Can't be called with its args."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code={code}")
        self.code = code


class ReformattingError(Exception):
    """Changes its text with every ``__init__``."""

    def __init__(self, message: str) -> None:
        super().__init__(message.upper() + "!")


@dataclass(frozen=True)
class FrozenError(Exception):
    """Refuses every attribute."""

    code: int


class FixedRankError(Exception):
    """Has a ``rank`` of its own."""

    @property
    def rank(self) -> str:
        return "mine"


class HostileTextError(Exception):
    """Its text is no text, and what it raises is no Exception."""

    def __str__(self) -> str:
        act("raise base")

    __repr__ = __str__


class HostileReducerError(Exception):
    """Raises what is no Exception when it is pickled."""

    def __reduce__(self) -> Any:
        act("raise base")


class HostileAttributesError(Exception):
    """Raises when it is asked what it consists of."""

    @property
    def args(self) -> Any:  # type: ignore[override]  # on purpose
        act("raise base")


def travelled(failure: Failure) -> Failure:
    """Send the record as a worker does."""
    back: Failure = codec.decode(codec.encode(failure).stream)
    return back


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  # whatever is tested
        return caught


def arrived(error: BaseException) -> Exception:
    """Raise ``error``, send it and make it again."""
    return restore(travelled(capture(raised(error))), rank=3, where="Trainer.step, rank 3, call 7")


def test_an_exception_arrives_as_its_own_type_with_its_text() -> None:
    error = arrived(KeyError("bad row 7"))
    assert type(error) is KeyError
    assert error.args == ("bad row 7",)


def test_an_exception_says_which_rank_raised_it() -> None:
    assert getattr(arrived(ValueError("x")), "rank", None) == 3


def test_the_remote_traceback_is_a_note_that_says_where() -> None:
    """https://github.com/ray-project/ray/pull/3208: only a string reached the driver."""
    [note] = arrived(ValueError("x")).__notes__
    assert note.startswith("Raised in Trainer.step, rank 3, call 7:\nTraceback")
    assert __file__ in note


def test_frames_that_are_skipped_are_not_in_the_traceback() -> None:
    def outer() -> None:
        inner()

    def inner() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011  # raised here
        outer()
    text = capture(caught.value, skip_frames=2).traceback
    assert "in outer" not in text
    assert "in inner" in text


def test_the_last_frame_stays_however_many_are_skipped() -> None:
    assert "in raised" in capture(raised(ValueError("x")), skip_frames=9).traceback


def test_a_cause_arrives_with_its_type() -> None:
    error = ValueError("x")
    error.__cause__ = ZeroDivisionError("y")
    cause = arrived(error).__cause__
    assert type(cause) is ZeroDivisionError
    assert str(cause) == "y"


def test_a_context_arrives_unless_it_was_suppressed() -> None:
    shown, hidden = ValueError("shown"), ValueError("hidden")
    shown.__context__ = hidden.__context__ = ZeroDivisionError("y")
    hidden.__suppress_context__ = True
    assert type(arrived(shown).__context__) is ZeroDivisionError
    assert arrived(hidden).__context__ is None
    assert arrived(hidden).__suppress_context__


def test_a_chain_of_exceptions_that_bites_its_tail_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert str(arrived(first).__cause__) == "second"


def test_notes_arrive_once_and_in_order() -> None:
    error = ValueError("x")
    error.add_note("hint")
    error.add_note("another")
    assert arrived(error).__notes__[:-1] == ["hint", "another"]


def test_notes_of_a_cause_arrive() -> None:
    error, cause = ValueError("x"), ValueError("y")
    cause.add_note("hint")
    error.__cause__ = cause
    assert getattr(arrived(error).__cause__, "__notes__", None) == ["hint"]


def test_attributes_arrive() -> None:
    error = ValueError("x")
    error.detail = {"row": 7}  # type: ignore[attr-defined]  # users do
    assert getattr(arrived(error), "detail", None) == {"row": 7}


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OwnSignatureError(1, 2), id="own-signature"),
        pytest.param(KeywordOnlyError(code=3), id="keyword-only"),
        pytest.param(ReformattingError("ab"), id="reformats-itself"),
        pytest.param(OneWayError("a", "b"), id="one-way"),
        pytest.param(FrozenError(5), id="frozen-dataclass"),
        pytest.param(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"), id="five-arguments"),
        pytest.param(OSError(2, "gone", "file.txt"), id="os-error"),
        pytest.param(ExceptionGroup("both", [ValueError("x"), KeyError("y")]), id="group"),
        pytest.param(asyncio.IncompleteReadError(b"ab", 5), id="own-reduce"),
    ],
)
def test_an_exception_with_an_init_of_its_own_arrives_as_itself(error: Exception) -> None:
    """They pickle, but don't unpickle, or come back changed.

    https://github.com/agronholm/pythonfutures/issues/30, https://github.com/ray-project/ray/issues/20830.
    """
    back = arrived(error)
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_an_http_error_tells_its_status_and_reason() -> None:
    """https://github.com/ray-project/ray/issues/20830."""
    with urllib.error.HTTPError("u", 404, "nf", Message(), None) as error:
        back = arrived(error)
        assert "404" in str(back)
        assert "nf" in str(back)


def test_the_fields_of_an_exception_rebuilt_without_its_init_arrive() -> None:
    assert getattr(arrived(KeywordOnlyError(code=3)), "code", None) == 3
    assert getattr(arrived(OwnSignatureError(1, 2)), "a", None) == 1


def test_an_exception_that_refuses_attributes_still_tells_its_rank_and_traceback() -> None:
    error = FrozenError(5)
    object.__setattr__(error, "__cause__", ZeroDivisionError("y"))
    back = arrived(error)
    assert getattr(back, "rank", None) == 3
    assert type(back.__cause__) is ZeroDivisionError
    assert "Trainer.step, rank 3" in back.__notes__[-1]


def test_an_exception_with_a_rank_of_its_own_keeps_it() -> None:
    assert getattr(arrived(FixedRankError("x")), "rank", None) == "mine"


def test_an_exception_that_can_not_be_pickled_arrives_as_a_worker_error_that_tells_the_same() -> (
    None
):
    error = arrived(UnpicklableError())
    assert isinstance(error, WorkerError)
    assert error.type_name == "tests.hostile.UnpicklableError"
    assert TEXT in error.text
    assert error.rank == 3
    assert __file__ in error.remote_traceback


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        StopIteration(4),
        StopAsyncIteration(),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_the_controller_would_take_for_its_own_arrives_as_a_worker_error(
    error: BaseException,
) -> None:
    """https://github.com/uqfoundation/multiprocess/issues/220: SystemExit bypassed the handler."""
    back = arrived(error)
    assert isinstance(back, WorkerError)
    assert type(error).__name__ in back.type_name


def test_sys_exit_shows_its_status() -> None:
    assert "3" in str(arrived(SystemExit(3)))


def test_a_confusing_cause_does_not_arrive_as_itself_either() -> None:
    error = ValueError("x")
    error.__cause__ = KeyboardInterrupt()
    assert isinstance(arrived(error).__cause__, WorkerError)


@pytest.mark.parametrize(
    "error",
    [
        UnprintableError(),
        HostileTextError(),
        HostileReducerError("x"),
        HostileAttributesError(),
        ValueError(Hostile("pickled", "raise base")),
        ValueError(Hostile("pickled", "exit")),
        ValueError(Hostile("unpickled", "raise")),
        ValueError(Hostile("unpickled", "raise base")),
        ValueError(Hostile("repr-ed", "raise")),
        ValueError(Hostile("repr-ed", "raise base")),
    ],
    ids=lambda error: f"{type(error).__name__}-{type(error.__cause__).__name__}",
)
def test_a_hostile_exception_arrives_as_something_that_names_its_type(error: Exception) -> None:
    """No exception may kill the worker that tells of it."""
    back = arrived(error)
    name = back.type_name if isinstance(back, WorkerError) else type(back).__name__
    assert type(error).__name__ in name


@pytest.mark.parametrize("notes", [None, 5, [Hostile("repr-ed", "raise base")]])
def test_notes_that_are_none_do_not_keep_an_exception(notes: Any) -> None:
    error = ValueError("x")
    error.__notes__ = notes
    assert type(arrived(error)) is ValueError


def test_an_exception_that_is_hostile_in_the_controller_alone_is_told_as_text() -> None:
    failure = capture(raised(HostileError("x")))
    bad = codec.encode(Hostile("unpickled", "raise base")).stream
    told = failure._replace(pickled=codec.encode((bad, [])).stream)
    error = restore(told, rank=0, where="here")
    assert isinstance(error, WorkerError)
    assert error.text == "x"


def test_a_worker_error_that_a_method_raises_keeps_its_fields() -> None:
    """It has a group of its own, and one of its workers raised."""
    inner = WorkerError("thing.Inner", "why", "Traceback of the inner one", 9)
    back = arrived(inner)
    assert isinstance(back, WorkerError)
    assert (back.type_name, back.text) == ("thing.Inner", "why")
    assert back.remote_traceback == "Traceback of the inner one"


def test_errors_of_a_group_in_a_worker_arrive_as_themselves() -> None:
    died = WorkerDiedError(1, 2, -9, "SIGKILL", ["boom-123"])
    back = arrived(WorkerGroupError("step failed", [died]))
    assert isinstance(back, WorkerGroupError)
    [inner] = back.exceptions
    assert isinstance(inner, WorkerDiedError)
    assert inner.stderr_tail == ("boom-123",)


def test_a_large_array_in_an_exception_arrives() -> None:
    import numpy as np

    back = arrived(ValueError(np.arange(5000)))
    assert back.args[0].sum() == 5000 * 4999 // 2
