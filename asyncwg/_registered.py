"""What type checkers are told about a registered method.

At run time ``@register`` returns the function it was given. Type checkers are told that it returns
a `Registered`, which says three things at once:

- called on an object, it is the method as it was written: ``self.step(batch)``;
- looked up on the class, it is what ``group.call(Trainer.step, batch)`` takes: the arguments of
  the call, and what a call gives on one rank and on several, by the dispatch mode;
- by its class, whether a group of `asyncwg.blocking` waits for it.

This is the one place where types say something that is not so. Nothing here is used at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    final,
    overload,
)

if TYPE_CHECKING:
    from asyncwg.blocking import Handle

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
L = TypeVar("L")
T_co = TypeVar("T_co", covariant=True)
# Each of these is a type of function: only so are they covariant in its arguments, as overrides want it.
Local_co = TypeVar("Local_co", covariant=True)
OnRank_co = TypeVar("OnRank_co", covariant=True)
OnGroup_co = TypeVar("OnGroup_co", covariant=True)


class LocalMethod(Generic[Local_co]):
    """A method as it is on the object itself, and nothing else.

    ``Local_co`` is its type there, without ``self``.
    """

    __name__: str
    __qualname__: str

    @overload
    def __get__(self, instance: None, owner: type, /) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None, /) -> Local_co: ...
    def __get__(self, instance: object, owner: type | None = None, /) -> Any:
        """Stand for the function that is there at run time."""
        raise NotImplementedError

    def __call__(
        self: LocalMethod[Callable[P, T]], worker: Any, /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Stand for ``Trainer.step(worker, batch)``."""
        raise NotImplementedError


class Registered(LocalMethod[Local_co], Generic[Local_co, OnRank_co, OnGroup_co]):
    """A method that the controller may call.

    ``OnRank_co`` and ``OnGroup_co`` are functions from the arguments of a call to what it gives on one
    rank and on a group.
    """

    @property
    def _on_rank(self) -> OnRank_co:
        raise NotImplementedError

    @property
    def _on_group(self) -> OnGroup_co:
        raise NotImplementedError

    @property
    def _blocking_on_rank(self: Registered[Any, Callable[P, T], Any]) -> Callable[P, T]:
        raise NotImplementedError

    @property
    def _blocking_on_group(self: Registered[Any, Any, Callable[P, T]]) -> Callable[P, T]:
        raise NotImplementedError


class RegisteredLater(Registered[Local_co, OnRank_co, OnGroup_co]):
    """The same with ``blocking=False``: a blocking group gives a handle."""

    @property
    def _blocking_on_rank(  # type: ignore[override]  # that is the difference
        self: RegisteredLater[Any, Callable[P, T], Any],
    ) -> Callable[P, Handle[T]]:
        raise NotImplementedError

    @property
    def _blocking_on_group(  # type: ignore[override]
        self: RegisteredLater[Any, Any, Callable[P, T]],
    ) -> Callable[P, Handle[T]]:
        raise NotImplementedError


# What ``call`` takes. A `Registered` fits by its structure: so mypy knows the method's arguments before it
# looks at those of the call. Asked for by its class, it would find them from the call's.


class OnGroup(Protocol[Q, T_co]):
    """A method whose calls to a group give ``T_co``."""

    @property
    def _on_group(self) -> Callable[Q, T_co]: ...


class OnRank(Protocol[Q, T_co]):
    """A method whose calls to one rank give ``T_co``."""

    @property
    def _on_rank(self) -> Callable[Q, T_co]: ...


class BlockingOnGroup(Protocol[Q, T_co]):
    """A method whose calls to a blocking group give ``T_co``."""

    @property
    def _blocking_on_group(self) -> Callable[Q, T_co]: ...


class BlockingOnRank(Protocol[Q, T_co]):
    """A method whose calls to one rank of a blocking group give ``T_co``."""

    @property
    def _blocking_on_rank(self) -> Callable[Q, T_co]: ...


@final
class Whatever:
    """What no function is said to return, unless it returns Any: by it overloads tell that apart."""


class Own:
    """Decorator of a method whose calls take and give what functions of the user's make of it.

    The other decorators are subclasses so that the overloads of ``register`` don't contradict its
    last, which takes all that the others do.
    """

    def __call__(
        self, function: Callable[Concatenate[Any, P], T], /
    ) -> Registered[Callable[P, T], Callable[..., Any], Callable[..., Any]]:
        """Stand for the decorator."""
        raise NotImplementedError


class Forbidden(Own):
    """Decorator of a method that the controller can't call."""

    def __call__(  # type: ignore[override]  # it is not `Registered`: that is the point
        self, function: Callable[Concatenate[Any, P], T], /
    ) -> LocalMethod[Callable[P, T]]:
        """Stand for the decorator."""
        raise NotImplementedError


