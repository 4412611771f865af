"""What each rank gets of a call, and what the call's result is. Pure functions, no I/O.

``plan(method, mode, args, kwargs, layout, uneven)`` gives a `Plan`: payloads, which position gets
which of them, and the function that makes the results, by position, the result of the call. Ranks
that get the same share a payload, so it is encoded once. Nothing is guessed from lengths: an
argument is split because of the method's mode and the argument's type, or of a marker.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from asyncwg import shards
from asyncwg._modes import CustomMode, MeshMode, Mode
from asyncwg.decorator import (
    Dispatch,
    Method,
    PerRank,
    Replicate,
    Shard,
    Uneven,
    collect_dp_compute_data_proto,
)
from asyncwg.errors import DispatchError
from asyncwg.mesh import MeshTable, check_mesh

__all__ = ["Layout", "Payload", "Plan", "plan"]

Collect: TypeAlias = Callable[[list[Any]], Any]
Key: TypeAlias = int | str
"""Of an argument: its position, or its keyword."""

# Looked up on every call, where an attribute of a class costs more than a name of the module.
_ONE_TO_ALL: Final = Dispatch.ONE_TO_ALL
_ALL_TO_ALL: Final = Dispatch.ALL_TO_ALL
_WITH_FUNC: Final = Dispatch.DP_COMPUTE_PROTO_WITH_FUNC
_DIRECT: Final = Dispatch.DIRECT_ROLLOUT_METHOD
_new: Final = tuple.__new__
"""Makes a NamedTuple in half the time."""
_MARKERS: Final = frozenset[type]({Shard, Replicate, PerRank})
_SPLITTING: Final = frozenset[Any](
    {Dispatch.DP_COMPUTE_PROTO, Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, Dispatch.DP_COMPUTE_METRIC}
)


class Layout(NamedTuple):
    """Where a call goes."""

    ranks: tuple[int, ...]
    """Global ranks, in order; a *position* is an index in this."""
    single: bool
    """To one rank, which gets the arguments whole, and whose value is the result."""
    group: Any
    """Handed to the user's ``dispatch_fn`` and ``collect_fn``."""
    meshes: Mapping[str, MeshTable]
    """By the mesh's name, the table of the whole group."""


class Payload(NamedTuple):
    """What one rank gets, or several that get the same."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int | None
    """Rows of this shard without padding; None when nothing was split."""
    total_rows: int | None = None
    """Rows of all shards together, without padding."""


class Plan(NamedTuple):
    """What to send, and how to make the results one."""

    payloads: tuple[Payload, ...]
    index: tuple[int, ...] | None  # type: ignore[assignment]  # hides tuple.index, which is not used
    """By position, the number of its payload; None when all get the first."""
    collect: Collect
    """Takes the results by position, gives the call's. Raises DispatchError with ``results``."""

    @property
    def joined(self) -> tuple[int, ...] | None:
        """The ranks whose results are joined, in that order; None where they are not."""
        if not isinstance(self.collect, _Join):
            return None
        return tuple(self.collect.ranks[position] for position in self.collect.collectors)


class _Given(NamedTuple):
    """What becomes of one argument."""

    how: Literal["whole", "each", "parts"]
    """Whole to all, an item for each position, or split by rows."""
    value: Any
    """The value, the items by position, or the batch (later its shards by part)."""
    rows: int = 0
    """Of a batch."""


_Rule: TypeAlias = Callable[[Any, int], _Given]
"""What a mode makes of an argument without a marker, for so many ranks."""


class _Cutting(NamedTuple):
    """How the rows of a call are shared out. A *part* is what one dp rank gets."""

    bounds: tuple[tuple[int, int], ...]
    """By part; where a part is nothing but padding, this is the last row."""
    real: tuple[int, ...]
    """By part: its rows without padding."""
    padded: int | None
    """Rows of each part with padding; None without."""


def plan(
    method: Method,
    mode: Mode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout,
    uneven: Uneven,
) -> Plan:
    """Decide what each rank of a call gets. The arguments are not changed.

    Args:
        method: the method that is called.
        mode: its mode, after `resolve_mode`.
        args: positional arguments, with markers.
        kwargs: keyword arguments, with markers.
        layout: where the call goes.
        uneven: what to do with rows that don't divide by the ranks.

    Raises:
        DispatchError: the arguments can't be given out.
    """
    # Most calls end in this loop, so it is written out.
    if (
        mode is _ONE_TO_ALL
        or mode is _ALL_TO_ALL
        or (layout.single and mode is not _WITH_FUNC and mode is not _DIRECT)
    ):
        for value in args:
            if type(value) in _MARKERS:
                break
        else:
            for value in kwargs.values():
                if type(value) in _MARKERS:
                    break
            else:
                payload = _new(Payload, (args, kwargs, None, None))
                return _new(Plan, ((payload,), None, _only if layout.single else _as_they_are))
    return _plan(method, mode, args, kwargs, layout, uneven)


