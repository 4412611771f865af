"""Where the bytes of an out-of-band buffer come from, and how they get to where they are to stand.

A contiguous tensor or array is its own bytes. One that is not contiguous, or on a GPU, has none that
could be sent: a `Strided` stands for it, and is copied once, straight to its place, instead of
being made contiguous first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from asyncwg._wire import staging
from asyncwg._wire.frames import Buffer


class Strided(bytearray):
    """Stands for the bytes of a tensor or an array that is not contiguous.

    It is a buffer only so that pickle takes it for one.
    """

    value: Any
    nbytes: int
    made: Any = None
    """Of a tensor on a GPU: what tells when it is complete."""

    @classmethod
    def of(cls, value: Any) -> Strided:
        """Stand for ``value``, a strided tensor on any device or an array without objects."""
        self = cls(1)
        self.value = value
        self.nbytes = value.nbytes
        if "torch" in sys.modules:
            self.made = staging.completion_of(value)
        return self

    def copy_to(self, place: memoryview) -> None:
        """Write the value's bytes, in C order, to ``place``."""
        torch: Any = sys.modules.get("torch")
        if torch is not None and isinstance(self.value, torch.Tensor):
            if self.value.device.type != "cpu":
                staging.copy_to_host(self.value, place, self.made)
                return
            flat = torch.frombuffer(place, dtype=torch.uint8).view(self.value.dtype)
            flat.view(self.value.shape).copy_(self.value)
        else:
            import numpy as np  # import here: the value is one of its arrays

            there: Any = np.frombuffer(place, dtype=self.value.dtype)
            np.copyto(there.reshape(self.value.shape), self.value)


Source: TypeAlias = Buffer | Strided
"""Something that has, or can write, the bytes of one buffer."""


def size_of(source: Source) -> int:
    """Return how many bytes a buffer has."""
    return source.nbytes if isinstance(source, Strided) else len(source)


def address_of(source: Buffer) -> int:
    """Return where a buffer's bytes begin."""
    import numpy as np  # import here: the package must not load it

    return int(np.frombuffer(source, np.uint8).ctypes.data)


def copy(source: Source, place: memoryview) -> None:
    """Write a buffer's bytes to ``place``, without the GIL."""
    if isinstance(source, Strided):
        source.copy_to(place)
        return
    import numpy as np  # import here: the package must not load it

    # Assigning slices of memoryviews would hold the GIL.
    np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(source, np.uint8))


def inline(sources: Sequence[Source]) -> list[Buffer]:
    """Return the buffers as bytes that can be sent; only what is strided is copied."""
    buffers: list[Buffer] = []
    for source in sources:
        if isinstance(source, Strided):
            place = memoryview(bytearray(source.nbytes))
            source.copy_to(place)
            buffers.append(place)
        else:
            buffers.append(source)
    return buffers


def steady(source: Source, *, always: bool = False) -> Source:
    """Return a copy of what may change without a trace, or of all; anything else as it is."""
    if version_of(source) is not None and not always:
        return source
    return bytes(inline([source])[0])


def version_of(source: Source) -> int | None:
    """Return the version counter of the tensor behind a buffer; None where there is no counter.

    torch raises it with every write that goes through torch. Arrays and inference tensors have none;
    bytes need none.
    """
    if isinstance(source, bytes):
        return 0
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    tensor: Any
    if isinstance(source, Strided):
        tensor = source.value
    else:
        # A tensor's array has a view of the tensor as its base, and views share the counter.
        tensor = getattr(getattr(source, "obj", None), "base", None)
    if not isinstance(tensor, torch.Tensor) or tensor.is_inference():
        return None
    return int(tensor._version)  # noqa: SLF001  # torch's documented way to ask
