"""How a worker's method says what a call of it means: ``@register``, ``Dispatch``, ``Execute``.

A registered method carries its options in one attribute and is otherwise untouched: calling it
directly, on the object, runs the plain function. The controller reads the options from the class
(`methods_of`) and gives the group one proxy per method.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Unpack,
    overload,
)

from asyncwg import _predefined
from asyncwg._markers import PerRank, Replicate, Shard
from asyncwg._predefined import collect_all_to_all as collect_all_to_all
from asyncwg._predefined import collect_dp_compute as collect_dp_compute
from asyncwg._predefined import collect_dp_compute_data_proto as collect_dp_compute_data_proto
from asyncwg._predefined import dispatch_all_to_all as dispatch_all_to_all
from asyncwg._predefined import dispatch_dp_compute as dispatch_dp_compute
from asyncwg._predefined import dispatch_dp_compute_data_proto as dispatch_dp_compute_data_proto
from asyncwg._predefined import (
    dispatch_dp_compute_data_proto_with_func as dispatch_dp_compute_data_proto_with_func,
)
from asyncwg._predefined import dispatch_one_to_all as dispatch_one_to_all
from asyncwg._registered import (
    ByRank,
    ByRankLater,
    Forbidden,
    Items,
    ItemsLater,
    Own,
    RegisterOptions,
    Whole,
    WholeLater,
)
from asyncwg.errors import UsageError

__all__ = [
    "Dispatch",
    "Execute",
    "PerRank",
    "Replicate",
    "Shard",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]

F = TypeVar("F", bound=Callable[..., Any])

Uneven = Literal["error", "allow", "pad"]
"""What to do with rows that don't divide by the ranks; see `register`."""

DispatchFn = Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
"""``(group, *args, **kwargs) -> (args, kwargs)``, each value a list with one item per rank, or a marker."""

CollectFn = Callable[[Any, list[Any]], Any]
"""``(group, outputs) -> result``; ``outputs`` has one item per rank."""

REGISTERED: Final = "_asyncwg_method"
"""Attribute of a registered function that holds its `MethodOptions`."""

ROLES: Final = "_asyncwg_roles"
"""Attribute of a colocated class that holds what is built in each of its processes, by role."""


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
    RANK_ZERO: ClassVar[_WholeMode]
    """To the first rank only; its value is the result."""
    ONE_TO_ALL: ClassVar[_ByRankMode]
    """The same arguments to every rank, pickled once; a list by rank."""
    ALL_TO_ALL: ClassVar[_ByRankMode]
    """The arguments as they are to every rank, `PerRank` gives each its own; a list by rank."""
    DP_COMPUTE: ClassVar[_ItemsMode]
    """Every argument has one item per rank; a list by rank."""
    DP_COMPUTE_PROTO: ClassVar[_WholeMode]
    """Batches are split over the ranks, the rest is replicated; results are joined."""
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[_WholeMode]
    """As ``DP_COMPUTE_PROTO``, and the first argument is a callable for every rank."""
    DP_COMPUTE_METRIC: ClassVar[_ByRankMode]
    """Split as ``DP_COMPUTE_PROTO``; a list by rank."""
    DIRECT_ROLLOUT_METHOD: ClassVar[_ForbiddenMode]
    """Not to be called from the controller."""


class Execute(_Member, metaclass=_DynamicEnum):
    """Which ranks run a call."""

    _members: ClassVar[dict[str, Any]] = {}
    ALL: ClassVar[_EveryRank]
    """Every rank."""
    RANK_ZERO: ClassVar[_OneRank]
    """The first rank of the group or view."""
    ANY: ClassVar[_OneRank]
    """One rank, the one with the least to do."""


