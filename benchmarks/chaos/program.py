"""A program of operations, made from a seed and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.chaos.values import OTHERS, ROWS, Value

SIZES: Final = (1, 2, 3, 7, 64, 600, 5_000, 17_000, 60_000, 300_000, 1_000_000)
"""Rows of 4 bytes: on both sides of what goes in band, through the pipe, and is copied in a thread."""
WEIGHTS: Final = (4, 4, 4, 4, 6, 6, 4, 4, 3, 2, 1)

METHODS: Final = {
    "echo": 14, "own": 6, "scale": 14, "metric": 6, "each": 6, "first": 4, "whichever": 6, "give": 6,
    "keep": 5, "nap": 5, "fail": 5, "until_told": 2, "echo_async": 10, "nap_async": 5, "give_async": 4,
    "fail_async": 3, "forever_async": 3, "tell": 5, "tell_async": 4,
}  # fmt: skip
"""What is called, and how often."""
ENDLESS: Final = frozenset({"until_told", "forever_async"})
"""Methods that run until their caller has gone."""
STREAMS: Final = frozenset({"tell", "tell_async"})
"""Generators."""


@dataclass(frozen=True, slots=True)
class CallOp:
    """Call a method, in one of many ways."""

    slot: int
    method: str
    view: tuple[int, int] | int | None
    """A slice of ranks, one rank, or all."""
    value: Value
    number: int
    """A factor, what makes a result different from others, or how many items a generator gives."""
    seconds: float
    failing: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    uses: str = "value"
    """``"value"``, or ``"call"`` and ``"result"``: what an earlier call gives is the argument."""
    per_rank: bool = False
    cancel: tuple[str, float] | None = None
    """``("turns", n)`` or ``("seconds", s)`` after the call."""
    wait_by: str = "callback"
    spoil: bool = False
    """Write to the argument as soon as the call is made."""
    read: int | None = None
    """Leave the loop over a generator after so many items; None for its end."""
    keep: bool = False
    """Keep the result, and look at it again later."""


@dataclass(frozen=True, slots=True)
class KillOp:
    """End a rank's process in one of several ways."""

    slot: int
    rank: int
    how: str


@dataclass(frozen=True, slots=True)
class GroupOp:
    """Do something to a whole group."""

    slot: int
    what: str
    """``"drain"``, ``"restart"``, ``"replace"``, ``"drop"``, ``"stacks"`` or ``"health"``."""
    size: int = 0
    """Ranks of the group that takes its place."""
    grace: float = 5.0


Op = CallOp | KillOp | GroupOp


def sizes_of(seed: int, slots: int) -> list[int]:
    """Return the numbers of ranks to begin with."""
    chance = random.Random(f"sizes {seed}")
    return [chance.choice((1, 2, 2, 3)) for _ in range(slots)]


def program(seed: int, operations: int, slots: int) -> Iterator[Op]:
    """Yield so many operations on groups in so many slots."""
    chance = random.Random(f"program {seed}")
    sizes = sizes_of(seed, slots)
    for _ in range(operations):
        slot = chance.randrange(slots)
        draw = chance.random()
        if draw < 0.955:
            yield _call(chance, slot, sizes[slot])
        elif draw < 0.965:
            how = chance.choices(
                ("kill", "stop", "leave", "term", "garble", "guardian"), (8, 4, 4, 4, 4, 1)
            )[0]
            yield KillOp(slot, chance.randrange(sizes[slot]), how)
        elif draw < 0.985:
            yield GroupOp(slot, "drain")
        elif draw < 0.988:
            yield GroupOp(slot, "restart", grace=chance.choice((5.0, 0.2, 0.0)))
        elif draw < 0.991:
            sizes[slot] = chance.choice((1, 2, 2, 3))
            what = chance.choice(("replace", "replace", "drop"))
            yield GroupOp(slot, what, sizes[slot], chance.choice((5.0, 0.2, 0.0)))
        else:
            yield GroupOp(slot, chance.choice(("stacks", "health", "look", "look", "forget")))


def _call(chance: random.Random, slot: int, size: int) -> CallOp:
    method = chance.choices(list(METHODS), list(METHODS.values()))[0]
    view: tuple[int, int] | int | None = None
    if chance.random() < 0.3:
        start = chance.randrange(size)
        view = start if chance.random() < 0.5 else (start, chance.randint(start + 1, size))
    if method == "each" and isinstance(view, int):
        view = None
    ranks = ranks_of(view, size)
    rows = method in ("scale", "metric")
    kind = chance.choice(ROWS if rows or chance.random() < 0.6 else OTHERS)
    length = chance.choices(SIZES, WEIGHTS)[0]
    options: dict[str, Any] = {}
    if rows:
        options["uneven"] = chance.choice(("error", "allow", "pad"))
        if options["uneven"] == "error" or isinstance(view, int):
            length = max(1, min(length, 999 if kind == "list" else length) // len(ranks))
            length *= len(ranks)
    value = Value(kind, length, chance.randrange(1, 100))
    if chance.random() < 0.1 or (method in ENDLESS and chance.random() < 0.5):
        options["timeout"] = chance.choice((0.001, 0.01, 0.05, 0.2, 30.0))
        if method in ENDLESS:
            options["timeout"] = min(options["timeout"], 0.2)
    if chance.random() < 0.1:
        options["on_error"] = "wait"
    if chance.random() < 0.05:
        options["copy"] = "now"
    cancel: tuple[str, float] | None = None
    if chance.random() < 0.12 or (method in ENDLESS and "timeout" not in options):
        cancel = chance.choice(
            (("turns", 0), ("turns", 1), ("turns", 3), ("seconds", 0.002), ("seconds", 0.02))
        )
    read: int | None = None
    if method in STREAMS:
        read = chance.choice((None, None, None, 1, 2, 5, 10))
    failing = tuple(rank for rank in ranks if chance.random() < 0.5) or (chance.choice(ranks),)
    wait_by = chance.choices(
        ("callback", "await", "gather", "task", "results", "as_completed", "wait_for"),
        (12, 3, 1, 1, 1, 1, 1),
    )[0]
    if method in STREAMS:
        # Those that give all they have, and those of which one rank fails.
        failing = chance.choice(((), (), failing[:1]))
        wait_by = "await" if wait_by == "await" else "callback"
    return CallOp(
        slot=slot,
        method=method,
        view=view,
        value=value,
        number=chance.randrange(2, 9),
        seconds=chance.choice((0.0, 0.001, 0.005, 0.02, 0.02, 0.3))
        if chance.random() < 0.5
        else 0.0,
        failing=failing,
        options=options,
        uses=chance.choice(("call", "result")) if not rows and chance.random() < 0.15 else "value",
        per_rank=method in ("own", "keep") and chance.random() < 0.3 and not isinstance(view, int),
        cancel=cancel,
        wait_by=wait_by,
        read=read,
        spoil=chance.random() < 0.15,
        keep=chance.random() < 0.1,
    )


def ranks_of(view: tuple[int, int] | int | None, size: int) -> tuple[int, ...]:
    """Return the ranks that a view stands for."""
    if view is None:
        return tuple(range(size))
    return (view,) if isinstance(view, int) else tuple(range(*view))
