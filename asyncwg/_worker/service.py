"""Serve one call: bytes in, method run, bytes out. The same for every lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from asyncwg._wire import codec, failures, staging
from asyncwg._wire.frames import EXTRAS, NO_METHOD, NONE, STREAM, Buffer, Kind, pack
from asyncwg._wire.shipment import Shipment, shipment
from asyncwg._wire.sources import inline
from asyncwg._worker.blocks import Blocks
from asyncwg._worker.context import CurrentCall
from asyncwg.errors import AsyncwgError


class UnreadableError(AsyncwgError):
    """Arguments that the worker can't unpickle; its ``__cause__`` says why."""


class Request(NamedTuple):
    """A call, decoded."""

    call: CurrentCall
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    is_stream: bool = False
    """Whether the function is a generator whose items are wanted one by one."""


class Service:
    """The user's object and the numbers of its methods."""

    def __init__(
        self, worker: Any, names: Sequence[str], blocks: Blocks, to_device: Sequence[str]
    ) -> None:
        self.worker = worker
        self.blocks = blocks
        self._names = names
        self._label = type(worker).__name__
        self._labels = [f"{self._label}.{name}" for name in names]
        self._to_device = frozenset(to_device)
        self._reported = 0

    def request(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> Request:
        """Decode a CALL or RUN frame.

        Raises:
            UnreadableError: the arguments don't unpickle here.
            AttributeError: there is no such method.
        """
        if flags & NONE and aux != NO_METHOD:
            call = CurrentCall(call_id, self._labels[aux])
            function = getattr(self.worker, self._names[aux])
            return Request(call, function, (), {}, flags & STREAM != 0)
        extras: dict[str, Any] = {}
        args: Sequence[Any] = ()
        kwargs: dict[str, Any] = {}
        value: Any = None
        if not flags & NONE:
            stream, buffers = self.blocks.unpack(body, n_buffers, flags)
            try:
                value = codec.decode(stream, buffers)
            except BaseException as error:
                label = self._names[aux] if aux < len(self._names) else "the call"
                raise UnreadableError(
                    f"the arguments of {self._label}.{label} can't be unpickled in the worker: "
                    f"{type(error).__name__}: {failures.text_of(error)}"
                ) from error
            if flags & EXTRAS:
                args, kwargs, extras = value
            else:
                args, kwargs = value
        if kind == Kind.RUN:
            function, *rest = value[0]
            label = getattr(function, "__name__", "run")
            args = (self.worker, *rest)
        elif aux != NO_METHOD:
            label = self._labels[aux]
            name = self._names[aux]
            function = getattr(self.worker, name)
            if name in self._to_device:
                args, kwargs = self._placed(args, kwargs)
        else:
            name = extras["name"]
            label = f"{self._label}.{name}"
            function = getattr(self.worker, name)
        if extras:
            call = CurrentCall(call_id, label, extras.get("rows"), extras.get("timeout"))
        else:
            call = CurrentCall(call_id, label)
        return Request(call, function, args, kwargs, flags & STREAM != 0)

    def _placed(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        import torch  # import here: only for methods that ask for it

        if not torch.cuda.is_available():
            return args, kwargs
        device = torch.device("cuda", torch.cuda.current_device())
        return staging.to_device(tuple(args), device), staging.to_device(kwargs, device)

    def result(self, call_id: int, value: Any) -> list[Buffer] | Shipment:
        """Encode what a method returned: as a frame, or as what has to be offered first.

        Raises:
            Exception: it can't be pickled.
        """
        if value is None:
            return pack(Kind.RESULT, call_id, flags=NONE)
        encoded = codec.encode(value)
        large = shipment(encoded)
        if large is not None:
            return large
        return pack(Kind.RESULT, call_id, encoded.stream, inline(encoded.buffers))

    def item(self, call: CurrentCall, value: Any) -> list[Buffer] | Shipment:
        """Encode what a generator yielded; see `result`.

        Raises:
            TypeError: it can't be pickled; the message says which part.
        """
        encoded = self.encoded_item(call, value)
        large = shipment(encoded)
        if large is not None:
            return large
        return pack(Kind.ITEM, call.id, encoded.stream, inline(encoded.buffers))

    def encoded_item(self, call: CurrentCall, value: Any) -> codec.Encoded:
        """Encode what a generator yielded, as it is.

        Raises:
            TypeError: it can't be pickled; the message says which part.
        """
        try:
            return codec.encode(value)
        except Exception as error:
            raise unsendable("an item", call.method, value, error) from error

    def failure(self, call_id: int, error: BaseException, *, skip_frames: int = 0) -> list[Buffer]:
        """Encode what a method raised. Never raises."""
        record = failures.capture(error, skip_frames=skip_frames)
        return pack(Kind.ERROR, call_id, codec.encode(record).stream)

    def unsendable(
        self, call_id: int, method: str, value: Any, error: BaseException
    ) -> list[Buffer]:
        """Encode that a method's result can't be pickled, and which part of it."""
        return self.failure(call_id, unsendable("the result", method, value, error))

    def meshes(self) -> list[Buffer] | None:
        """Encode the meshes of the worker when some are new, else None."""
        version: int = getattr(self.worker, "_mesh_version", 0)
        if version == self._reported:
            return None
        self._reported = version
        return pack(Kind.MESHES, 0, codec.encode(self.worker.get_dispatch_collect()).stream)


def unsendable(what: str, method: str, value: Any, error: BaseException) -> TypeError:
    """Return the error that says that a value can't be pickled, and which part of it."""
    name = what.rpartition(" ")[2]
    try:
        culprit = codec.explain_failure(value, name)
    except BaseException:  # noqa: BLE001  # looking into a user's value runs the user's code again
        culprit = name
    told = TypeError(f"{what} of {method} can't be pickled: {culprit}: {failures.text_of(error)}")
    told.__cause__ = error
    return told
