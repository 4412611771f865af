"""What may come back: the outcomes that each call may have, and the order in which ranks may run calls.

Pure: records in, complaints out. A complaint is a sentence; none is the good case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from asyncwg import (
    CallTimeoutError,
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    UsageError,
    WorkerDiedError,
    WorkerGroupError,
)

DEATH_BOUND: Final = 5.0
"""Seconds in which a death ends every pending call here: a second is promised (E-4), and this machine is
shared."""
BROKEN_OFF: Final = "the group was broken off"
"""Note on the error that breaks a group off."""
EARLY: Final = 0.01
"""Seconds that a deadline may seem to come early: the clock of a loop ticks in milliseconds."""


class Outcome(NamedTuple):
    """How a call ended."""

    kind: str
    """``"right"``, ``"wrong"``, ``"raised"``, ``"cancelled"``, or ``"refused"``: raised at the call."""
    seconds: float
    """How long it took."""
    error: BaseException | None = None
    detail: str = ""


@dataclass(eq=False, slots=True)
class Life:
    """What has happened to one generation of a group."""

    size: int
    killed: dict[int, float] = field(default_factory=dict)
    """When each rank was killed."""
    ended: bool = False
    """Whether it was shut down or started again."""
    garbled: bool = False
    """Whether bytes of a rank were broken."""
    broken_off: bool = False
    """Whether a call broke it off, because ranks did not answer after a failure."""


@dataclass(eq=False, slots=True)
class Sent:
    """One call, and what is known of it."""

    token: int
    """Its number; calls are made in that order."""
    name: str
    life: Life
    ranks: Sequence[int]
    made_at: float = 0.0
    single: bool = False
    lane: str = "def"
    """``"def"``, ``"async"``, or ``"limited"``: async, with a limit of how many run at once."""
    does: str = "return"
    """``"return"``, ``"raise"``, ``"never"`` or ``"die"``."""
    failing: Sequence[int] = ()
    stream: bool = False
    """Whether it is a generator: one whose rank has failed ends elsewhere where it is."""
    anywhere: bool = False
    """Whether one rank runs it, and which is not known."""
    timeout: float | None = None
    cancelled: bool = False
    """Whether we cancelled it while it was under way."""
    spoiled: bool = False
    """Whether its argument was written to after the call."""
    needs: Sent | None = None
    """The call whose result is its argument."""
    outcome: Outcome | None = None

    def __str__(self) -> str:
        return f"call {self.token} ({self.name} on {list(self.ranks)})"

    @property
    def error(self) -> BaseException | None:
        """What it raised."""
        return None if self.outcome is None else self.outcome.error

    @property
    def was_run(self) -> bool:
        """Whether every rank must have run it."""
        return self.outcome is not None and (
            self.outcome.kind in ("right", "wrong")
            or (
                self.does == "raise"
                and not self.stream
                and isinstance(self.error, ValueError | WorkerGroupError)
                and not isinstance(self.error, UsageError)
            )
        )


def complaint(sent: Sent) -> str | None:
    """Say what is wrong with a call's outcome."""
    outcome = sent.outcome
    if outcome is None:
        return f"{sent} has no outcome"
    if outcome.kind == "wrong":
        return f"{sent} gave a wrong value: {outcome.detail}"
    allowed = {
        "right": _may_be_right,
        "cancelled": _may_be_cancelled,
        "raised": _may_raise,
        "refused": _may_be_refused,
    }[outcome.kind](sent)
    if allowed:
        return None
    told = "" if outcome.error is None else f": {outcome.error!r}"
    return f"{sent} may not end so: {outcome.kind}{told} after {outcome.seconds:.3f} s"


def _may_be_right(sent: Sent) -> bool:
    return sent.does == "return" or (
        sent.does != "never" and not set(sent.failing) & set(sent.ranks)
    )


def _may_be_cancelled(sent: Sent) -> bool:
    need = sent.needs
    return sent.cancelled or (
        need is not None and need.outcome is not None and need.outcome.kind == "cancelled"
    )


