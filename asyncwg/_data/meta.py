"""How the ``meta_info`` of several parts becomes one."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from asyncwg._data.equal import same_value
from asyncwg.errors import UsageError

METRICS: Final = "metrics"
"""The key whose values are gathered instead of compared, as in verl."""

Reducers: TypeAlias = "Mapping[str, Callable[[list[Any]], Any]]"


def merge_meta(metas: Sequence[Mapping[str, Any]], reducers: Reducers) -> dict[str, Any]:
    """Return one dict: reduced where ``reducers`` names the key, else gathered or kept once.

    A reducer gets the values of the parts that have its key, in order. Keys may be missing in
    some parts.

    Raises:
        UsageError: the values of a key differ and nothing says how to combine them.
    """
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for meta in metas for key in meta):
        found = [(part, meta[key]) for part, meta in enumerate(metas) if key in meta]
        values = [value for _, value in found]
        if key in reducers:
            merged[key] = reducers[key](values)
        elif key == METRICS:
            dicts = _metric_dicts(values)
            if dicts:
                merged[key] = _gather(dicts)
        else:
            merged[key] = _only_value(key, found)
    return merged


def _only_value(key: str, found: Sequence[tuple[int, Any]]) -> Any:
    first_part, first = found[0]
    for part, value in found[1:]:
        if not same_value(first, value):
            raise UsageError(
                f"concat: meta_info[{key!r}] is {reprlib.repr(first)} in part {first_part} and "
                f"{reprlib.repr(value)} in part {part}; say how to combine them with "
                f"DataProto.concat(parts, meta={{{key!r}: fn}}), fn gets the list of values"
            )
    return first


def _metric_dicts(values: Sequence[Any]) -> list[dict[str, Any]]:
    dicts: list[dict[str, Any]] = []
    for value in values:
        for entry in value if isinstance(value, list) else [value]:
            if entry is None:
                continue
            if not isinstance(entry, dict):
                raise UsageError(
                    f"concat: meta_info[{METRICS!r}] must be a dict or a list of dicts, "
                    f"got {type(entry).__name__}; or combine it with meta={{{METRICS!r}: fn}}"
                )
            dicts.append(cast("dict[str, Any]", entry))
    return dicts


def _gather(dicts: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    gathered: dict[str, list[Any]] = {}
    for metrics in dicts:
        for name, value in metrics.items():
            # A list was gathered before; as one entry it would nest deeper with each concat.
            values = value if isinstance(value, list) else [value]
            gathered.setdefault(name, []).extend(values)
    return gathered
