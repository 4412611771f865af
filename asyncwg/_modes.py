"""``Dispatch``, ``Execute`` and the other forms of a dispatch mode; modes of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from asyncwg import _predefined
from asyncwg.errors import UsageError

DispatchFn = Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
"""``(group, *args, **kwargs) -> (args, kwargs)``, each value a list with one item per rank, or a marker."""

CollectFn = Callable[[Any, list[Any]], Any]
"""``(group, outputs) -> result``; ``outputs`` has one item per rank."""


class _DynamicEnum(type):
    """Metaclass of enums that users may extend while the program runs, as verl's are."""

    _members: dict[str, Any]

    def __iter__(cls) -> Iterator[Any]:
        return iter(cls._members.values())

    def __contains__(cls, item: object) -> bool:
        return item in cls._members or item in cls._members.values()

    def __getitem__(cls, name: str) -> Any:
        return cls._members[name]

    def __len__(cls) -> int:
        return len(cls._members)


class _Member:
    """One member: ``name`` and ``value``; equal only to itself, also after pickling."""

    _members: ClassVar[dict[str, Any]]

    def __init__(self, name: str, value: int) -> None:
        self.name = name
        self.value = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        # A member that was registered while the program ran does not exist in the process that
        # unpickles it, so its functions travel along.
        return _restore_member, (type(self), self.name, self.value, _functions.get(self))

    @classmethod
    def names(cls) -> list[str]:
        """Names of all members."""
        return list(cls._members)

    @classmethod
    def values(cls) -> list[int]:
        """Numbers of all members."""
        return [member.value for member in cls._members.values()]

    @classmethod
    def from_name(cls, name: str) -> Any:
        """Return the member called ``name`` in any case, or None."""
        return cls._members.get(name.upper())

    @classmethod
    def register(cls, name: str) -> Any:
        """Add a member called ``name``, upper-cased; `ValueError` if there is one."""
        name = name.upper()
        if name in cls._members:
            raise ValueError(f"{cls.__name__}.{name} exists already")
        member = cls(name, max(cls.values(), default=-1) + 1)
        cls._members[name] = member
        setattr(cls, name, member)
        return member

    @classmethod
    def remove(cls, name: str) -> Any:
        """Take the member called ``name`` out and return it."""
        member = cls._members.pop(name.upper())
        delattr(cls, member.name)
        _functions.pop(member, None)
        return member


class Dispatch(_Member, metaclass=_DynamicEnum):
    """How the arguments of a call are given out and its results put together."""

    _members: ClassVar[dict[str, Any]] = {}
    RANK_ZERO: ClassVar[WholeMode]
    """To the first rank only; its value is the result."""
    ONE_TO_ALL: ClassVar[ByRankMode]
    """The same arguments to every rank, pickled once; a list by rank."""
    ALL_TO_ALL: ClassVar[ByRankMode]
    """The arguments as they are to every rank, `PerRank` gives each its own; a list by rank."""
    DP_COMPUTE: ClassVar[ItemsMode]
    """Every argument has one item per rank; a list by rank."""
    DP_COMPUTE_PROTO: ClassVar[WholeMode]
    """Batches are split over the ranks, the rest is replicated; results are joined."""
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[WholeMode]
    """As ``DP_COMPUTE_PROTO``, and the first argument is a callable for every rank."""
    DP_COMPUTE_METRIC: ClassVar[ByRankMode]
    """Split as ``DP_COMPUTE_PROTO``; a list by rank."""
    DIRECT_ROLLOUT_METHOD: ClassVar[ForbiddenMode]
    """Not to be called from the controller."""


class Execute(_Member, metaclass=_DynamicEnum):
    """Which ranks run a call."""

    _members: ClassVar[dict[str, Any]] = {}
    ALL: ClassVar[EveryRank]
    """Every rank."""
    RANK_ZERO: ClassVar[OneRank]
    """The first rank of the group or view."""
    ANY: ClassVar[OneRank]
    """One rank, the one with the least to do."""


if TYPE_CHECKING:  # the members apart, for the overloads of `register`; at run time all are alike

    class ByRankMode(Dispatch): ...

    class WholeMode(Dispatch): ...

    class ItemsMode(Dispatch): ...

    class ForbiddenMode(Dispatch): ...

    class EveryRank(Execute): ...

    class OneRank(Execute): ...


_functions: dict[Any, tuple[DispatchFn, CollectFn]] = {}
"""The functions of the modes that users registered or replaced."""

