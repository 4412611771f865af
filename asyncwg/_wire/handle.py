"""What a method gets in the place of a call, where it asks for that with ``materialize_futures=False``."""

from __future__ import annotations

import pickle
from collections.abc import Generator, Sequence
from typing import Any

from asyncwg._wire import codec
from asyncwg._wire.frames import Buffer


class Handle:
    """The value of a `Call` that was given as an argument, not decoded until the method reads it.

    The value is there already: a call waits for those among its arguments. Reading it twice gives the
    same object. It can be handed on, to another method or back to the controller.
    """

    def __init__(self, stream: Buffer, buffers: Sequence[Buffer]) -> None:
        self._stream = stream
        self._buffers = buffers
        self._value: Any = None
        self._read = False

    @classmethod
    def of(cls, value: Any) -> Handle:
        """Make one of a value that is here."""
        self = cls(b"", ())
        self._value, self._read = value, True
        return self

    def get(self, timeout: float | None = None) -> Any:
        """Return the value. ``timeout`` is there for programs written for verl: nothing is waited for.

        Raises:
            Exception: whatever unpickling it raises.
        """
        del timeout
        if not self._read:
            self._value = codec.decode(self._stream, self._buffers)
            self._read = True
            self._stream, self._buffers = b"", ()
        return self._value

    def result(self) -> Any:
        """Return the value; see `get`."""
        return self.get()

    def done(self) -> bool:
        """Return True."""
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        """Give the value, in ``async def`` methods."""
        return self.get()
        yield

    def __reduce__(self) -> Any:
        if self._read:
            stream, buffers = codec.encode(self._value)
        else:
            stream, buffers = bytes(self._stream), list(self._buffers)
        return Handle, (stream, [pickle.PickleBuffer(buffer) for buffer in buffers])

    def __repr__(self) -> str:
        return f"<Handle of {self._value!r}>" if self._read else "<Handle, not read>"
