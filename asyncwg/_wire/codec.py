"""Values to bytes and back: any picklable or cloudpicklable value, tensors out of band.

The fast path is a C pickler with a table of reducers. Plain pickle writes what lives in
``__main__`` by reference and without an error, though no other process has that ``__main__``; such
a stream is recognised by the name in it and written again by cloudpickle, which ships the code.

A class that is shipped so is set up once per process: cloudpickle would otherwise reset its
attributes with every message that mentions it.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from asyncwg._wire import values
from asyncwg._wire.frames import Buffer
from asyncwg._wire.sources import Source, Strided, inline, size_of

IN_BAND: Final = 10 * 1024
"""Bytes. A smaller buffer costs less copied into the stream than as an entry of its own: 11 against
15 us for encoding and decoding 4 kB, 13 against 13 for 8 kB, and then it turns."""
_KNOWN_TYPES: Final = 4096
"""Types whose reducers are remembered before the memory is cleared."""


class Encoded(NamedTuple):
    """One value as bytes: a pickle stream and the buffers it refers to."""

    stream: bytes
    buffers: list[Source]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.stream) + sum(size_of(buffer) for buffer in self.buffers)


def _default_reduce(value: Any) -> Any:
    return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


class UnresolvedError(Exception):
    """A value to be encoded holds a call whose result is not known yet; ``.call`` is that call."""

    def __init__(self, call: Any) -> None:
        super().__init__("an un-awaited call can't be pickled")
        self.call = call


class _Placeholders(threading.local):
    """Of this thread: the calls met while encoding, and their values while decoding."""

    calls: list[Any] | None = None
    values: Sequence[Any] = ()


placeholders = _Placeholders()


def take(index: int) -> Any:
    """Return the value of the call that stood here; pickles of arguments refer to it."""
    return placeholders.values[index]


class _Reducers(dict[type, Callable[[Any], Any]]):
    """Reducer by exact type. A type seen for the first time is looked at once.

    A pickler's ``reducer_override`` would be asked for every object; a missing key is asked for
    once per type.
    """

    def __init__(self, others: Mapping[type, Callable[[Any], Any]]) -> None:
        super().__init__()
        self._others = others

    def __missing__(self, cls: type) -> Callable[[Any], Any]:
        if issubclass(cls, type):
            raise KeyError(cls)  # classes are written as globals
        if len(self) > _KNOWN_TYPES:
            self.clear()
        reducer = values.reducer_for(cls) or self._others.get(cls) or _default_reduce
        self[cls] = reducer
        return reducer


class _Pickler(pickle.Pickler):
    dispatch_table: Any = _Reducers(copyreg.dispatch_table)


def _by_value_pickler() -> type[Any]:
    """Make, once, the cloudpickle pickler that sets classes up only once per process."""
    global _by_value  # a cache
    if _by_value is not None:
        return _by_value
    import cloudpickle.cloudpickle as cp  # import here: the package must not load it

    class ByValue(cp.Pickler):  # type: ignore[misc]  # no stubs
        dispatch_table = _Reducers({**cp.Pickler.dispatch_table, types.CodeType: _reduce_code})

        def reducer_override(self, obj: Any) -> Any:
            reduced = super().reducer_override(obj)
            if (
                isinstance(reduced, tuple)
                and len(reduced) == 6  # the form of cloudpickle's class records
                and reduced[5] is cp._class_setstate  # noqa: SLF001  # pinned by a test
            ):
                _settled.add(obj)
                maker, arguments, state, *_ = reduced
                return _make_class, (maker, *arguments), state, None, None, _set_class_state
            return reduced

    _by_value = ByValue
    return ByValue


_by_value: type[Any] | None = None
_settled: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that this process made itself, or has set up already."""


def _reduce_code(code: types.CodeType) -> Any:
    import cloudpickle.cloudpickle as cp  # import here: the package must not load it

    # cloudpickle drops the name of the file; tracebacks from the workers need it.
    return _make_code, (code.co_filename, *cp._code_reduce(code))  # noqa: SLF001


def _make_code(
    filename: str, maker: Callable[..., types.CodeType], arguments: Any
) -> types.CodeType:
    return maker(*arguments).replace(co_filename=filename)