# One class for each way in which a result follows from what one rank gives. The overloads are for methods
# that return Any, ``async def`` methods, and all others. There is none for "any function": mypy would take it
# for as good as the others wherever a type has Any in it, and forget all it knows of the method. So it
# refuses methods with ``**options`` that have no ``/`` after ``self``, as an option could be called "self".

Co = Coroutine[Any, Any, T]
Method = Callable[Concatenate[Any, P], T]
Listed = Registered[Callable[P, L], Callable[P, T], Callable[P, list[T]]]
ListedLater = RegisteredLater[Callable[P, L], Callable[P, T], Callable[P, list[T]]]
Joined = Registered[Callable[P, L], Callable[P, T], Callable[P, T]]
JoinedLater = RegisteredLater[Callable[P, L], Callable[P, T], Callable[P, T]]
ByItem = Registered[Callable[P, L], Callable[..., T], Callable[..., list[T]]]
ByItemLater = RegisteredLater[Callable[P, L], Callable[..., T], Callable[..., list[T]]]


class ByRank(Own):
    """Decorator of a method whose calls give a list by rank."""

    @overload
    def __call__(self, function: Method[P, Whatever], /) -> Listed[P, Any, Any]: ...
    @overload
    def __call__(self, function: Method[P, Co[T]], /) -> Listed[P, Co[T], T]: ...
    @overload
    def __call__(self, function: Method[P, T], /) -> Listed[P, T, T]: ...
    def __call__(self, function: Any, /) -> Any:
        """Stand for the decorator."""
        raise NotImplementedError


class Whole(Own):
    """Decorator of a method whose calls give one value: of one rank, or joined of all."""

    @overload
    def __call__(self, function: Method[P, Whatever], /) -> Joined[P, Any, Any]: ...
    @overload
    def __call__(self, function: Method[P, Co[T]], /) -> Joined[P, Co[T], T]: ...
    @overload
    def __call__(self, function: Method[P, T], /) -> Joined[P, T, T]: ...
    def __call__(self, function: Any, /) -> Any:
        """Stand for the decorator."""
        raise NotImplementedError


class Items(Own):
    """Decorator of a method whose calls take a list for each argument, with one item per rank.

    What an item is can't be told from the type of the list, so the arguments are not checked.
    """

    @overload
    def __call__(self, function: Method[P, Whatever], /) -> ByItem[P, Any, Any]: ...
    @overload
    def __call__(self, function: Method[P, Co[T]], /) -> ByItem[P, Co[T], T]: ...
    @overload
    def __call__(self, function: Method[P, T], /) -> ByItem[P, T, T]: ...
    def __call__(self, function: Any, /) -> Any:
        """Stand for the decorator."""
        raise NotImplementedError


class ByRankLater(Own):
    """`ByRank` with ``blocking=False``."""

    @overload
    def __call__(self, function: Method[P, Whatever], /) -> ListedLater[P, Any, Any]: ...
    @overload
    def __call__(self, function: Method[P, Co[T]], /) -> ListedLater[P, Co[T], T]: ...
    @overload
    def __call__(self, function: Method[P, T], /) -> ListedLater[P, T, T]: ...
    def __call__(self, function: Any, /) -> Any:
        """Stand for the decorator."""
        raise NotImplementedError


class WholeLater(Own):
    """`Whole` with ``blocking=False``."""

    @overload
    def __call__(self, function: Method[P, Whatever], /) -> JoinedLater[P, Any, Any]: ...
    @overload
    def __call__(self, function: Method[P, Co[T]], /) -> JoinedLater[P, Co[T], T]: ...
    @overload
    def __call__(self, function: Method[P, T], /) -> JoinedLater[P, T, T]: ...
    def __call__(self, function: Any, /) -> Any:
        """Stand for the decorator."""
        raise NotImplementedError


class ItemsLater(Own):
    """`Items` with ``blocking=False``."""

    @overload
    def __call__(self, function: Method[P, Whatever], /) -> ByItemLater[P, Any, Any]: ...
    @overload
    def __call__(self, function: Method[P, Co[T]], /) -> ByItemLater[P, Co[T], T]: ...
    @overload
    def __call__(self, function: Method[P, T], /) -> ByItemLater[P, T, T]: ...
    def __call__(self, function: Any, /) -> Any:
        """Stand for the decorator."""
        raise NotImplementedError


class RegisterOptions(TypedDict, total=False):
    """The options of ``register`` that say nothing about types."""

    uneven: Literal["error", "allow", "pad"]
    timeout: float | None
    max_concurrency: int | None
    idempotent: bool
    to_device: bool
    name: str | None
