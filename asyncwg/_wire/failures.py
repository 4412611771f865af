"""Exceptions as records that always arrive.

The worker turns what a method raised into a `Failure`: plain strings, and, where the exception
survives the trip, its bytes. Whether it does is tried out in the worker: the copy must have the
same type and the same text. A class whose ``__init__`` has a signature of its own is rebuilt
without calling ``__init__``. The controller makes the original again, or a `WorkerError` that tells
the same.
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any, Final, NamedTuple

from asyncwg._wire import codec
from asyncwg._wire.frames import Buffer
from asyncwg._wire.sources import inline
from asyncwg.errors import WorkerError

_DEPTH: Final = 10
"""Links of a chain of causes that travel as objects; all of them are in the traceback's text."""
_CONFUSING: Final = (StopIteration, StopAsyncIteration, asyncio.CancelledError)
"""What the controller would take for its own; so would anything that is no ``Exception``."""


class Failure(NamedTuple):
    """One exception, in plain values only."""

    type_name: str
    text: str
    traceback: str
    notes: tuple[str, ...]
    pickled: bytes | None
    cause: Failure | None
    context: Failure | None
    suppress_context: bool


def capture(error: BaseException, *, skip_frames: int = 0, _depth: int = 0) -> Failure:
    """Turn ``error`` into a record. Never raises.

    Args:
        error: what a method raised.
        skip_frames: how many of its outermost frames are ours and stay out of the text.
    """
    tb = error.__traceback__
    for _ in range(skip_frames):
        if tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
    cls = type(error)
    name = (
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    )
    cause = context = None
    if _depth < _DEPTH:
        if error.__cause__ is not None:
            cause = capture(error.__cause__, _depth=_depth + 1)
        elif error.__context__ is not None and not error.__suppress_context__:
            context = capture(error.__context__, _depth=_depth + 1)
    return Failure(
        name.removeprefix("__main__."),
        text_of(error),
        _format(error, tb) if _depth == 0 else "",
        _notes_of(error),
        None if _is_confusing(error) else _survivor(error),
        cause,
        context,
        error.__suppress_context__,
    )


def restore(failure: Failure, *, rank: int, where: str) -> Exception:
    """Make the exception that the record tells of. Never raises.

    Args:
        failure: the record.
        rank: set as ``.rank``.
        where: ``Trainer.step, rank 1, call 7`` or the like, for the note.
    """
    error = _rebuild(failure, rank)
    try:
        _set(error, "rank", rank)
    except Exception:  # noqa: BLE001, S110  # it is a property of the class; the note has it too
        pass
    for link, record in (("__cause__", failure.cause), ("__context__", failure.context)):
        if record is not None:
            _set(error, link, _rebuild_chain(record, rank))
    _set(error, "__suppress_context__", failure.suppress_context)
    note = f"Raised in {where}:\n{failure.traceback.rstrip()}"
    _set(error, "__notes__", [*failure.notes, note])
    return error


def relay(failure: Failure) -> Exception:
    """Make the exception again as it was, from another controller's record. Never raises."""
    return _rebuild_chain(failure, None)


def _is_confusing(error: BaseException) -> bool:
    return not isinstance(error, Exception) or isinstance(error, _CONFUSING)


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, or what it raised. Never raises."""
    try:
        return str(error)
    except BaseException as bad:  # noqa: BLE001  # a user's __str__ may do anything
        return f"<its __str__ raised {type(bad).__name__}>"


def _notes_of(error: BaseException) -> tuple[str, ...]:
    try:
        return tuple(str(note) for note in getattr(error, "__notes__", ()))
    except BaseException as bad:  # noqa: BLE001  # they may be anything, until they are printed
        return (f"<its __notes__ raised {type(bad).__name__}>",)


def _format(error: BaseException, tb: Any) -> str:
    try:
        return "".join(traceback.format_exception(type(error), error, tb))
    except BaseException as bad:  # noqa: BLE001  # formatting calls the user's __str__ and __repr__
        lines = "".join(traceback.format_tb(tb))
        return f"{lines}{type(error).__qualname__}: <formatting it raised {type(bad).__name__}>\n"


def _survivor(error: BaseException) -> bytes | None:
    """Return bytes from which the same exception comes back, or None."""
    for form in (lambda: error, lambda: _Bare.of(error)):
        try:
            encoded = codec.encode(form())
            parts: list[Buffer] = [bytes(buffer) for buffer in inline(encoded.buffers)]
            copy = codec.decode(encoded.stream, [bytearray(part) for part in parts])
            if isinstance(copy, _Bare):
                copy = copy.build()
            if type(copy) is type(error) and text_of(copy) == text_of(error):
                return codec.encode((encoded.stream, parts)).stream
        except BaseException:  # noqa: BLE001  # a user's reducers may do anything
            continue
    return None


class _Bare(NamedTuple):
    """An exception taken apart, to be rebuilt without its ``__init__``."""

    cls: type[BaseException]
    arguments: tuple[Any, ...]
    state: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Bare:
        return cls(type(error), error.args, dict(getattr(error, "__dict__", {})))

    def build(self) -> BaseException:
        error = self.cls.__new__(self.cls, *self.arguments)
        _set(error, "args", self.arguments)
        error.__dict__.update(self.state)
        return error


def _rebuild(failure: Failure, rank: int | None) -> Exception:
    if failure.pickled is not None:
        try:
            stream, parts = codec.decode(failure.pickled)
            error = codec.decode(stream, [bytearray(part) for part in parts])
            if isinstance(error, _Bare):
                error = error.build()
            if isinstance(error, Exception):
                return error
        except BaseException:  # noqa: BLE001, S110  # told as text instead
            pass
    return WorkerError(failure.type_name, failure.text, failure.traceback, rank)


def _rebuild_chain(failure: Failure, rank: int | None) -> Exception:
    error = _rebuild(failure, rank)
    if failure.cause is not None:
        _set(error, "__cause__", _rebuild_chain(failure.cause, rank))
    if failure.context is not None:
        _set(error, "__context__", _rebuild_chain(failure.context, rank))
    _set(error, "__suppress_context__", failure.suppress_context)
    # Notes travel in the pickle of some exceptions and not of others: set them from the record.
    if failure.notes:
        _set(error, "__notes__", list(failure.notes))
    return error


def _set(error: BaseException, name: str, value: object) -> None:
    """Set an attribute past a ``__setattr__`` of the class, such as a frozen dataclass's."""
    BaseException.__setattr__(error, name, value)
