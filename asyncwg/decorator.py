"""How a worker's method says what a call of it means: ``@register``, ``Dispatch``, ``Execute``.

A registered method carries its options in one attribute and is otherwise untouched: calling it
directly, on the object, runs the plain function. The controller reads the options from the class
(`methods_of`) and gives the group one proxy per method.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Unpack,
    overload,
)

from asyncwg._markers import PerRank, Replicate, Shard
from asyncwg._modes import (
    PREDEFINED_EXECUTE,
    Dispatch,
    Execute,
    MeshMode,
    Mode,
    as_mode,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from asyncwg._modes import get_predefined_dispatch_fn as get_predefined_dispatch_fn
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

if TYPE_CHECKING:
    from asyncwg._modes import (
        ByRankMode,
        EveryRank,
        ForbiddenMode,
        ItemsMode,
        OneRank,
        WholeMode,
    )

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

REGISTERED: Final = "_asyncwg_method"
"""Attribute of a registered function that holds its `MethodOptions`."""

ROLES: Final = "_asyncwg_roles"
"""Attribute of a colocated class that holds what is built in each of its processes, by role."""


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


@overload
def register(  # pyright: ignore[reportOverlappingOverload]  # this one, without `blocking`
    dispatch_mode: WholeMode | MeshMode,
    execute_mode: Execute = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Whole: ...
@overload
def register(
    dispatch_mode: WholeMode | MeshMode,
    execute_mode: Execute = ...,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> WholeLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: ByRankMode = ...,
    execute_mode: EveryRank = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ByRank: ...
@overload
def register(
    dispatch_mode: ByRankMode = ...,
    execute_mode: EveryRank = ...,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ByRankLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: ItemsMode,
    execute_mode: EveryRank = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Items: ...
@overload
def register(
    dispatch_mode: ItemsMode,
    execute_mode: EveryRank = ...,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> ItemsLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: ByRankMode | ItemsMode = ...,
    *,
    execute_mode: OneRank,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Whole: ...
@overload
def register(
    dispatch_mode: ByRankMode | ItemsMode = ...,
    *,
    execute_mode: OneRank,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> WholeLater: ...
@overload
def register(  # pyright: ignore[reportOverlappingOverload]
    dispatch_mode: ByRankMode | ItemsMode,
    execute_mode: OneRank,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> Whole: ...
@overload
def register(
    dispatch_mode: ByRankMode | ItemsMode,
    execute_mode: OneRank,
    blocking: Literal[False] = ...,
    materialize_futures: bool = ...,
    **options: Unpack[RegisterOptions],
) -> WholeLater: ...
@overload
def register(
    dispatch_mode: ForbiddenMode,
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
    if execute_mode not in PREDEFINED_EXECUTE:
        raise UsageError(
            f"{execute_mode!r} does not say which ranks run a call: take one of "
            f"{', '.join(map(repr, PREDEFINED_EXECUTE))}, and call the method on a view for other ranks"
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
