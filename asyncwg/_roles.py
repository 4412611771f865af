"""The groups of the roles of a colocated class: ``spawn`` and ``fuse``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Self

from asyncwg._catalog import Catalog
from asyncwg._core import Core
from asyncwg._job import Target
from asyncwg._surface import Proxy, Surface
from asyncwg.errors import UsageError


class Roles(Surface):
    """What a `WorkerGroup` is beside its processes: the roles that they have, if they have several."""

    _taken: ClassVar[frozenset[str]] = frozenset()
    """Names that no role can have as an attribute."""
    _parent: Self | None = None
    """Of the group of one role: the group of all."""

    def __init__(self, core: Core, target: Target, catalog: Catalog) -> None:
        super().__init__(core, target, catalog)
        self._fused: set[str] = set()
        self._proxies_of_roles: dict[tuple[str | None, str], Proxy] = {}

    def spawn(self, prefix_set: Iterable[str] | None = None) -> dict[str, Self]:
        """Return a group for each role of a colocated class, by role; all over the same processes.

        Such a group has the proxies of its role's methods, and meshes of its own. What concerns the processes
        is the same for all: ``shutdown``, ``restart`` and ``save`` of one are those of all, and the
        processes live as long as any of the groups does.

        Args:
            prefix_set: the roles; None for all.

        Raises:
            UsageError: there is no such role.
        """
        return {role: self._of_role(role) for role in self._roles(prefix_set)}

    def fuse(self, prefix_set: Iterable[str] | None = None) -> None:
        """Put the groups that `spawn` returns on this one: ``wg.actor``, ``wg.critic``.

        Args:
            prefix_set: the roles; None for all.

        Raises:
            UsageError: there is no such role, or its name can't be an attribute here. Nothing is changed.
        """
        roles = self._roles(prefix_set)
        for role in roles:
            taken = (
                role in self._taken or hasattr(type(self), role) or role in self._catalog.methods
            )
            if taken or not role.isidentifier():
                raise UsageError(
                    f"role {role!r} can't be an attribute of {self!r}: "
                    f"{'it has one of that name' if taken else 'that is no name'}. Use "
                    f"spawn([{role!r}])[{role!r}], or call the role something else"
                )
        self._fused.update(roles)

    def _roles(self, chosen: Iterable[str] | None) -> list[str]:
        known = [role for role in self._core.catalogs if role is not None]
        if self._catalog.role is not None or not known:
            raise UsageError(
                f"{self!r} has no roles: spawn and fuse are for the group of a class that "
                "create_colocated_worker_cls has made"
            )
        if isinstance(chosen, str):
            raise UsageError(f"roles are given as a set or list of names, not as {chosen!r}")
        roles = known if chosen is None else list(chosen)
        for role in roles:
            if role not in known:
                raise UsageError(f"{self!r} has no role {role!r}; it has {known}")
        return roles

    def _of_role(self, role: str) -> Self:
        # Not kept here: it keeps this group, and a circle of both would outlive their user.
        cls = type(self)
        group = cls.__new__(cls)
        Roles.__init__(group, self._core, self._target, self._core.catalogs[role])
        group._parent = self  # noqa: SLF001  # one of us
        return group

    def _proxy(self, name: str) -> Proxy:
        parent = self._parent
        if parent is None:
            return super()._proxy(name)
        # Kept there, for a group that `fuse` has put there is made anew each time it is looked up.
        known = parent._proxies_of_roles  # noqa: SLF001  # one of us
        key = self._catalog.role, name
        if key not in known:
            known[key] = super()._proxy(name)
        return known[key]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_fused", ()):
            return self._of_role(name)
        core = self.__dict__.get("_core")
        if core is not None and self._parent is None and name in core.catalogs:
            raise AttributeError(
                f"{name!r} is a role of {self!r}: say fuse([{name!r}]) first, or use "
                f"spawn([{name!r}])[{name!r}]"
            )
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__dict__.get("_fused", ())})
