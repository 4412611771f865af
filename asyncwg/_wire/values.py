"""How tensors and arrays are written: dtype, shape, and one buffer that holds their bytes.

Only the bytes of a view travel, not the storage behind it. Tensors arrive detached, on the CPU,
contiguous and writable; two views of one storage arrive as two tensors. What has no plain memory
(sparse, quantised, nested) goes torch's own way.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

from asyncwg._wire.sources import Strided

Reducer = Callable[[Any], Any]

STRIDED_FROM: Final = 64 * 1024
"""Bytes. A smaller tensor that is not contiguous is made so: that costs less than the bookkeeping."""


def reducer_for(cls: type) -> Reducer | None:
    """Return how instances of exactly ``cls`` are pickled, or None for pickle's own way.

    A class that defines its own way of being pickled keeps it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(cls, torch.Tensor):
        if cls is torch.Tensor:
            return _reduce_tensor
        if cls is torch.nn.Parameter:
            return _reduce_parameter
        known = torch.nn.Parameter if issubclass(cls, torch.nn.Parameter) else torch.Tensor
        own = any(
            name in vars(base)
            for base in cls.__mro__[: cls.__mro__.index(known)]
            for name in ("__reduce_ex__", "__reduce__", "__tensor_flatten__")
        )
        if own:
            return None
        return _reduce_parameter if known is torch.nn.Parameter else _reduce_subclass
    numpy = sys.modules.get("numpy")
    if numpy is not None and cls is numpy.ndarray:
        return _reduce_array
    return None


def _reduce_array(array: Any) -> Any:
    if array.nbytes >= STRIDED_FROM and not (array.flags.forc or array.dtype.hasobject):
        return _array, (array.dtype, array.shape, pickle.PickleBuffer(Strided.of(array)))
    # A read-only array would arrive read-only: its copy does not. Whoever receives it owns it.
    writable = array if array.flags.writeable else array.copy()
    if writable.base is not None and not isinstance(writable.base, type(array)):
        # An array made of a tensor must not be taken for the tensor, whose counter numpy does not move.
        writable = writable[...]
    return writable.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


_dtypes: dict[str, Any] = {}
"""torch's dtypes by name, filled when the first tensor is seen."""
_by_numpy: dict[Any, str] = {}
"""Names of the dtypes that numpy has too, by dtype: their tensors need no reinterpreting."""
_NUMPY_TOO = [
    "float32",
    "float64",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
]


def _learn_dtypes() -> Any:
    import torch  # import here: only a process that has a tensor loads it

    found: dict[str, Any] = {}
    for name in dir(torch):
        dtype = getattr(torch, name)
        if isinstance(dtype, torch.dtype):
            found[str(dtype).removeprefix("torch.")] = dtype
    _by_numpy.update({found[name]: name for name in _NUMPY_TOO})
    # In one step: the other lane's thread may look while this one learns.
    _dtypes.update(found)
    return torch


