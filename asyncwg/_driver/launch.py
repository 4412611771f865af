"""What a generation of a group is made from: its records, its class as bytes, how to start it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncwg import distributed
from asyncwg._driver.arena import arena
from asyncwg._driver.guardian import Guardian
from asyncwg._driver.output import Output
from asyncwg._wire import codec, failures
from asyncwg._wire.launch import SESSION_VARIABLE, BootRecord, Init
from asyncwg.decorator import Address
from asyncwg.errors import UsageError


@dataclass(frozen=True, slots=True)
class Spec:
    """What the user asked for, checked. The same for every generation."""

    name: str
    """The group's."""
    cls: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    roles: Mapping[str, Any]
    """The ``ClassWithInitArgs`` of each role of a colocated class; empty for another."""
    addresses: Sequence[Address]
    """Of the registered methods, by number."""
    limits: Mapping[int, int]
    """How many calls of an ``async def`` method may run at once, by its number."""
    to_device: Sequence[int]
    """Numbers of the methods whose tensors are placed on the rank's device."""
    has_async: bool
    local_ranks: Sequence[int]
    local_world_sizes: Sequence[int]
    worker_env: Mapping[str, str]
    start_method: str | None
    preload: Sequence[str] | None
    output: str | os.PathLike[str]
    error_grace: float
    executor: str
    """``"process"`` or ``"inline"``."""
    arena_limit: int | None
    arena_timeout: float


class Launch(NamedTuple):
    """What a generation is made from."""

    name: str
    """The group's, for messages."""
    session: str
    """Unique; the mark of its processes."""
    records: Sequence[BootRecord]
    output: Output
    init: codec.Encoded
    """An `Init`."""
    has_async: bool
    fresh: bool
    """Whether each rank is a fresh interpreter instead of a fork of the guardian."""
    preload: Sequence[str]
    preload_explicit: bool
    error_grace: float
    arena_limit: int
    """Bytes of blocks beyond which arguments wait."""
    arena_timeout: float
    label: str
    """Name of the worker's class."""


def plan_launch(
    spec: Spec,
    session: str,
    devices: Sequence[str | None],
    port: int,
    guardian: Guardian,
    init: codec.Encoded,
) -> Launch:
    """Write down what each rank is told.

    Args:
        spec: what the user asked for.
        session: unique; the mark of the generation's processes.
        devices: by rank, from the pool.
        port: the store's.
        guardian: whose environment is frozen.
        init: from `encode_init`.
    """
    base = dict(os.environ)
    size = len(spec.local_ranks)
    threads = distributed.threads_per_rank(base, spec.worker_env, size)
    preload = spec.preload
    if preload is None:
        preload = ["torch", *(["tensordict"] if "tensordict" in sys.modules else [])]
    fresh = spec.start_method == "spawn" or (
        spec.start_method is None
        and distributed.needs_fresh_interpreter(base, guardian.environment, spec.worker_env)
    )
    records = [
        BootRecord(
            env=distributed.rank_environment(
                base,
                group=spec.name,
                session=(SESSION_VARIABLE, session),
                rank=rank,
                world_size=size,
                local_rank=local_rank,
                local_world_size=local_size,
                port=port,
                device=device,
                threads=threads,
                worker_env=spec.worker_env,
            ),
            sys_path=list(sys.path),
            argv=list(sys.argv),
            cwd=os.getcwd(),
            group=spec.name,
            rank=rank,
            world_size=size,
            local_rank=local_rank,
            local_world_size=local_size,
            threads=threads,
            preload=list(preload),
            arena_size=arena().size,
        )
        for rank, (local_rank, local_size, device) in enumerate(
            zip(spec.local_ranks, spec.local_world_sizes, devices, strict=True)
        )
    ]
    return Launch(
        name=spec.name,
        session=session,
        records=records,
        output=Output(spec.output, spec.name, size),
        init=init,
        has_async=spec.has_async,
        fresh=fresh,
        preload=preload,
        preload_explicit=spec.preload is not None,
        error_grace=spec.error_grace,
        arena_limit=arena().size // 2 if spec.arena_limit is None else spec.arena_limit,
        arena_timeout=spec.arena_timeout,
        label=spec.cls.__name__,
    )


def encode_init(spec: Spec) -> codec.Encoded:
    """Turn what each rank builds into bytes, once for all.

    Raises:
        UsageError: it can't be pickled; the message names the part.
    """
    try:
        return codec.encode(
            Init(
                spec.cls,
                spec.args,
                dict(spec.kwargs),
                list(spec.roles),
                list(spec.addresses),
                dict(spec.limits),
                list(spec.to_device),
            )
        )
    except Exception as error:
        for value, name in (*_parts_of_roles(spec), *_parts_of_class(spec)):
            try:
                codec.encode(value)
            except Exception:  # noqa: BLE001  # this is the one we look for
                culprit = codec.explain_failure(value, name)
                raise UsageError(
                    f"{spec.cls.__name__} can't be sent to the workers: {culprit} "
                    f"can't be pickled: {failures.text_of(error)}"
                ) from error
        raise


def _parts_of_class(spec: Spec) -> list[tuple[Any, str]]:
    return [
        (spec.cls, f"class {spec.cls.__qualname__}"),
        (spec.args, "the positional arguments of its __init__"),
        (spec.kwargs, "the keyword arguments of its __init__"),
    ]


def _parts_of_roles(spec: Spec) -> list[tuple[Any, str]]:
    parts: list[tuple[Any, str]] = []
    for role, built in spec.roles.items():
        parts += [
            (built.cls, f"class {built.cls.__qualname__} of role {role!r}"),
            (built.args, f"the positional arguments of role {role!r}"),
            (built.kwargs, f"the keyword arguments of role {role!r}"),
        ]
    return parts