def _only(results: list[Any]) -> Any:
    return results[0]


def _as_they_are(results: list[Any]) -> list[Any]:
    return results


def _plan(
    method: Method,
    mode: Mode,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layout: Layout,
    uneven: Uneven,
) -> Plan:
    if mode is _DIRECT:
        raise DispatchError(
            f"{method.label} is registered with DIRECT_ROLLOUT_METHOD: workers call it on each "
            "other, the controller can't. Register it with another mode to call it from here"
        )
    function = _function_key(method, args, kwargs) if mode is _WITH_FUNC else None
    if layout.single:
        given = {key: _taken_whole(method, key, value) for key, value in _items(args, kwargs)}
        return Plan(*_assemble(given, (0,), None), _only)
    positions = tuple(range(len(layout.ranks)))
    part_of = collectors = positions
    if isinstance(mode, CustomMode):
        args, kwargs = _call_dispatch_fn(method, mode, args, kwargs, layout)
    elif isinstance(mode, MeshMode):
        part_of, collectors = _mesh_parts(method, mode, layout)
    rule = _rule_of(method, mode)
    given = {
        key: _classify(method, key, value, len(positions), _whole if key == function else rule)
        for key, value in _items(args, kwargs)
    }
    cutting = _cutting(method, given, len(collectors), uneven)
    given = {key: _cut(method, key, value, cutting) for key, value in given.items()}
    payloads, index = _assemble(given, part_of, cutting)
    return Plan(payloads, index, _collect_of(method, mode, layout, collectors, cutting))