def _reduce_tensor(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    name = _by_numpy.get(tensor.dtype)
    if name is not None and tensor.layout is torch.strided and tensor.is_contiguous():
        try:
            flat = tensor.detach() if tensor.requires_grad else tensor
            array = flat.numpy() if flat.nbytes < STRIDED_FROM else _array_of(flat)
        except (TypeError, RuntimeError):  # on a device, lazily conjugated, without memory
            return _reduce_slowly(tensor)
        if not array.size:
            return _empty_tensor, (name, array.shape)
        return _tensor, (name, array.shape, pickle.PickleBuffer(array))
    if not _dtypes:
        _learn_dtypes()
    return _reduce_slowly(tensor)


def _reduce_slowly(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    odd = (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type == "meta"
    )
    flat = tensor.detach()
    on_device = flat.device.type not in ("cpu", "meta")
    if on_device and (odd or flat.nbytes < STRIDED_FROM):
        flat, on_device = flat.cpu(), False
    if odd:
        with warnings.catch_warnings():
            # torch's reducer of quantised tensors warns about a class that it uses itself.
            warnings.simplefilter("ignore", UserWarning)
            return _odd_tensor, flat.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    shape = tuple(flat.shape)
    name = str(flat.dtype).removeprefix("torch.")
    flat = flat.resolve_conj().resolve_neg()
    if flat.nbytes >= STRIDED_FROM and (on_device or not flat.is_contiguous()):
        return _raw_tensor, (name, shape, pickle.PickleBuffer(Strided.of(flat)))
    flat = flat.contiguous().reshape(-1)
    if not flat.numel():
        return _empty_tensor, (name, shape)
    # A single element counts as contiguous whatever its stride, and has no view as bytes then.
    flat = flat.as_strided(flat.shape, (1,))
    return _raw_tensor, (name, shape, pickle.PickleBuffer(_array_of(flat.view(torch.uint8))))


def _array_of(tensor: Any) -> Any:
    """Return an array over a tensor's memory; `is_own` tells of its base whether torch owns that."""
    own = tensor.nbytes >= STRIDED_FROM and _owns_its_memory(tensor.untyped_storage())
    array = tensor.numpy()
    if own:
        array.base.asyncwg_own = True  # an alias that nobody else has
    return array


def _owns_its_memory(storage: Any) -> bool:
    # Once there is an array over it, torch forbids to resize it: so it is remembered.
    if getattr(storage, "asyncwg_own", False):
        return True
    own: bool = storage.resizable()
    if own:
        storage.asyncwg_own = True
    return own


def is_own(alias: Any) -> bool:
    """Whether a large tensor's memory was torch's own, when the array whose base ``alias`` is was made of it.

    That of numpy, of a buffer, of a file or of shared memory can be reached without torch.
    """
    return getattr(alias, "asyncwg_own", False)


def _reduce_parameter(parameter: Any) -> Any:
    torch = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # torch's own reducers do this
        plain = parameter.detach().as_subclass(torch.Tensor)
    cls = type(parameter)
    return _parameter, (cls, plain, parameter.requires_grad, dict(vars(parameter)))


def _reduce_subclass(tensor: Any) -> Any:
    torch = sys.modules["torch"]
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  # torch's own reducers do this
        plain = tensor.detach().as_subclass(torch.Tensor)
    return _subclass, (type(tensor), plain, dict(vars(tensor)))


def _tensor(name: str, shape: tuple[int, ...], buffer: Any) -> Any:
    if not _dtypes:
        _learn_dtypes()
    flat = sys.modules["torch"].frombuffer(buffer, dtype=_dtypes[name])
    return flat if len(shape) == 1 else flat.reshape(shape)


def _raw_tensor(name: str, shape: tuple[int, ...], buffer: Any) -> Any:
    if not _dtypes:
        _learn_dtypes()
    torch = sys.modules["torch"]
    return torch.frombuffer(buffer, dtype=torch.uint8).view(_dtypes[name]).reshape(shape)


def _array(dtype: Any, shape: tuple[int, ...], buffer: Any) -> Any:
    import numpy as np  # import here: only a process that gets an array loads it

    flat: Any = np.frombuffer(buffer, dtype=dtype)
    return flat.reshape(shape)


def _odd_tensor(maker: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with warnings.catch_warnings():
        # As when it was taken apart; and its layout may be new to this process, which torch tells.
        warnings.simplefilter("ignore", UserWarning)
        return maker(*arguments)


def _empty_tensor(name: str, shape: tuple[int, ...]) -> Any:
    if not _dtypes:
        _learn_dtypes()
    return sys.modules["torch"].empty(shape, dtype=_dtypes[name])


def _parameter(cls: type, data: Any, requires_grad: bool, state: dict[str, Any]) -> Any:
    import torch  # import here: only a process that gets a tensor loads it

    # Not by its class, which may ask for more: what it has made of that is in its attributes.
    make: Any = torch.Tensor._make_subclass  # noqa: SLF001  # as torch's own constructor does
    parameter = make(cls, data, requires_grad)
    vars(parameter).update(state)
    return parameter


def _subclass(cls: type, plain: Any, state: dict[str, Any]) -> Any:
    tensor = plain.as_subclass(cls)
    vars(tensor).update(state)
    return tensor