if TYPE_CHECKING:  # the members apart, for the overloads of `register`; at run time all are alike

    class _ByRankMode(Dispatch): ...

    class _WholeMode(Dispatch): ...

    class _ItemsMode(Dispatch): ...

    class _ForbiddenMode(Dispatch): ...

    class _EveryRank(Execute): ...

    class _OneRank(Execute): ...


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
_EXECUTE: Final = tuple(Execute)
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


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """What ``@register`` was given."""

    mode: Mode = Dispatch.ALL_TO_ALL
    execute: Execute = Execute.ALL
    blocking: bool = True
    materialize_futures: bool = True
    uneven: Uneven = "error"
    timeout: float | None = None
    max_concurrency: int | None = None
    idempotent: bool = False
    to_device: bool = False
    name: str | None = None


Kind = Literal["def", "async def", "generator", "async generator"]


class Address(NamedTuple):
    """Where a rank finds a method: two names, because one string could mean several pairs."""

    role: str | None
    """None for the worker itself."""
    name: str
    """Attribute on the class."""


class Method(NamedTuple):
    """A method of a worker class as the controller sees it."""

    name: str
    """Attribute on the class."""
    label: str
    """``Class.method``, or ``role.Class.method``, for messages."""
    options: MethodOptions
    kind: Kind
    function: Callable[..., Any]
    role: str | None = None
    """Which of the objects that share a process has it; None for the worker itself."""

    @property
    def address(self) -> Address:
        """Where a rank finds it."""
        return Address(self.role, self.name)

    @property
    def is_async(self) -> bool:
        """Whether it runs on the worker's event loop."""
        return self.kind in ("async def", "async generator")

    @property
    def is_stream(self) -> bool:
        """Whether it gives items one by one."""
        return self.kind in ("generator", "async generator")


def kind_of(function: Callable[..., Any]) -> Kind:
    """Tell which of the four kinds of method ``function`` is, through wrappers and partials."""
    if inspect.isasyncgenfunction(function):
        return "async generator"
    if inspect.iscoroutinefunction(function):
        return "async def"
    if inspect.isgeneratorfunction(function):
        return "generator"
    return "def"


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


