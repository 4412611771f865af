"""How a value is cut, padded and joined by rows, according to its type.

Tensors, arrays, TensorDicts and lists have *rows*: what lies along their first dimension. Other
types join through `register_shardable`. A dict or a dataclass instance is a *container*: what
it holds is cut and joined entry by entry, and an entry without rows is kept whole. Everything
else (scalars, strings, bytes, tuples, tensors of no dimension) has no rows.

No function here changes a value that it is given, and cutting copies no dense tensor or array.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from asyncwg.errors import DispatchError

__all__ = [
    "Bounds",
    "Handler",
    "batch_rows",
    "cut",
    "join",
    "pad",
    "register_shardable",
    "rows",
    "trim",
    "unpad",
    "wants_padding",
]

Bounds: TypeAlias = Sequence[tuple[int, int]]
"""``(start, stop)`` of each shard, in rows."""


def _never(_value: Any) -> bool:
    return False


@dataclasses.dataclass(frozen=True, slots=True)
class Handler:
    """How values of one type are split and joined. No function may change its argument."""

    rows: Callable[[Any], int | None]
    """Number of rows, or None: this value is no batch and goes to every rank whole."""
    cut: Callable[[Any, Bounds], list[Any]]
    """One shard for each ``(start, stop)``, as views where the type has them."""
    pad: Callable[[Any, int], Any]
    """A new value with so many copies of the last row at the end; there is a last row."""
    join: Callable[[Sequence[Any]], Any]
    """Values of this type, one after the other by rows. Parts may have 0 rows."""
    wants_padding: Callable[[Any], bool] = _never
    """Whether this value asks for ``uneven="pad"``."""
    joins_rowless: bool = False
    """Whether parts without rows are joined too, as a `DataProto` with meta_info alone."""


_registry: dict[type, Handler] = {}
_found: dict[type, Handler | None] = {}
"""What `_handler` answered. A weak dict would cost ten times as much to look into."""
_MAX_FOUND: Final = 1000
"""Classes remembered at most, for programs that make classes on the fly."""


def register_shardable(cls: type, handler: Handler) -> None:
    """Let values of ``cls`` and its subclasses be split and joined by ``handler``.

    The nearest class in a value's MRO counts. Registering a class again replaces its handler.
    """
    _registry[cls] = handler
    _found.clear()


def _handler(cls: type) -> Handler | None:
    try:
        return _found[cls]
    except KeyError:
        if len(_found) >= _MAX_FOUND:
            _found.clear()
        handler = _found[cls] = _look_up(cls)
        return handler


def _look_up(cls: type) -> Handler | None:
    known = dict(_registry)
    for module, name, handler in _HEAVY:
        # A value of a library's type exists only if the library is loaded.
        if module in sys.modules and (heavy := getattr(sys.modules[module], name, None)):
            known.setdefault(heavy, handler)
    for base in cls.__mro__:
        if base in known:
            return known[base]
    # Classes made by @tensorclass have no base class of tensordict's.
    return _TENSORDICT if getattr(cls, "_is_tensorclass", False) else None


def _tensor_rows(value: Any) -> int | None:
    return int(value.shape[0]) if value.dim() else None


def _cut_tensor(value: Any, bounds: Bounds) -> list[Any]:
    torch = sys.modules["torch"]
    if value.layout is torch.sparse_coo:  # it has no strides, so there are no views
        return [torch.narrow_copy(value, 0, start, stop - start) for start, stop in bounds]
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise DispatchError(
            f"a {kind} tensor can't be split by rows: make it dense or sparse_coo, "
            "or give it whole to every rank with Replicate(x)"
        )
    return [value[start:stop] for start, stop in bounds]


def _pad_tensor(value: Any, count: int) -> Any:
    rows = int(value.shape[0])
    last = _cut_tensor(value, [(rows - 1, rows)])[0]
    return sys.modules["torch"].cat([value, *itertools.repeat(last, count)])


def _with_rows(parts: Sequence[Any]) -> Sequence[Any]:
    """Leave out what is empty if something is not: no rows must not decide the dtype."""
    return [part for part in parts if part.shape[0]] or parts


def _join_tensors(parts: Sequence[Any]) -> Any:
    parts = _with_rows(parts)
    return parts[0] if len(parts) == 1 else cat(parts)


def _pad_array(value: Any, count: int) -> Any:
    return _concatenate([value, *itertools.repeat(value[-1:], count)])


def _join_arrays(parts: Sequence[Any]) -> Any:
    parts = _with_rows(parts)
    kinds = {"number" if part.dtype.kind in "biufc" else part.dtype.kind for part in parts}
    if len(kinds) > 1 and "O" not in kinds:  # numpy would turn numbers into strings
        raise TypeError(f"the arrays' dtypes differ: {', '.join(str(p.dtype) for p in parts)}")
    return parts[0] if len(parts) == 1 else _concatenate(parts)


def _concatenate(parts: Sequence[Any]) -> Any:
    numpy = sys.modules["numpy"]
    # np.concatenate drops the masks of masked arrays without a word.
    masked = any(isinstance(part, numpy.ma.MaskedArray) for part in parts)
    in_place = _in_place(parts)
    return (numpy.ma if masked else numpy).concatenate(parts) if in_place is None else in_place


in_place_joiners: list[Callable[[Sequence[Any]], Any]] = []
"""Each takes tensors, or arrays, and returns them as one if they stand side by side in memory, else
None. The arena adds one: the results of the ranks are written where the joined batch stands."""


def _in_place(parts: Sequence[Any]) -> Any:
    for joiner in in_place_joiners:
        joined = joiner(parts)
        if joined is not None:
            return joined
    return None


def cat(parts: Sequence[Any]) -> Any:
    """Join tensors, or tensordicts, by rows, without a copy where they stand side by side."""
    torch = sys.modules["torch"]
    if all(type(part) is torch.Tensor for part in parts):
        in_place = _in_place(parts)
        return torch.cat(list(parts)) if in_place is None else in_place
    tensordict = sys.modules.get("tensordict")
    if tensordict is not None and all(type(part) is tensordict.TensorDict for part in parts):
        # Entry by entry: tensordict's own cat would copy every tensor.
        entries = {key: [part.get(key) for part in parts] for key in parts[0].keys()}  # noqa: SIM118
        rows = sum(part.batch_size[0] for part in parts)
        size = [rows, *parts[0].batch_size[1:]]
        joined = {key: cat(values) for key, values in entries.items()}
        return tensordict.TensorDict(joined, batch_size=size, device=parts[0].device)
    return torch.cat(list(parts))


def _cut_by_slices(value: Any, bounds: Bounds) -> list[Any]:
    return [value[start:stop] for start, stop in bounds]


def _tensordict_rows(value: Any) -> int | None:
    return int(value.batch_size[0]) if len(value.batch_size) else None


def _pad_tensordict(value: Any, count: int) -> Any:
    return sys.modules["torch"].cat([value, *itertools.repeat(value[-1:], count)])


def _join_tensordicts(parts: Sequence[Any]) -> Any:
    keys = [set[Any](part.keys(True)) for part in parts]
    for i, found in enumerate(keys):
        _check_same_keys(keys[0], found, f"result {i}")
    parts = [part for part in parts if part.batch_size[0]] or parts
    return parts[0] if len(parts) == 1 else cat(parts)


_LIST: Final = Handler(
    len,
    _cut_by_slices,
    lambda value, count: [*value, *itertools.repeat(value[-1], count)],
    lambda parts: list(itertools.chain.from_iterable(parts)),
)
_TENSORDICT: Final = Handler(_tensordict_rows, _cut_by_slices, _pad_tensordict, _join_tensordicts)
_HEAVY: Final = (
    ("torch", "Tensor", Handler(_tensor_rows, _cut_tensor, _pad_tensor, _join_tensors)),
    (
        "numpy",
        "ndarray",
        Handler(
            lambda value: len(value) if value.ndim else None,
            _cut_by_slices,
            _pad_array,
            _join_arrays,
        ),
    ),
    ("tensordict", "TensorDictBase", _TENSORDICT),
)
"""Types of libraries that this package must not load."""
_registry[list] = _LIST


def _entries(value: Any) -> Mapping[Any, Any] | None:
    """Return what a container holds; None if ``value`` is none."""
    if _handler(type(value)) is not None:  # of a registered class, which may be a dataclass too
        return None
    if isinstance(value, dict):
        held: dict[Any, Any] = value
        return held
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def _rebuild(value: Any, entries: dict[Any, Any]) -> Any:
    """Return a container like ``value`` that holds ``entries``."""
    if type(value) is dict:
        return entries
    if isinstance(value, dict):
        rebuilt: Any = copy.copy(value)
        for key, entry in entries.items():
            rebuilt[key] = entry
        return rebuilt
    init = {field.name: field.init for field in dataclasses.fields(value)}
    given = {name: entry for name, entry in entries.items() if init[name]}
    if inspect.signature(type(value)).parameters.keys() == given.keys():
        # Through __init__, so that what __post_init__ derives from the rows fits the new rows.
        rebuilt = type(value)(**given)
        derives = hasattr(rebuilt, "__post_init__")
        rest = [n for n in entries if not init[n] and not (derives and hasattr(rebuilt, n))]
    else:  # an __init__ of its own, or with an InitVar whose value is gone
        rebuilt, rest = copy.copy(value), list(entries)
    for name in rest:
        object.__setattr__(rebuilt, name, entries[name])  # it may be frozen
    return rebuilt


Place: TypeAlias = tuple[Any, ...]
"""The keys that lead to something in nested containers."""


def _at(place: Place) -> str:
    return "".join(f"[{key!r}]" for key in place)


def _leaves(value: Any, place: Place = ()) -> Iterator[tuple[Place, Handler, Any]]:
    """Yield everything in ``value`` that is of a type with a handler."""
    if (handler := _handler(type(value))) is not None:
        yield place, handler, value
    elif (entries := _entries(value)) is not None:
        for key, entry in entries.items():
            yield from _leaves(entry, (*place, key))


def _has_rows(value: Any) -> bool:
    return any(handler.rows(leaf) is not None for _, handler, leaf in _leaves(value))


def _map_rows(value: Any, change: Callable[[Place, Handler, Any], Any], place: Place = ()) -> Any:
    """Return ``value`` with everything in it that has rows changed."""
    entries = _entries(value)
    if entries is not None:
        changed = {key: _map_rows(entry, change, (*place, key)) for key, entry in entries.items()}
        same = all(changed[key] is entry for key, entry in entries.items())
        return value if same else _rebuild(value, changed)
    handler = _handler(type(value))
    if handler is None or handler.rows(value) is None:
        return value
    return change(place, handler, value)


def rows(value: Any) -> int | None:
    """Return how many rows ``value`` has, lists counted; None if it has no rows.

    Raises:
        DispatchError: a container's entries differ in their number of rows.
    """
    if (found := _handler(type(value))) is not None:
        return found.rows(value)
    counts: dict[int, Place] = {}
    for place, handler, leaf in _leaves(value):
        if (count := handler.rows(leaf)) is not None:
            counts.setdefault(count, place)
    if len(counts) > 1:
        told = " and ".join(f"{_at(place)} has {count} rows" for count, place in counts.items())
        raise DispatchError(f"entries differ in their number of rows: {told}")
    return next(iter(counts), None)


def batch_rows(value: Any) -> int | None:
    """Return how many rows ``value`` has if it is a batch by its type; None if it is no batch.

    Unlike `rows`, this refuses what could be meant either way.

    Raises:
        DispatchError: a container holds lists, but no tensor, array, TensorDict or DataProto that
            shows them to be rows; entries differ in rows; a TensorDict without a batch dimension
            holds tensors that have dimensions.
    """
    _refuse_ambiguous(value, ())
    return rows(value)


def _refuse_ambiguous(value: Any, place: Place) -> None:
    handler, entries = _handler(type(value)), _entries(value)
    if entries is None:
        if handler is _TENSORDICT and _is_flat(value):
            raise DispatchError(
                f"{_told(value, place)} has no batch dimension: give it batch_size=[rows], "
                "or say Replicate(x) to give it whole to every rank"
            )
        return
    decided = any(h is not _LIST and h.rows(leaf) is not None for _, h, leaf in _leaves(value))
    if not decided and _has_rows(value):
        hint = " (as an argument of its own)" if place else ""
        raise DispatchError(
            f"{_told(value, place)} holds lists, but no tensor or array that shows whether they are rows: "
            f"say Shard(x) or Replicate(x){hint}"
        )
    for key, entry in entries.items():
        _refuse_ambiguous(entry, (*place, key))


def _told(value: Any, place: Place) -> str:
    return f"the {type(value).__name__}{' at ' + _at(place) if place else ''}"


def _is_flat(value: Any) -> bool:
    """Tell whether a TensorDict holds tensors with dimensions, and none of them is its batch's."""
    dims = (getattr(leaf, "ndim", 0) for leaf in value.values(True, True))
    return not len(value.batch_size) and any(dims)


