"""What a group's class can be asked for, and what each role of a colocated class can."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from asyncwg._job import CallOptions, Job, Target, nearest
from asyncwg._modes import Mode, resolve_mode
from asyncwg._wire.frames import NO_METHOD, UNNUMBERED, Kind
from asyncwg.decorator import (
    ROLES,
    Address,
    Dispatch,
    Method,
    MethodOptions,
    kind_of,
    methods_of,
    unregistered_hint,
)
from asyncwg.errors import UsageError


class Catalog:
    """The methods of one class, and how a call names each of them.

    Args:
        cls: the class.
        role: which of the objects that share a process it is of; None for the worker itself.
        unnumbered: stands for the number of a method that has none.
    """

    def __init__(self, cls: type, role: str | None, unnumbered: int) -> None:
        self.cls: Final = cls
        self.role: Final = role
        self.unnumbered: Final = unnumbered
        self.methods: Final[dict[str, Method]] = {
            proxy: self._own(method) for proxy, method in methods_of(cls).items()
        }
        """By the name of the proxy; so are the two below."""
        self.modes: Final[dict[str, Mode]] = {
            proxy: resolve_mode(method.options.mode) for proxy, method in self.methods.items()
        }
        self.numbers: Final[dict[str, int]] = {}

    def _own(self, method: Method) -> Method:
        if self.role is None:
            return method
        return method._replace(role=self.role, label=f"{self.role}.{method.label}")

    @property
    def has_async(self) -> bool:
        """Whether any method, registered or not, is for the async lane."""
        return any(
            kind_of(member) in ("async def", "async generator")
            for name in dir(self.cls)
            if callable(member := inspect.getattr_static(self.cls, name, None))
        )

    def no_method(self, name: str) -> str:
        """Say why ``name`` is no proxy, and what may have been meant."""
        return unregistered_hint(self.cls, name, self.methods)

    def _adhoc(self, name: str, label: str, function: Callable[..., Any]) -> Method:
        """Return the record of a method that is not registered."""
        return self._own(Method(name, label, MethodOptions(), kind_of(function), function))

    def job_for(
        self,
        target: Target,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
    ) -> Job:
        """Return the call of a method that may not be registered.

        Raises:
            AttributeError: the class has no such method.
        """
        cls = self.cls
        function = getattr(cls, name, None)
        if not callable(function):
            raise AttributeError(  # noqa: TRY004  # what a misspelt name raises everywhere
                f"{cls.__name__} has no method {name!r}{nearest(name, dir(cls))}"
            )
        method = self._adhoc(name, f"{cls.__name__}.{name}", function)
        return Job(target, method, Dispatch.ALL_TO_ALL, self.unnumbered, args, kwargs, options)

    def job_of(
        self,
        target: Target,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: CallOptions,
    ) -> Job:
        """Return the call of a function that gets the object; ``args`` come after it."""
        name = getattr(function, "__name__", "function")
        method = self._adhoc(name, f"run({name})", function)
        return Job(
            target, method, Dispatch.ALL_TO_ALL, self.unnumbered, (function, *args), kwargs, options,
            Kind.RUN,
        )  # fmt: skip


def roles_of(cls: type) -> Mapping[str, Any]:
    """Return the ``ClassWithInitArgs`` of each role of a colocated class; of another, nothing."""
    roles: Mapping[str, Any] = getattr(cls, ROLES, {})
    return roles


def catalogs_of(cls: type) -> tuple[dict[str | None, Catalog], list[Method]]:
    """Return the catalogs of a class, by role (its own under None, last), and its methods by number."""
    catalogs: dict[str | None, Catalog] = {
        role: Catalog(built.cls, role, NO_METHOD - place)
        for place, (role, built) in enumerate(roles_of(cls).items(), start=1)
    }
    catalogs[None] = Catalog(cls, None, NO_METHOD)
    numbered: list[Method] = []
    seen: dict[Address, int] = {}
    for catalog in catalogs.values():
        for proxy, method in catalog.methods.items():
            if method.address not in seen:
                seen[method.address] = len(numbered)
                numbered.append(method)
            catalog.numbers[proxy] = seen[method.address]
    if len(catalogs) > NO_METHOD - UNNUMBERED + 1 or len(numbered) > UNNUMBERED:
        raise UsageError(
            f"{cls.__name__} has {len(catalogs) - 1} roles and {len(numbered)} methods in all: there "
            f"can be no more than {NO_METHOD - UNNUMBERED} and {UNNUMBERED}"
        )
    return catalogs, numbered
