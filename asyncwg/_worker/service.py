"""Serve one call: bytes in, method run, bytes out. The same for every lane."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from asyncwg._wire import codec, failures, staging
from asyncwg._wire.frames import EXTRAS, NO_METHOD, NONE, STREAM, UNNUMBERED, Buffer, Kind, pack
from asyncwg._wire.shipment import Shipment, shipment
from asyncwg._wire.sources import inline
from asyncwg._worker.blocks import Blocks
from asyncwg._worker.context import CurrentCall
from asyncwg._worker.parts import Objects
from asyncwg.decorator import Address
from asyncwg.errors import AsyncwgError
from asyncwg.worker import Worker


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
    number: int = NO_METHOD
    """The method's, where it is registered."""


class Service:
    """The user's objects and the numbers of their methods.

    Args:
        objects: by role; the worker itself under None.
        addresses: the registered methods, by number.
        blocks: where large values stand.
        to_device: numbers of the methods whose tensors are placed on the rank's device.
    """

    def __init__(
        self,
        objects: Objects,
        addresses: Sequence[Address],
        blocks: Blocks,
        to_device: Collection[int],
    ) -> None:
        self.blocks = blocks
        self._objects = objects
        self._addresses = addresses
        self._roles = [None, *(role for role in objects if role is not None)]
        self._numbers = {address: number for number, address in enumerate(addresses)}
        self._labels = [self._label(address) for address in addresses]
        # Others may answer to any name.
        self._meshed = {role: each for role, each in objects.items() if isinstance(each, Worker)}
        self._owners = [objects[address.role] for address in addresses]
        self._names = [address.name for address in addresses]
        self._to_device = frozenset(to_device)
        self._reported = 0

    def forget(self) -> None:
        """Let go of the user's objects: no call comes any more."""
        self._objects = {}
        self._meshed = {}
        self._owners = []

    def _label(self, address: Address) -> str:
        role, name = address
        label = f"{type(self._objects[role]).__name__}.{name}"
        return label if role is None else f"{role}.{label}"

    def request(
        self, call_id: int, kind: int, flags: int, aux: int, n_buffers: int, body: memoryview
    ) -> Request:
        """Decode a CALL or RUN frame.

        Raises:
            UnreadableError: the arguments don't unpickle here.
            AttributeError: there is no such method.
        """
        if flags & NONE and aux < UNNUMBERED:
            call = CurrentCall(call_id, self._labels[aux])
            function = getattr(self._owners[aux], self._names[aux])
            return Request(call, function, (), {}, flags & STREAM != 0, aux)
        extras: dict[str, Any] = {}
        args: Sequence[Any] = ()
        kwargs: dict[str, Any] = {}
        value: Any = None
        if not flags & NONE:
            stream, buffers = self.blocks.unpack(body, n_buffers, flags)
            try:
                value = codec.decode(stream, buffers)
            except BaseException as error:
                label = self._labels[aux] if aux < len(self._labels) else "the call"
                raise UnreadableError(
                    f"the arguments of {label} can't be unpickled in the worker: "
                    f"{type(error).__name__}: {failures.text_of(error)}"
                ) from error
            if flags & EXTRAS:
                args, kwargs, extras = value
            else:
                args, kwargs = value
        if kind == Kind.RUN:
            function, *rest = value[0]
            label = getattr(function, "__name__", "run")
            args = (self._objects[self._roles[NO_METHOD - aux]], *rest)
        elif aux < UNNUMBERED:
            label = self._labels[aux]
            function = getattr(self._owners[aux], self._names[aux])
            if aux in self._to_device:
                args, kwargs = self._placed(args, kwargs)
        else:
            address = Address(self._roles[NO_METHOD - aux], extras["name"])
            label = self._label(address)
            aux = self._numbers.get(address, NO_METHOD)
            function = getattr(self._objects[address.role], address.name)
        if extras:
            rows = extras.get("rows", (None, None))
            call = CurrentCall(call_id, label, *rows, timeout=extras.get("timeout"))
        else:
            call = CurrentCall(call_id, label)
        return Request(call, function, args, kwargs, flags & STREAM != 0, aux)

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
        """Encode the meshes of all objects, by role, when some are new, else None."""
        version = 0
        for each in self._meshed.values():
            version += each._mesh_version  # noqa: SLF001  # the other half of it
        if version == self._reported:
            return None
        self._reported = version
        told = {role: each.get_dispatch_collect() for role, each in self._meshed.items()}
        return pack(Kind.MESHES, 0, codec.encode(told).stream)


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