@overload
def register(  # pyright: ignore[reportOverlappingOverload]  # this one, without `blocking`
    dispatch_mode: _WholeMode | MeshMode,
    execute_mode: Execute = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Whole: ...
@overload
def register(
    dispatch_mode: _WholeMode | MeshMode,
    execute_mode: Execute = ...,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> WholeLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: _ByRankMode = ...,
    execute_mode: _EveryRank = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ByRank: ...
@overload
def register(
    dispatch_mode: _ByRankMode = ...,
    execute_mode: _EveryRank = ...,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ByRankLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: _ItemsMode,
    execute_mode: _EveryRank = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Items: ...
@overload
def register(
    dispatch_mode: _ItemsMode,
    execute_mode: _EveryRank = ...,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ItemsLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: _ByRankMode | _ItemsMode = ...,
    *,
    execute_mode: _OneRank,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Whole: ...
@overload
def register(
    dispatch_mode: _ByRankMode | _ItemsMode = ...,
    *,
    execute_mode: _OneRank,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> WholeLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: _ByRankMode | _ItemsMode,
    execute_mode: _OneRank,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Whole: ...
@overload
def register(
    dispatch_mode: _ByRankMode | _ItemsMode,
    execute_mode: _OneRank,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> WholeLater: ...
@overload
def register(
    dispatch_mode: _ForbiddenMode,
    execute_mode: Execute = ...,
    blocking: bool = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Forbidden: ...
@overload
def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] = ...,
    execute_mode: Execute = ...,
    blocking: bool = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Own: ...
def register(
    dispatch_mode: Dispatch | MeshMode | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    uneven: Uneven = "error",
    timeout: float | None = None,
    max_concurrency: int | None = None,
    idempotent: bool = False,
    to_device: bool = False,
    name: str | None = None,
) -> Any:
    """Make a method callable from the controller. The function itself is not wrapped.

    Args:
        dispatch_mode: how arguments are given out and results put together.
        execute_mode: which ranks run it.
        blocking: used by `asyncwg.blocking` only: whether the plain call waits for the value.
        materialize_futures: whether a `Call` given as an argument arrives as its value; if not, the
            method gets a handle in its place and reads the value with ``handle.get()``, or ``await
            handle``, if it wants it. A mode that splits gives each rank the handle of its shard. The
            call waits for the value either way.
        uneven: rows that don't divide by the ranks: ``"error"``; ``"allow"``: sizes differ by at
            most one, shards may be empty; ``"pad"``: copies of the last row are added at the end
            and the result is cut again.
        timeout: seconds until a call fails with `CallTimeoutError`; None for no limit.
        max_concurrency: how many calls of an ``async def`` method a rank runs at once.
        idempotent: whether the call may be repeated after a restart.
        to_device: place tensors on the worker's device on arrival.
        name: name of the proxy on the group, where the method's own is taken.
    """
    if not isinstance(execute_mode, Execute):
        raise UsageError(f"execute_mode must be an Execute, not {execute_mode!r}")
    if execute_mode not in _EXECUTE:
        raise UsageError(
            f"{execute_mode!r} does not say which ranks run a call: take one of "
            f"{', '.join(map(repr, _EXECUTE))}, and call the method on a view for other ranks"
        )
    if uneven not in ("error", "allow", "pad"):
        raise UsageError(f"uneven must be 'error', 'allow' or 'pad', not {uneven!r}")
    if timeout is not None and timeout <= 0:
        raise UsageError(f"timeout must be more than 0 seconds, not {timeout!r}")
    if max_concurrency is not None and max_concurrency < 1:
        raise UsageError(f"max_concurrency must be at least 1, not {max_concurrency!r}")
    options = MethodOptions(
        mode=as_mode(dispatch_mode),
        execute=execute_mode,
        blocking=blocking,
        materialize_futures=materialize_futures,
        uneven=uneven,
        timeout=timeout,
        max_concurrency=max_concurrency,
        idempotent=idempotent,
        to_device=to_device,
        name=name,
    )

    def mark(function: F) -> F:
        if not callable(function):
            raise UsageError(
                f"@register goes on a plain method, below @staticmethod or @property: {function!r}"
            )
        kind = kind_of(function)
        if max_concurrency is not None and kind not in ("async def", "async generator"):
            raise UsageError(
                f"max_concurrency is for async def methods; {function.__qualname__} is not one: "
                "def methods always run one at a time"
            )
        if idempotent and kind in ("generator", "async generator"):
            raise UsageError(
                f"{function.__qualname__} is a generator and can't be idempotent: after a restart its "
                "reader would get items twice"
            )
        setattr(function, REGISTERED, options)
        return function

    return mark


def methods_of(cls: type) -> dict[str, Method]:
    """Return the registered methods of ``cls`` by the name of their proxy.

    An override counts only when it is decorated itself, as in verl.
    """
    found: dict[str, Method] = {}
    for attribute in dir(cls):
        function = inspect.getattr_static(cls, attribute, None)
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        options = getattr(function, REGISTERED, None)
        if function is None or not isinstance(options, MethodOptions):
            continue
        label = f"{cls.__name__}.{attribute}"
        proxy = options.name or attribute
        if proxy in found:
            raise UsageError(f"{label} and {found[proxy].label} both want the name {proxy!r}")
        found[proxy] = Method(attribute, label, options, kind_of(function), function)
    return found


def unregistered_hint(cls: type, name: str, known: Iterable[str]) -> str:
    """Say why ``name`` is no proxy of a group of ``cls``, and what the reader may have meant."""
    candidate = getattr(cls, name, None)
    if callable(candidate):
        inherited = any(
            hasattr(vars(base).get(name), REGISTERED)
            for base in cls.__mro__[1:]
            if name in vars(base)
        )
        if inherited:
            return (
                f"{cls.__name__}.{name} overrides a registered method and is not registered itself: "
                "decorate the override with @register too"
            )
        return (
            f"{cls.__name__}.{name} is not registered: decorate it with @register, "
            f"or call it with execute_all({name!r}, ...)"
        )
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{cls.__name__} has no registered method {name!r}{hint}"