def _may_be_refused(sent: Sent) -> bool:
    life, error = sent.life, sent.error
    if isinstance(error, GroupBrokenError):
        return bool(life.killed) or life.broken_off or life.ended
    return isinstance(error, GroupClosedError) and life.ended


def _may_raise(sent: Sent) -> bool:
    error, life = sent.error, sent.life
    need = sent.needs
    if need is not None and need.error is not None and error is need.error:
        return True  # an error of the first call is the error of the second
    if isinstance(error, GroupClosedError):
        return life.ended
    if isinstance(error, UsageError):  # these are ValueErrors too
        return sent.spoiled and "was written to" in str(error)
    if isinstance(error, WorkerGroupError | ValueError):
        return _may_fail(sent, error)
    if isinstance(error, CallTimeoutError):
        seconds = 0.0 if sent.outcome is None else sent.outcome.seconds
        return sent.timeout is not None and seconds >= sent.timeout - EARLY
    if isinstance(error, WorkerDiedError):
        return error.rank in life.killed
    if isinstance(error, InternalError):
        return life.garbled
    return isinstance(error, GroupBrokenError) and (bool(life.killed) or life.broken_off)


def _may_fail(sent: Sent, error: BaseException) -> bool:
    """A method raised: the right ranks, the right errors, and all of them if there was time."""
    if sent.does != "raise":
        return False
    errors = error.exceptions if isinstance(error, WorkerGroupError) else (error,)
    expected = set(sent.failing) & set(sent.ranks)
    if isinstance(error, WorkerGroupError) == sent.single:
        return False
    ranks = {getattr(each, "rank", -1) for each in errors}
    for each in errors:
        if str(each) != f"call {sent.token}, rank {getattr(each, 'rank', -1)}":
            return False
    # Those that answer after the grace, or never, are missing.
    late = "had not answered" in "".join(getattr(error, "__notes__", ()))
    cut_off = late or bool(sent.life.killed) or sent.life.broken_off
    return ranks == expected or (cut_off and bool(ranks) and ranks < expected)


def late_complaints(calls: Sequence[Sent], bound: float = DEATH_BOUND) -> list[str]:
    """Say which calls ended long after the first death of their generation (E-4)."""
    found: list[str] = []
    for sent in calls:
        if not sent.life.killed or sent.outcome is None:
            continue
        known = max(sent.made_at, min(sent.life.killed.values()))
        late = sent.made_at + sent.outcome.seconds - known
        if late > bound:
            found.append(f"{sent} ended {late:.1f} s after a death")
    return found


def order_complaints(
    calls: Sequence[Sent], logs: Mapping[int, Sequence[int]], lane: str
) -> list[str]:
    """Say where the ranks ran calls of a lane in another order, or on some ranks alone (O-1, E-5).

    Args:
        calls: what was sent since the last look, all of it ended.
        logs: tokens by rank, as they were run.
        lane: whose logs these are.
    """
    found: list[str] = []
    for rank, log in logs.items():
        if any(b <= a for a, b in pairwise(log)):
            found.append(f"rank {rank} ran {lane} calls out of order: {log}")
    ran = {rank: set(log) for rank, log in logs.items()}
    for sent in calls:
        if sent.lane != lane:
            continue
        where = [rank for rank in sent.ranks if sent.token in ran[rank]]
        elsewhere = [rank for rank in ran if rank not in sent.ranks and sent.token in ran[rank]]
        if elsewhere:
            found.append(f"{sent} was run on rank {elsewhere}")
        if sent.anywhere:
            if len(where) > 1 or (sent.was_run and not where):
                found.append(f"{sent} is for one rank and was run on {where}")
        elif sent.was_run and len(where) < len(sent.ranks):
            found.append(f"{sent} has an answer and was run on {where} alone")
        elif (
            where
            and len(where) < len(sent.ranks)
            and lane == "def"
            and not (sent.stream and (sent.does == "raise" or sent.error is not None))
        ):
            # An async body that was cancelled before its first line has not written itself down.
            found.append(f"{sent} was run on {where} alone")
    return found