def cut(value: Any, bounds: Bounds) -> list[Any]:
    """Return one shard for each ``(start, stop)``, as views of the dense tensors and arrays.

    Raises:
        DispatchError: it has no rows, or can't be cut.
    """
    entries = _entries(value)
    if entries is not None and _has_rows(value):
        columns = {
            key: cut(entry, bounds) if _has_rows(entry) else [entry] * len(bounds)
            for key, entry in entries.items()
        }
        return [
            _rebuild(value, {key: column[i] for key, column in columns.items()})
            for i in range(len(bounds))
        ]
    handler = _handler(type(value))
    if handler is None or handler.rows(value) is None:
        raise DispatchError(f"a {type(value).__name__} like this has no rows that could be split")
    return handler.cut(value, bounds)


def pad(value: Any, count: int) -> Any:
    """Return a new value with ``count`` copies of the last row at the end.

    Raises:
        DispatchError: it has no last row.
    """
    if not rows(value):
        raise DispatchError(f"a {type(value).__name__} without rows can't be padded")
    return _map_rows(value, lambda _, handler, leaf: handler.pad(leaf, count))


def trim(value: Any, n: int) -> Any:
    """Return the first ``n`` rows, as views.

    Raises:
        DispatchError: it has no rows.
    """
    return cut(value, [(0, n)])[0]


