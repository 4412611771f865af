"""The objects of a worker's process that serve calls: the worker itself, and the roles it has built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeAlias

from asyncwg.errors import UsageError

Objects: TypeAlias = Mapping[str | None, Any]
"""By role, in the order in which they were built; the worker itself, under None, is last."""


def objects_of(worker: Any, roles: Sequence[str]) -> Objects:
    """Return the objects of a process.

    Raises:
        UsageError: the worker is of a colocated class and has not built its roles.
    """
    built: Mapping[str, Any] = getattr(worker, "fused_worker_dict", {}) if roles else {}
    missing = [role for role in roles if role not in built]
    if missing:
        raise UsageError(
            f"{type(worker).__name__} has not built its roles {missing}: its __init__ must call "
            "super().__init__()"
        )
    return {**{role: built[role] for role in roles}, None: worker}


def hooks_of(objects: Objects, name: str) -> list[tuple[str | None, Callable[[], Any]]]:
    """Return the method ``name`` (``setup`` or ``close``) of each object that has one.

    What was built last is closed first.
    """
    found = [
        (role, hook)
        for role, each in objects.items()
        if callable(hook := getattr(each, name, None))
    ]
    return found[::-1] if name == "close" else found


@contextlib.contextmanager
def blaming(role: str | None, what: str) -> Generator[None, None, None]:
    """Note on an error of the block whose it is."""
    try:
        yield
    except BaseException as error:
        if role is not None:
            error.add_note(f"in {what} of role {role!r}")
        raise


def raise_together(errors: Sequence[BaseException]) -> None:
    """Raise what the hooks of several objects raised: nothing, the one error, or all as a group."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup("close() failed in several roles", errors)
