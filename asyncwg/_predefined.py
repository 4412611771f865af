"""The predefined modes as functions, for modes of the user's own that are built on them.

A mode is a pair: ``dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`` and ``collect_fn(group,
outputs) -> result``. What these dispatch functions return is markers or lists with an item for
each rank, so padding and uneven rows come out as in the modes themselves. Names are verl's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from asyncwg import shards
from asyncwg._markers import PerRank, Replicate, Shard
from asyncwg.errors import DispatchError

Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]

_MARKERS: Final = (Shard, Replicate, PerRank)


def _each(rule: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Apply ``rule`` to all arguments that the caller has not marked."""

    def given(value: Any) -> Any:
        return value if isinstance(value, _MARKERS) else rule(value)

    return tuple(map(given, args)), {name: given(value) for name, value in kwargs.items()}


def dispatch_one_to_all(_group: Any, *args: Any, **kwargs: Any) -> Given:
    """Give every rank the arguments as they are."""
    return _each(Replicate, args, kwargs)


def dispatch_all_to_all(group: Any, *args: Any, **kwargs: Any) -> Given:
    """Give every rank the arguments as they are; `PerRank` gives each its own."""
    return dispatch_one_to_all(group, *args, **kwargs)


def collect_all_to_all(_group: Any, outputs: list[Any]) -> list[Any]:
    """Return the list by rank."""
    return outputs


def dispatch_dp_compute(group: Any, *args: Any, **kwargs: Any) -> Given:
    """Give rank i item i of every argument.

    Raises:
        DispatchError: an argument is no list or tuple with one item for each rank.
    """
    ranks: int = group.world_size

    def items(value: Any) -> list[Any]:
        if isinstance(value, list | tuple) and len(value) == ranks:
            return list(value)
        raise DispatchError(
            f"dispatch_dp_compute needs lists or tuples with an item for each of {ranks} ranks, "
            f"not a {type(value).__name__}: say Replicate(x) to give all ranks the same"
        )

    return _each(items, args, kwargs)


def collect_dp_compute(_group: Any, outputs: list[Any]) -> list[Any]:
    """Return the list by rank."""
    return outputs


def dispatch_dp_compute_data_proto(_group: Any, *args: Any, **kwargs: Any) -> Given:
    """Split the batches over the ranks and give the rest to all.

    Raises:
        DispatchError: an argument could be meant either way.
    """

    def by_type(value: Any) -> Any:
        return Replicate(value) if shards.batch_rows(value) is None else Shard(value)

    return _each(by_type, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(
    group: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Given:
    """Give every rank the function, and split the batches.

    Raises:
        DispatchError: the first argument can't be called, or another could be meant either way.
    """
    if not isinstance(function, _MARKERS) and not callable(function):
        raise DispatchError(
            f"the first argument must be what to call, it is a {type(function).__name__}"
        )
    whole, _ = dispatch_one_to_all(group, function)
    rest, named = dispatch_dp_compute_data_proto(group, *args, **kwargs)
    return whole + rest, named


def collect_dp_compute_data_proto(_group: Any, outputs: list[Any]) -> Any:
    """Return the results joined by rows, in the order of the ranks.

    As the ``collect_fn`` of a mode it leaves out the rows of padding too. A function that calls it
    gets what the methods returned, padding included.

    Raises:
        DispatchError: they can't be joined.
    """
    return shards.join(outputs)


PAIRS: Final[dict[str, tuple[Callable[..., Given], Callable[[Any, list[Any]], Any]]]] = {
    "ONE_TO_ALL": (dispatch_one_to_all, collect_all_to_all),
    "ALL_TO_ALL": (dispatch_all_to_all, collect_all_to_all),
    "DP_COMPUTE": (dispatch_dp_compute, collect_dp_compute),
    "DP_COMPUTE_PROTO": (dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    "DP_COMPUTE_PROTO_WITH_FUNC": (
        dispatch_dp_compute_data_proto_with_func,
        collect_dp_compute_data_proto,
    ),
    "DP_COMPUTE_METRIC": (dispatch_dp_compute_data_proto, collect_dp_compute),
}
"""By the mode's name. The others are no pair: who runs a call, or where its ranks stand, is theirs."""