def unpad(value: Any, shard: int, real: int) -> Any:
    """Cut the result of a padded shard: ``k * shard`` rows become ``k * real``, entry by entry.

    Args:
        value: the result; what has no rows stays as it is.
        shard: rows of the padded shard.
        real: how many of them, at the start, are no padding.

    Raises:
        DispatchError: something has rows, and not one or more times ``shard``.
    """

    def cut_leaf(place: Place, handler: Handler, leaf: Any) -> Any:
        found = handler.rows(leaf) or 0
        times = found // shard if shard else 0
        if found != times * shard or (shard and not times):
            raise DispatchError(
                f"the result{_at(place)} has {found} rows, and not a multiple of the {shard} rows "
                "of the padded shard, so it is not known which of them are padding"
            )
        return leaf if real == shard else handler.cut(leaf, [(0, times * real)])[0]

    return _map_rows(value, cut_leaf)


def wants_padding(value: Any) -> bool:
    """Tell whether ``value``, or something that it holds, asks for ``uneven="pad"``."""
    return any(handler.wants_padding(leaf) for _, handler, leaf in _leaves(value))


def join(parts: Sequence[Any], ranks: Sequence[int] | None = None) -> Any:
    """Put results together, in their order.

    Batches, tensors, arrays and lists are joined by rows, with one copy at most. Containers are
    joined key by key; an entry without rows becomes the list of its values. All None gives None.

    Args:
        parts: one or more results.
        ranks: who returned them, for messages.

    Raises:
        DispatchError: they have no rows, are of different types, differ in their keys, or don't
            fit together.
    """
    if all(part is None for part in parts):
        return None
    return _join(parts, range(len(parts)) if ranks is None else ranks, ())