def _make_class(maker: Callable[..., type], *arguments: Any) -> type:
    import cloudpickle.cloudpickle as cp  # import here: the package must not load it

    # The class is found by the id that cloudpickle gave it, so a class that comes home is itself.
    known = cp._DYNAMIC_CLASS_TRACKER_BY_ID.get(arguments[-2])  # noqa: SLF001
    return maker(*arguments) if known is None else known


def _set_class_state(cls: type, state: Any) -> type:
    import cloudpickle.cloudpickle as cp  # import here: the package must not load it

    if cls in _settled:
        return cls
    _settled.add(cls)
    return cp._class_setstate(cls, state)  # type: ignore[no-any-return]  # noqa: SLF001


def encode(value: Any) -> Encoded:
    """Turn ``value`` into bytes.

    The buffers are views of the caller's memory: send or copy them before it may change.

    Raises:
        Exception: whatever pickling raises; nothing has been sent.
    """
    buffers: list[Source] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if isinstance(raw.obj, Strided):
            buffers.append(raw.obj)
        elif len(raw) < IN_BAND:
            return True
        else:
            buffers.append(raw)
        return False

    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=out_of_band).dump(value)
        stream = file.getvalue()
        if b"__main__" not in stream:
            return Encoded(stream, buffers)
    except UnresolvedError:
        raise
    except Exception:  # noqa: BLE001, S110  # cloudpickle knows more; what it can't do it raises itself
        pass
    buffers.clear()
    file = io.BytesIO()
    _by_value_pickler()(file, pickle.HIGHEST_PROTOCOL, buffer_callback=out_of_band).dump(value)
    return Encoded(file.getvalue(), buffers)


def encode_with_calls(value: Any) -> tuple[Encoded, list[Any]]:
    """Encode ``value`` with a mark where a call stands, and return those calls too.

    The bytes are the caller's own: ``value`` may change afterwards.
    """
    calls: list[Any] = []
    placeholders.calls = calls
    try:
        stream, buffers = encode(value)
    finally:
        placeholders.calls = None
    # A second pass, for cloudpickle, meets the same calls again: the marks of the last pass count.
    return Encoded(stream, [bytearray(buffer) for buffer in inline(buffers)]), calls


def decode_with_values(encoded: Encoded, values: Sequence[Any]) -> Any:
    """Decode what ``encode_with_calls`` gave, with ``values`` in the places of its calls."""
    placeholders.values = values
    try:
        return decode(encoded.stream, inline(encoded.buffers))
    finally:
        placeholders.values = ()


def decode(stream: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """Turn bytes back into a value. Tensors and arrays are views of ``buffers``, and writable.

    Raises:
        Exception: whatever unpickling raises.
    """
    return pickle.loads(stream, buffers=buffers)  # from our own processes only


def explain_failure(value: Any, name: str) -> str:
    """Find the innermost part of ``value`` that can't be pickled and say where it is. Never raises.

    Args:
        value: what `encode` failed on.
        name: what to call it in the text.
    """
    path, culprit = name, value
    seen: set[int] = set()
    while id(culprit) not in seen:
        seen.add(id(culprit))
        try:
            parts = _parts(culprit)
        except BaseException:  # noqa: BLE001  # a user's __repr__ or __getattr__: this is near enough
            break
        for label, part in parts:
            try:
                encode(part)
            except BaseException:  # noqa: BLE001  # this is the part we look for
                path, culprit = f"{path}{label}", part
                break
    kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}"
    return f"{path} (a {kind.removeprefix('builtins.')})"


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, type):
        return [
            (f".{key}", getattr(item, "__func__", item))
            for key, item in vars(value).items()
            if key not in ("__dict__", "__weakref__", "__module__", "__doc__")
        ]
    closure = getattr(value, "__closure__", None)
    if closure is not None:
        names = value.__code__.co_freevars
        return [
            (f" (its variable {n!r})", c.cell_contents) for n, c in zip(names, closure, strict=True)
        ]
    if hasattr(value, "__code__"):
        names = value.__code__.co_names
        known = value.__globals__
        return [(f" (its global {n!r})", known[n]) for n in names if n in known]
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        return [(f".{key}", item) for key, item in attributes.items()]
    return []
