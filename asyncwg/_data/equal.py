"""Whether two values are the same, where ``==`` gives an array, or says that NaN is not NaN."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

_Pairs = set[tuple[int, int]]


def same_value(a: Any, b: Any) -> bool:
    """Return whether ``a`` and ``b`` are alike in all their parts; NaN is the same as NaN.

    Tensors must have the same dtype and shape, and may be on different devices. Looks into dicts,
    lists, tuples, TensorDicts and object arrays, and ends when they contain themselves.
    """
    return _same(a, b, set())


def _same(a: Any, b: Any, seen: _Pairs) -> bool:
    if a is b:
        return True
    for kind, compare in _KINDS:
        if isinstance(a, kind) or isinstance(b, kind):
            if not (isinstance(a, kind) and isinstance(b, kind)):
                return False
            # What is being compared further up counts as equal: it decides there.
            if (id(a), id(b)) in seen:
                return True
            return compare(a, b, seen | {(id(a), id(b))})
    return _same_scalar(a, b)


def _same_scalar(a: Any, b: Any) -> bool:
    try:
        return bool(a == b) or bool(a != a and b != b)  # only NaN differs from itself
    except (ValueError, TypeError, RuntimeError):
        return False  # its == gives no truth, so nobody can say that they are the same


def _same_tensor(a: torch.Tensor, b: torch.Tensor, seen: _Pairs) -> bool:
    if a.dtype != b.dtype or a.layout != b.layout or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        return _same_sequence(a.unbind(), b.unbind(), seen)
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    a, b = a.detach(), b.detach().to(a.device)
    if a.is_floating_point() and a.element_size() == 1:
        a, b = a.float(), b.float()  # the 8-bit types have few operations of their own
    if torch.equal(a, b):
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _same_batch(a: Any, b: Any, seen: _Pairs) -> bool:
    if a.batch_size != b.batch_size:
        return False
    fields_a, fields_b = dict(a.items()), dict(b.items())
    return _same_mapping(fields_a, fields_b, seen)


def _same_stack(a: Any, b: Any, seen: _Pairs) -> bool:
    return _same(a.tolist(), b.tolist(), seen)


def _same_data(a: Any, b: Any, seen: _Pairs) -> bool:
    return a.batch_size == b.batch_size and _same(a.data, b.data, seen)


def _same_array(a: Any, b: Any, seen: _Pairs) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype == object or b.dtype == object:
        return all(_same(x, y, seen) for x, y in zip(a.flat, b.flat, strict=True))
    nan_possible = a.dtype.kind in "fcmM" and b.dtype.kind in "fcmM"
    return np.array_equal(a, b, equal_nan=nan_possible)


def _same_mapping(a: Any, b: Any, seen: _Pairs) -> bool:
    return a.keys() == b.keys() and all(_same(value, b[key], seen) for key, value in a.items())


def _same_sequence(a: Any, b: Any, seen: _Pairs) -> bool:
    return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))


_Compare = Callable[[Any, Any, _Pairs], bool]
_KINDS: tuple[tuple[Any, _Compare], ...] = (
    (torch.Tensor, _same_tensor),
    (NonTensorStack, _same_stack),
    (NonTensorData, _same_data),
    (TensorDictBase, _same_batch),
    (np.ndarray, _same_array),
    (Mapping, _same_mapping),
    (list, _same_sequence),
    (tuple, _same_sequence),
)
"""How each kind is compared; the first that fits either value decides."""