def _join(parts: Sequence[Any], ranks: Sequence[int], place: Place) -> Any:
    entries = [found for part in parts if (found := _entries(part)) is not None]
    if len(entries) == len(parts) and _same_container(parts):
        for rank, found in zip(ranks, entries, strict=True):
            _check_same_keys(set(entries[0]), set(found), f"rank {rank}", place)
        joined = {
            key: _join_entry([found[key] for found in entries], ranks, (*place, key))
            for key in entries[0]
        }
        return _rebuild(parts[0], joined)
    handlers = {_handler(type(part)) for part in parts}
    handler = handlers.pop()
    if handler is None or handlers or not all(_joinable(part) for part in parts):
        raise _unjoinable(parts, ranks, place)
    try:
        return handler.join(parts)
    except Exception as error:  # whatever a type's own code raises: what was returned must be kept
        where = f" at {_at(place)}" if place else ""
        raise DispatchError(f"the results{where} don't fit together: {error}") from error


def _join_entry(values: list[Any], ranks: Sequence[int], place: Place) -> Any:
    return _join(values, ranks, place) if any(_joinable(value) for value in values) else values


def _joinable(value: Any) -> bool:
    return any(h.joins_rowless or h.rows(leaf) is not None for _, h, leaf in _leaves(value))


def _same_container(parts: Sequence[Any]) -> bool:
    return all(isinstance(part, dict) for part in parts) or len({type(part) for part in parts}) == 1


def _unjoinable(parts: Sequence[Any], ranks: Sequence[int], place: Place) -> DispatchError:
    names = [type(part).__name__ for part in parts]
    i = next((i for i, part in enumerate(parts) if not _joinable(part)), 0)
    odd = next((j for j, name in enumerate(names) if name != names[i]), None)
    what = f"rank {ranks[i]} returned a {names[i]}{' at ' + _at(place) if place else ''}"
    if odd is None:
        what += " that has no rows to join"
    else:
        what += f" and rank {ranks[odd]} a {names[odd]}, which can't be joined"
    return DispatchError(
        f"{what}: return batches of one type, or None, from every rank, or register the method "
        "with Dispatch.DP_COMPUTE_METRIC for a list by rank"
    )


def _check_same_keys(expected: set[Any], found: set[Any], who: str, place: Place = ()) -> None:
    if odd := expected ^ found:
        key = min(odd, key=repr)
        has = "has" if key in found else "lacks"
        raise DispatchError(
            f"{who} {has} {_at((*place, key))}, unlike the first: return the same keys everywhere"
        )