def _items(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _parameters(method: Method) -> list[str]:
    """Return the names of the positional parameters, as far as they can be had."""
    try:
        found = list(inspect.signature(method.function).parameters.values())
    except (TypeError, ValueError):  # some builtins don't tell
        return []
    names = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _name(method: Method, key: Key) -> str:
    if isinstance(key, str):
        return f"argument {key!r}"
    names = _parameters(method)
    return f"argument {names[key]!r}" if key < len(names) else f"positional argument {key + 1}"


def _refusal(method: Method, key: Key, error: Exception) -> DispatchError:
    return DispatchError(f"{method.label}: {_name(method, key)}: {error}")


def _function_key(method: Method, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key:
    """Return where the function of a ``DP_COMPUTE_PROTO_WITH_FUNC`` call is, after a check."""
    key: Key = 0
    if not args:
        key = next(iter(_parameters(method)), 0)
        if key not in kwargs:
            raise DispatchError(f"{method.label}: the first argument must be what to call; pass it")
    value = args[0] if isinstance(key, int) else kwargs[key]
    functions = value.values if type(value) is PerRank else [value]
    for function in functions:
        function = function.value if type(function) in (Shard, Replicate) else function
        if not callable(function):
            raise DispatchError(
                f"{method.label}: {_name(method, key)} must be a function or another callable, "
                f"it is a {type(function).__name__}"
            )
    return key


def _taken_whole(method: Method, key: Key, value: Any) -> _Given:
    if type(value) is PerRank:
        raise DispatchError(
            f"{method.label}: {_name(method, key)}: the call goes to one rank, so there is "
            "nothing for PerRank to give out: pass that rank's value itself"
        )
    return _Given("whole", value.value if type(value) in (Shard, Replicate) else value)


def _call_dispatch_fn(
    method: Method, mode: CustomMode, args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        given = mode.dispatch_fn(layout.group, *args, **kwargs)
    except DispatchError as error:
        raise DispatchError(f"{method.label}: {error}") from error
    match given:
        case (list() | tuple() as new_args, dict() as new_kwargs):
            return tuple(new_args), new_kwargs
        case other:
            raise DispatchError(
                f"{method.label}: its dispatch_fn must return (args, kwargs), a tuple and a dict, "
                f"not a {type(other).__name__}"
            )


def _mesh_parts(
    method: Method, mode: MeshMode, layout: Layout
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dp rank of each position, and the collecting position of each dp rank."""
    table = layout.meshes.get(mode.mesh)
    try:
        if table is None:
            known = ", ".join(sorted(map(repr, layout.meshes))) or "none"
            raise DispatchError(
                f"no rank has registered the mesh {mode.mesh!r} (registered: {known}): call "
                f"self._register_dispatch_collect_info({mode.mesh!r}, dp_rank, is_collect) on each"
            )
        checked = check_mesh(mode.mesh, table, layout.ranks)
    except DispatchError as error:
        raise DispatchError(f"{method.label}: {error}") from None
    return checked.dp_of, checked.collectors


def _rule_of(method: Method, mode: Mode) -> _Rule:
    if isinstance(mode, MeshMode):
        return _batch_or_whole
    if isinstance(mode, CustomMode):
        return _listed
    if mode in _SPLITTING:
        return _batch_or_whole
    if mode is Dispatch.DP_COMPUTE:
        return _item_for_each
    if mode is _ONE_TO_ALL or mode is _ALL_TO_ALL:
        return _whole
    raise DispatchError(
        f"{method.label}: {mode!r} does not say what several ranks get: give it functions with "
        "register_dispatch_mode or update_dispatch_mode"
    )


def _whole(value: Any, _ranks: int) -> _Given:
    return _Given("whole", value)


def _batch_or_whole(value: Any, _ranks: int) -> _Given:
    rows = shards.batch_rows(value)
    return _Given("whole", value) if rows is None else _Given("parts", value, rows)


def _item_for_each(value: Any, ranks: int) -> _Given:
    if isinstance(value, list | tuple) and len(value) == ranks:
        return _Given("each", value)
    raise DispatchError(
        f"DP_COMPUTE needs a list or tuple with an item for each of {ranks} ranks, this is "
        f"{_described(value)}: say Replicate(x) to give all ranks the same"
    )


def _listed(value: Any, ranks: int) -> _Given:
    if isinstance(value, list) and len(value) == ranks:
        first = value[0]
        if type(first) in _MARKERS and all(item is first for item in value):
            return _marked(first, ranks)  # the function gave everybody what the caller had marked
        return _Given("each", value)
    if type(value) in _MARKERS:
        return _marked(value, ranks)
    raise DispatchError(
        f"dispatch_fn must make it a list with an item for each of {ranks} ranks, and returned "
        f"{_described(value)}: use [x] * {ranks} to give all ranks the same"
    )


def _described(value: Any) -> str:
    name = type(value).__name__
    return f"a {name} of {len(value)}" if isinstance(value, list | tuple) else f"a {name}"


def _marked(marker: Any, ranks: int) -> _Given:
    if isinstance(marker, Replicate):
        return _Given("whole", marker.value)
    if isinstance(marker, PerRank):
        if len(marker.values) != ranks:
            raise DispatchError(
                f"PerRank has {len(marker.values)} values and the call goes to {ranks} ranks: "
                "give it one for each"
            )
        return _Given("each", marker.values)
    rows = shards.rows(marker.value)
    if rows is None:
        raise DispatchError(
            f"Shard(x) needs something with rows, and a {type(marker.value).__name__} like this "
            "has none: pass a list, tensor, array or batch"
        )
    return _Given("parts", marker.value, rows)


def _classify(method: Method, key: Key, value: Any, ranks: int, rule: _Rule) -> _Given:
    try:
        return _marked(value, ranks) if type(value) in _MARKERS else rule(value, ranks)
    except DispatchError as error:
        raise _refusal(method, key, error) from error


def _cutting(
    method: Method, given: Mapping[Key, _Given], parts: int, uneven: Uneven
) -> _Cutting | None:
    """Share the rows out over the parts; None where there is no batch."""
    batches = {key: value for key, value in given.items() if value.how == "parts"}
    if not batches:
        return None
    counts = {batch.rows for batch in batches.values()}
    if len(counts) > 1:
        told = ", ".join(f"{_name(method, key)} has {b.rows}" for key, b in batches.items())
        raise DispatchError(
            f"{method.label}: all batches of a call must have the same number of rows; {told}. "
            "Say Replicate(x) for what is not to be split"
        )
    rows = counts.pop()
    if uneven == "pad" or any(shards.wants_padding(batch.value) for batch in batches.values()):
        return _padded_cutting(rows, parts)
    if uneven == "error" and (rows % parts or rows < parts):
        what = "fewer rows than ranks" if rows < parts else "not a multiple"
        raise DispatchError(
            f"{method.label}: {rows} rows can't be split evenly over {parts} ranks, they are "
            f'{what}. Pass a multiple, or say @register(..., uneven="allow") for shards that '
            'differ by one row, or uneven="pad" for copies of the last row; .options(uneven=...) '
            "says it for one call"
        )
    size, longer = divmod(rows, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    bounds = tuple(itertools.pairwise(starts))
    return _Cutting(bounds, tuple(stop - start for start, stop in bounds), None)


def _padded_cutting(rows: int, parts: int) -> _Cutting:
    size = -(-rows // parts)
    real = tuple(max(0, min(size, rows - part * size)) for part in range(parts))
    bounds = tuple(
        (part * size, part * size + count) if count or not rows else (rows - 1, rows)
        for part, count in enumerate(real)
    )
    return _Cutting(bounds, real, size)


def _cut(method: Method, key: Key, given: _Given, cutting: _Cutting | None) -> _Given:
    if given.how != "parts" or cutting is None:
        return given
    try:
        return given._replace(value=_pieces(given.value, cutting))
    except Exception as error:  # a type's own code may raise anything
        raise _refusal(method, key, error) from error


def _pieces(value: Any, cutting: _Cutting) -> list[Any]:
    pieces = shards.cut(value, cutting.bounds)
    if cutting.padded is None:
        return pieces
    # The shards are padded and not the whole, which would copy all of it.
    missing = [cutting.padded - (stop - start) for start, stop in cutting.bounds]
    return [
        shards.pad(piece, count) if count else piece
        for piece, count in zip(pieces, missing, strict=True)
    ]


def _assemble(
    given: Mapping[Key, _Given], part_of: tuple[int, ...], cutting: _Cutting | None
) -> tuple[tuple[Payload, ...], tuple[int, ...] | None]:
    """Make one payload for each set of positions that get the same objects."""
    positional = [value for key, value in given.items() if isinstance(key, int)]
    named = {key: value for key, value in given.items() if isinstance(key, str)}
    each = [value.value for value in given.values() if value.how == "each"]
    total = sum(cutting.real) if cutting else None
    numbers: dict[tuple[int, ...], int] = {}
    payloads: list[Payload] = []
    index: list[int] = []
    for position, part in enumerate(part_of):
        same = (part if cutting else 0, *(id(items[position]) for items in each))
        number = numbers.setdefault(same, len(payloads))
        if number == len(payloads):
            args = tuple([_item(value, position, part) for value in positional])
            kwargs = {key: _item(value, position, part) for key, value in named.items()}
            payloads.append(Payload(args, kwargs, cutting.real[part] if cutting else None, total))
        index.append(number)
    return tuple(payloads), tuple(index) if len(payloads) > 1 else None


def _item(given: _Given, position: int, part: int) -> Any:
    if given.how == "whole":
        return given.value
    return given.value[position if given.how == "each" else part]


def _collect_of(
    method: Method,
    mode: Mode,
    layout: Layout,
    collectors: tuple[int, ...],
    cutting: _Cutting | None,
) -> Collect:
    if isinstance(mode, CustomMode):
        if mode.collect_fn is not collect_dp_compute_data_proto:
            return functools.partial(mode.collect_fn, layout.group)
        # Which rows are padding is known here and not to the function.
        return _Join(method.label, layout.ranks, collectors, cutting)
    if isinstance(mode, MeshMode) or mode is Dispatch.DP_COMPUTE_PROTO or mode is _WITH_FUNC:
        return _Join(method.label, layout.ranks, collectors, cutting)
    return _as_they_are


@dataclass(frozen=True, slots=True)
class _Join:
    """Cut the padding off the collected results, and join them."""

    label: str
    ranks: tuple[int, ...]
    collectors: tuple[int, ...]
    """By part: the position whose result counts."""
    cutting: _Cutting | None

    def __call__(self, results: list[Any]) -> Any:
        ranks = [self.ranks[position] for position in self.collectors]
        try:
            return shards.join(self._unpadded(results), ranks)
        except Exception as error:  # of a type's own code too: what the methods returned is kept
            raise DispatchError(
                f"{self.label}: the methods have run, but their results can't be joined: {error}. "
                "What they returned is in .results of this error",
                list(results),
            ) from error

    def _unpadded(self, results: list[Any]) -> list[Any]:
        collected = [results[position] for position in self.collectors]
        if self.cutting is None or self.cutting.padded is None:
            return collected
        size = self.cutting.padded
        return [
            shards.unpad(result, size, real)
            for result, real in zip(collected, self.cutting.real, strict=True)
        ]
