"""Whether anything but an encoded value can still write to the memory that its buffers stand in.

Who asks has let go of the value itself: what is left is one alias of each tensor, which `values` made,
and each array. Nobody else can reach the memory if nobody else holds its owner: a torch storage or an
array. Any view, slice, exported buffer or saved tensor holds it too, so counting the holders tells.

How often an owner is held that nobody else has is not written down here but tried out, because it differs
between versions of torch and Python. Where the counts don't tell, nothing is ever found sole.

- S-1 What is found sole can't be written to by anybody who does not have the buffers. In doubt the answer
  is no.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from asyncwg._wire import codec
from asyncwg._wire.sources import Source, Strided, size_of
from asyncwg._wire.values import is_own

ASIDE: Final = 256 * 1024
"""Bytes in all of buffers that others hold too and that are copied instead: about 30 us of copying."""
_SAMPLE: Final = 64 * 1024
"""Bytes of a value to try it out with: large enough to be taken out of the stream, and to be marked."""


def sole(sources: Sequence[Source]) -> list[Source] | None:
    """Return ``sources`` such that nobody else can write to them, or None where that would cost.

    Those that others can write to are copied if they are small together.
    """
    if any(isinstance(source, Strided) for source in sources):
        return None
    shared = _shared(sources)
    if not shared:
        return list(sources)
    if sum(size_of(sources[index]) for index in shared) > ASIDE:
        return None
    return [bytes(source) if index in shared else source for index, source in enumerate(sources)]


def _shared(sources: Sequence[Any]) -> set[int]:
    """Return the numbers of the buffers that somebody else may write to."""
    owned: dict[int, list[int]] = {}
    shared: set[int] = set()
    for index, source in enumerate(sources):
        if isinstance(source, bytes):
            continue
        owner = _owner(source)
        if owner is None:
            shared.add(index)
        else:
            owned.setdefault(owner, []).append(index)
    for parts in owned.values():
        one = sources[parts[0]]
        alone = _alone_storage() if _is_tensor(one) else _alone_array()
        if alone is None or _holders(one) != (alone[0], alone[1] + len(parts) - 1):
            shared.update(parts)
    return shared


def _is_tensor(source: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(source.obj.base, torch.Tensor)


def _owner(source: Any) -> int | None:
    """Return the id of what owns a buffer's memory; None where it can be reached in ways that don't count."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(source, memoryview):
        return None
    references = _references(source)
    array: Any = source.obj
    if type(array) is not numpy.ndarray or weakref.getweakrefcount(array):
        return None
    if _is_tensor(source):
        storage = array.base.untyped_storage()
        if not is_own(array.base) or storage.is_shared() or weakref.getweakrefcount(storage):
            return None
        return int(storage._cdata)  # noqa: SLF001  # its address
    if array.base is None:
        return id(array) if array.flags.owndata else None
    owner: Any = array.base
    if type(owner) is not numpy.ndarray or not owner.flags.owndata:
        return None
    alone = _alone_array()
    if weakref.getweakrefcount(owner) or alone is None or references != alone[1]:
        return None
    return id(owner)


def _references(source: Any) -> int:
    """Count the references to the array that a buffer is a view of."""
    array = source.obj  # one more, as in `_holders`
    return sys.getrefcount(array)


def _holders(source: Any) -> tuple[int, int]:
    """Count who holds the owner of a buffer's memory.

    Returns:
        The first number is the same for any number of our buffers, the second grows by one with each.
    """
    if _is_tensor(source):
        torch: Any = sys.modules["torch"]
        storage = source.obj.base.untyped_storage()
        # The object that stands for a storage in Python is one for all who hold it: their holds are its own.
        return sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
    owner = source.obj
    if owner.base is not None:
        owner = owner.base
    return 0, sys.getrefcount(owner)


def _encoded(value: Any) -> Any:
    return codec.encode(value).buffers[0]


def _counts_are_exact() -> bool:
    # Without a GIL, references are counted in several places.
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


@cache
def _alone_storage() -> tuple[int, int] | None:
    """Return what `_holders` says of a tensor that nobody else has; None if that does not tell."""
    torch: Any = sys.modules["torch"]
    if not hasattr(torch._C, "_storage_Use_Count") or not _counts_are_exact():  # noqa: SLF001
        return None
    alone = _holders(_encoded(torch.ones(_SAMPLE, dtype=torch.uint8)))
    kept = torch.ones(_SAMPLE, dtype=torch.uint8)
    with_tensor = _holders(_encoded(kept))
    source, kept = _encoded(kept), kept.untyped_storage()
    with_storage = _holders(source)
    return None if alone in (with_tensor, with_storage) else alone


@cache
def _alone_array() -> tuple[int, int] | None:
    """Return the same of an array; the second number is also that of `_references` to a view."""
    numpy: Any = sys.modules["numpy"]
    if not _counts_are_exact():
        return None
    source = _encoded(numpy.ones(_SAMPLE))
    alone = _holders(source)
    kept = numpy.ones(_SAMPLE)
    whole, view = _encoded(kept), _encoded(kept[1:])
    told = (
        alone[1] == _references(source) == _references(view)
        and _holders(_encoded(numpy.ones((2, _SAMPLE))[1:])) == alone
        and alone not in (_holders(whole), _holders(view))
        and _references(whole) != alone[1]
    )
    return alone if told else None
