"""One call that some rank has not answered yet, and how its failures are told together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from asyncwg._driver.arena import Block
from asyncwg._wire.frames import Buffer
from asyncwg.errors import WorkerGroupError


class Outcome(Protocol):
    """Who is told how a call ended."""

    def settle(self, results: list[Any] | None, error: Exception | None) -> None:
        """Take ``(results by position, None)`` or ``(None, error)``."""
        ...


class Feed(Protocol):
    """Who reads the items of generators."""

    def put(self, rank: int, item: Any, /) -> None:
        """Take an item of a rank."""
        ...

    def count(self, rank: int, /) -> int:
        """Return how many items of a rank have come."""
        ...


class Region(NamedTuple):
    """A place in the arena for the results of several ranks, side by side."""

    block: Block
    sizes: Sequence[int]
    """Of the buffers of each rank's result, when they are alike."""


class Relay(Protocol):
    """Another program, whose call this is: it gets the answers as they come."""

    def forward(self, rank: int, kind: int, flags: int, n_buffers: int, body: Buffer) -> None:
        """Pass a RESULT, ERROR or EXPIRED on."""
        ...


class Pending:
    """One call that some rank has not answered yet."""

    # What most calls never need stands on the class: making a call costs less so.
    errors: dict[int, Exception] | None = None
    """By rank, the first to fail first."""
    votes: dict[int, bool] | None = None
    timer: asyncio.TimerHandle | None = None
    watch: Callable[[], None] | None = None
    """Called whenever a rank has answered."""
    joins: Sequence[int] = ()
    """The ranks whose results will be joined, in that order."""
    returned: frozenset[int] = frozenset()
    """The ranks whose method has returned, while their answer is written beside the next call."""
    region: Region | None = None
    """Where they are to stand side by side."""
    references: Sequence[Block] = ()
    """Blocks that were sent as they are: what is shared."""
    unsent: Callable[[], None] | None = None
    """Takes back what no rank has a byte of yet."""
    hung: bool = False
    """Whether it was reported to hang."""
    expire: Callable[[], None] | None = None
    """Ends the call because its deadline has passed."""
    cleanup: Callable[[], None] | None = None
    """Called when the call is over."""
    feed: Feed | None = None
    """Of a generator method: takes its items."""
    begun: int = 0
    """How many items some rank has begun, as far as is known."""
    verdict: Callable[[bool], None] | None = None
    """Of a share of a call of several groups: takes whether no rank has started it, instead of `Calls`."""
    relay: Relay | None = None
    """Whose call it is, where it is another program's: its results are not decoded here."""

    def __init__(
        self,
        call_id: int,
        label: str,
        ranks: Sequence[int],
        lane: int,
        outcome: Outcome,
        single: bool,
        on_error: str,
    ) -> None:
        self.call_id = call_id
        self.label = label
        self.ranks = ranks
        self.lane = lane
        self.outcome: Outcome | None = outcome
        self.single = single
        self.on_error = on_error
        self.left = len(ranks)
        self.results: dict[int, Any] = {}

    def owes(self, rank: int) -> bool:
        """Whether ``rank`` still has to answer."""
        return (
            rank in self.ranks
            and rank not in self.results
            and (self.errors is None or rank not in self.errors)
        )

    @property
    def silent(self) -> list[int]:
        """The ranks that have not answered."""
        return [rank for rank in self.ranks if self.owes(rank)]

    def landed(self) -> list[tuple[int, Any]]:
        """Return rank and value, or exception, of those that have answered."""
        return [*self.results.items(), *(self.errors or {}).items()]

    def take(self) -> Outcome | None:
        """Return who is to be told, once."""
        outcome, self.outcome = self.outcome, None
        self.expire = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.cleanup is not None:
            cleanup, self.cleanup = self.cleanup, None
            cleanup()
        return outcome

    def combined(self) -> Exception:
        """Make one exception of what the ranks raised."""
        errors = list((self.errors or {}).values())
        if self.single:
            return errors[0]
        fold_equal(errors)
        ranks = ", ".join(str(getattr(error, "rank", "?")) for error in errors)
        return WorkerGroupError(
            f"{self.label} failed on {len(errors)} of {len(self.ranks)} ranks (rank {ranks})",
            errors,
        )


def fold_equal(errors: Sequence[Exception]) -> None:
    """Tell equal tracebacks once: on the first rank that has one, with the ranks that have the same."""
    first: dict[Any, Exception] = {}
    others: dict[int, list[int]] = {}
    for error in errors:
        notes = getattr(error, "__notes__", [])
        if not notes or not notes[-1].startswith("Raised in "):
            continue
        where, _, told = notes[-1].partition("\n")
        twin = first.setdefault((type(error), told), error)
        if twin is not error:
            others.setdefault(id(twin), []).append(getattr(error, "rank", -1))
            notes[-1] = (
                f"{where.removesuffix(':')}: the same as on rank {getattr(twin, 'rank', '?')}"
            )
    for twin in first.values():
        ranks = others.get(id(twin))
        if ranks:
            twin.add_note(f"rank{'s' if len(ranks) > 1 else ''} {_spans(ranks)}: the same")


def _spans(numbers: Sequence[int]) -> str:
    """Return ``"1-3, 5"`` for 1, 2, 3, 5."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] + 1 == number:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
