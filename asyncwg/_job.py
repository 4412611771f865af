"""One call as the user made it: what, to whom, and with which options."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from asyncwg import dispatch
from asyncwg._driver.rank import ASYNC, COMPUTE
from asyncwg._modes import Mode
from asyncwg._wire.frames import UNNUMBERED, Kind
from asyncwg._worker import context
from asyncwg.call import Call, Collect
from asyncwg.decorator import Dispatch, Execute, Method, Uneven
from asyncwg.errors import CallTimeoutError, UsageError

_CALL: Final = int(Kind.CALL)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options of one call; see `Proxy.options`."""

    timeout: float | None = None
    uneven: Uneven = "error"
    on_error: str = "abort"
    copy: str = "later"
    hang_after: float | None = None
    sticky: Hashable = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout must be more than 0 seconds, not {self.timeout!r}")
        if self.uneven not in ("error", "allow", "pad"):
            raise UsageError(f"uneven must be 'error', 'allow' or 'pad', not {self.uneven!r}")
        if self.on_error not in ("abort", "wait"):
            raise UsageError(f"on_error must be 'abort' or 'wait', not {self.on_error!r}")
        if self.hang_after is not None and not self.hang_after > 0:
            raise UsageError(f"hang_after must be more than 0 seconds, not {self.hang_after!r}")
        if self.copy not in ("later", "now"):
            raise UsageError(f"copy must be 'later' or 'now', not {self.copy!r}")
        try:
            hash(self.sticky)
        except TypeError:
            raise UsageError(f"sticky must be hashable, not {self.sticky!r}") from None


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``"; did you mean 'x'?"``, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class Target(NamedTuple):
    """Which ranks a surface stands for."""

    ranks: tuple[int, ...]
    single: bool
    """Whether a call gives the value of its one rank instead of a list."""


class Job(NamedTuple):
    """One call as the user made it."""

    target: Target
    method: Method
    mode: Mode
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: CallOptions
    kind: int = _CALL
    feed: Any = None
    """Of a generator method: takes its items."""

    @property
    def is_plain(self) -> bool:
        """Whether the rank needs to be told nothing but the method's number."""
        return self.options.timeout is None and self.number < UNNUMBERED


class Quick(NamedTuple):
    """A call without arguments that every rank gets alike, taken apart beforehand."""

    job: Job
    label: str
    ranks: tuple[int, ...]
    single: bool
    lane: int
    number: int
    collect: Collect
    on_error: str


def quick_of(job: Job) -> Quick | None:
    """Return the call without arguments in its quick form, or None where it has none."""
    options, method = job.options, job.method
    if (
        job.mode not in (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
        or method.options.execute is not Execute.ALL
        or method.options.idempotent
        or method.is_stream
        or not job.is_plain
        or options.hang_after is not None
    ):
        return None
    ranks, single = job.target
    plan = dispatch.plan(
        method, job.mode, (), {}, dispatch.Layout(ranks, single, None, {}), options.uneven
    )
    lane = ASYNC if method.is_async else COMPUTE
    return Quick(job, method.label, ranks, single, lane, job.number, plan.collect, options.on_error)


def inherited(job: Job) -> Job:
    """Return a call that a method makes with what is left of the method's own time, if it has a limit."""
    outer = context.running.get()
    if outer is None or job.options.timeout is not None or outer.remaining is None:
        return job
    return job._replace(options=replace(job.options, timeout=max(outer.remaining, 1e-6)))


def expire_later(loop: asyncio.AbstractEventLoop, job: Job, call: Call[Any]) -> Callable[[], None]:
    """Have the call fail when its timeout has passed; returns what does it at once."""
    timeout = job.options.timeout
    assert timeout is not None

    def expire() -> None:
        if not call.done():
            call.set_exception(
                CallTimeoutError(f"{job.method.label} did not end within {timeout} s")
            )
            call.abandon()

    timer = loop.call_later(timeout, expire)
    call.add_done_callback(lambda _call: timer.cancel())
    return expire