for _name in (
    "RANK_ZERO",
    "ONE_TO_ALL",
    "ALL_TO_ALL",
    "DP_COMPUTE",
    "DP_COMPUTE_PROTO",
    "DP_COMPUTE_PROTO_WITH_FUNC",
    "DP_COMPUTE_METRIC",
    "DIRECT_ROLLOUT_METHOD",
):
    Dispatch.register(_name)
for _name in ("ALL", "RANK_ZERO", "ANY"):
    Execute.register(_name)
PREDEFINED_EXECUTE: Final = tuple(Execute)
"""What `register` takes: a member that is added later has a name and no meaning."""


def _restore_member(
    cls: type[_Member], name: str, value: int, functions: tuple[DispatchFn, CollectFn] | None
) -> Any:
    member = cls.from_name(name)
    if member is None:
        member = cls.register(name)
        member.value = value
    if functions is not None:
        _functions.setdefault(member, functions)
    return member


@dataclass(frozen=True, slots=True)
class MeshMode:
    """Dispatch over the data-parallel ranks of a mesh that the workers registered."""

    mesh: str


@dataclass(frozen=True, slots=True)
class CustomMode:
    """The user's own pair of functions."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


Mode = Dispatch | MeshMode | CustomMode


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> MeshMode:
    """Return the mode that splits batches over the dp ranks of the mesh ``mesh_name``.

    Ranks with the same dp rank get the same shard. The results of the collecting ranks are
    joined in dp order.
    """
    return MeshMode(mesh_name)


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> Dispatch:
    """Add ``Dispatch.<NAME>`` with functions of your own and return it.

    Args:
        dispatch_mode_name: upper-cased; `ValueError` if it exists.
        dispatch_fn: ``(group, *args, **kwargs) -> (args, kwargs)``; each value must be a list
            with one item per rank, or a marker: `Shard`, `Replicate`, `PerRank`.
        collect_fn: ``(group, outputs) -> result``, with one output per rank.
    """
    member: Dispatch = Dispatch.register(dispatch_mode_name)
    _functions[member] = (dispatch_fn, collect_fn)
    return member


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> None:
    """Replace the functions of a mode in this process; groups built before keep theirs."""
    if dispatch_mode not in Dispatch:
        raise UsageError(f"{dispatch_mode!r} is not a dispatch mode; use register_dispatch_mode")
    _functions[dispatch_mode] = (dispatch_fn, collect_fn)


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable[..., Any]]:
    """Return ``dispatch_fn`` and ``collect_fn`` of a mode, to build a mode of your own on.

    Not in ``__all__``; here for those who know it from verl, as the functions themselves are
    (``dispatch_one_to_all``, ``collect_all_to_all``, ``dispatch_dp_compute_data_proto`` and others).

    Raises:
        UsageError: it has none: it is no matter of giving out and collecting.
    """
    pair = _functions.get(dispatch_mode) or _predefined.PAIRS.get(
        getattr(dispatch_mode, "name", "")
    )
    if pair is None:
        have = [member.name for member in Dispatch if member in _functions]
        raise UsageError(
            f"{dispatch_mode!r} has no dispatch_fn and collect_fn; there are those of "
            f"{', '.join([*_predefined.PAIRS, *have])}"
        )
    return {"dispatch_fn": pair[0], "collect_fn": pair[1]}


def as_mode(mode: object) -> Mode:
    """Check a dispatch mode as users write it."""
    if isinstance(mode, MeshMode | CustomMode):
        return mode
    if isinstance(mode, Dispatch):
        return mode
    if isinstance(mode, Mapping):
        missing = {"dispatch_fn", "collect_fn"} - set(mode)
        if missing:
            raise UsageError(f"a dispatch mode given as a dict needs {sorted(missing)} too")
        for key in ("dispatch_fn", "collect_fn"):
            if not callable(mode[key]):
                raise UsageError(f"{key!r} of the dispatch mode is not callable: {mode[key]!r}")
        return CustomMode(mode["dispatch_fn"], mode["collect_fn"])
    raise UsageError(
        f"dispatch_mode must be a Dispatch, a mesh mode or a dict with dispatch_fn and collect_fn, "
        f"not {mode!r}"
    )


def resolve_mode(mode: Mode) -> Mode:
    """Give a registered or replaced `Dispatch` member the functions it has now."""
    if isinstance(mode, Dispatch) and mode in _functions:
        return CustomMode(*_functions[mode])
    return mode
