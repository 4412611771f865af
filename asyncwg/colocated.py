"""Several roles in one process per rank: ``create_colocated_worker_cls``.

::

    both = create_colocated_worker_cls(
        {"actor": ClassWithInitArgs(Actor, lr=1e-6), "critic": ClassWithInitArgs(Critic)}
    )
    async with WorkerGroup(pool, both) as wg:
        roles = wg.spawn({"actor", "critic"})
        await roles["actor"].update(batch)

Each role is an object of its own class, as it would be in a group of its own: with its own
``__init__``, ``setup()``, ``close()``, ``save_state()`` and ``load_state()``, and meshes of its own. A call
names its method by two words, the role and the method, so no names can run into each other. ``def``
methods of all roles run one at a time, in the order of the calls, as those of one object do.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

from asyncwg._worker.parts import blaming
from asyncwg.decorator import ROLES
from asyncwg.errors import UsageError
from asyncwg.worker import Worker
from asyncwg.worker_group import ClassWithInitArgs

__all__ = [
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
]

_HOOKS: Final = frozenset({"setup", "close", "save_state", "load_state"})
_PLACE: Final = ("rank", "world_size", "local_rank", "local_world_size")


class _Colocated(Worker):
    """Builds the roles of its class, and keeps them: ``self.actor``, or ``self.fused_worker_dict``."""

    def __init__(self) -> None:
        super().__init__()
        built: dict[str, Any] = {}
        self.fused_worker_dict = built
        for role, what in getattr(self, ROLES).items():
            with blaming(role, "__init__"):
                built[role] = _build(what, built)

    def __getattr__(self, name: str) -> Any:
        built = self.__dict__.get("fused_worker_dict", {})
        if name in built:
            return built[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _build(what: ClassWithInitArgs[Any], siblings: Mapping[str, Any]) -> Any:
    """Build a role that can find its siblings from the first line of its ``__init__``."""
    cls = what.cls
    if type(cls).__call__ != type.__call__:  # a metaclass that has its own way to build
        made = what()
        _introduce(made, siblings)
        return made
    made = cls.__new__(cls, *what.args, **what.kwargs)
    if isinstance(made, cls):
        _introduce(made, siblings)
        made.__init__(*what.args, **what.kwargs)
    return made


def _introduce(made: Any, siblings: Mapping[str, Any]) -> None:
    try:
        made.fused_worker_dict = siblings
    except AttributeError:
        pass  # a class with slots, say, that does not ask for them
    if isinstance(made, Worker):
        # Looked up now: an inline rank has its place while its object is being built, and not for ever.
        for name in _PLACE:
            if inspect.getattr_static(type(made), name) is vars(Worker)[name]:
                getattr(made, name)


def create_colocated_worker_raw_cls(class_dict: Mapping[str, ClassWithInitArgs[Any]]) -> type[Any]:
    """Return the class whose objects build all roles in one process, to be subclassed.

    A subclass may have registered methods of its own, which find the roles as ``self.actor`` or in
    ``self.fused_worker_dict``; if it has an ``__init__``, that calls ``super().__init__()``. A group of it is
    made with ``ClassWithInitArgs(Subclass)``.

    Args:
        class_dict: what to build, by role; built in this order. It is not changed, and what is done to it
            later does not matter.

    Raises:
        UsageError: a name can't be a role's, or what is under it is no `ClassWithInitArgs`.
    """
    if not isinstance(class_dict, Mapping) or not class_dict:
        raise UsageError(
            "colocated roles are given as a dict with a ClassWithInitArgs for each, not as "
            f"{class_dict!r}"
        )
    for role, what in class_dict.items():
        _check_role(role, what)
    roles = {
        role: ClassWithInitArgs(what.cls, *what.args, **what.kwargs)
        for role, what in class_dict.items()
    }
    name = "Colocated_" + "_".join(re.sub(r"\W", "_", role) for role in roles)
    namespace = {
        ROLES: roles,
        "__module__": __name__,
        "__doc__": f"The roles {', '.join(roles)} in one process.",
    }
    return type(name, (_Colocated,), namespace)


def create_colocated_worker_cls(
    class_dict: Mapping[str, ClassWithInitArgs[Any]],
) -> ClassWithInitArgs[Any]:
    """Return what a group builds to have all roles in one process per rank.

    ``wg.spawn({"actor", "critic"})`` of that group gives a group for each role, ``wg.fuse(...)`` puts them
    on it as ``wg.actor``. Roles find each other with ``self.fused_worker_dict``, in the order in which they
    are built; ``init_process_group`` of the second role that calls it does nothing: a process joins once.

    Args:
        class_dict: what to build, by role; as for `create_colocated_worker_raw_cls`.

    Raises:
        UsageError: a name can't be a role's, or what is under it is no `ClassWithInitArgs`.
    """
    fused = ClassWithInitArgs(create_colocated_worker_raw_cls(class_dict))
    fused.fused_worker_used = True
    return fused


create_colocated_worker_cls_fused = create_colocated_worker_cls
"""verl has two ways to put roles into one process; here they are one."""


def _check_role(role: object, what: object) -> None:
    if not isinstance(role, str) or not role:
        raise UsageError(f"a role's name is a text, not {role!r}")
    if role in _HOOKS or hasattr(_Colocated, role):
        raise UsageError(
            f"role {role!r} has a name that every worker has already: call it something else"
        )
    if not isinstance(what, ClassWithInitArgs):
        raise UsageError(
            f"role {role!r} is a {type(what).__name__}: write ClassWithInitArgs(Class, ...)"
        )
    if hasattr(what.cls, ROLES):
        raise UsageError(
            f"role {role!r} is a colocated class itself: put its roles here, beside the others"
        )
