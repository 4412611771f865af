"""The model of `benchmarks.chaos` complains of what is wrong, and of nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from asyncwg import (
    CallTimeoutError,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    UsageError,
    WorkerDiedError,
    WorkerGroupError,
)
from benchmarks.chaos import model
from benchmarks.chaos.model import BROKEN_OFF, Life, Outcome, Sent
from benchmarks.chaos.program import CallOp, GroupOp, program, ranks_of, sizes_of
from benchmarks.chaos.values import OTHERS, ROWS, Value, equal, spoil, total

RIGHT = Outcome("right", 0.1)
CANCELLED = Outcome("cancelled", 0.1)


def sent(outcome: Outcome | None, life: Life | None = None, **known: object) -> Sent:
    made = Sent(5, "step", Life(2) if life is None else life, (0, 1), outcome=outcome)
    for name, value in known.items():
        setattr(made, name, value)
    return made


def raised(error: BaseException, seconds: float = 0.1) -> Outcome:
    return Outcome("raised", seconds, error)


def failure(*ranks: int, note: str = "") -> WorkerGroupError:
    errors: list[Exception] = []
    for rank in ranks:
        error = ValueError(f"call 5, rank {rank}")
        error.rank = rank  # type: ignore[attr-defined]  # as on every error of a rank
        errors.append(error)
    group = WorkerGroupError("step failed", errors)
    if note:
        group.add_note(note)
    return group


def killed(rank: int = 1) -> Life:
    return Life(2, killed={rank: 10.0})


DIED = WorkerDiedError(1, 77, -9, "SIGKILL")
FINE: Sequence[Sent] = [
    sent(RIGHT),
    sent(RIGHT, killed()),  # it had answered before
    sent(CANCELLED, cancelled=True),
    sent(CANCELLED, needs=sent(CANCELLED, cancelled=True)),
    sent(raised(failure(0, 1)), does="raise", failing=(0, 1)),
    sent(raised(failure(0)), does="raise", failing=(0,)),
    sent(
        raised(failure(0, note="rank 1 had not answered 0.5 s after")), does="raise", failing=(0, 1)
    ),
    sent(raised(failure(0).exceptions[0]), does="raise", failing=(0,), ranks=(0,), single=True),
    sent(raised(CallTimeoutError("late"), 0.2), timeout=0.2),
    sent(raised(DIED), killed(1)),
    sent(raised(GroupBrokenError("broke")), killed(0)),
    sent(raised(GroupBrokenError("broke")), Life(2, broken_off=True)),
    sent(raised(GroupClosedError("closed")), Life(2, ended=True)),
    sent(raised(UsageError("an argument was written to while")), spoiled=True),
    sent(raised(DIED), needs=sent(raised(DIED), killed(1))),  # of another group
    sent(Outcome("refused", 0.0, GroupBrokenError("broke")), killed(0)),
    sent(Outcome("refused", 0.0, GroupClosedError("closed")), Life(2, ended=True)),
]
WRONG: Mapping[str, Sent] = {
    "no outcome": sent(None),
    "a wrong value": sent(Outcome("wrong", 0.1)),
    "a value though it raises": sent(RIGHT, does="raise", failing=(0,)),
    "a value though it never ends": sent(RIGHT, does="never", timeout=1.0),
    "cancelled by nobody": sent(CANCELLED),
    "an error of a method that raises none": sent(raised(failure(0))),
    "the wrong rank": sent(raised(failure(1)), does="raise", failing=(0,)),
    "a rank missing": sent(raised(failure(0)), does="raise", failing=(0, 1)),
    "the error of another call": sent(raised(failure(0)), does="raise", failing=(0,), token=6),
    "a group from one rank": sent(
        raised(failure(0)), does="raise", failing=(0,), ranks=(0,), single=True
    ),
    "a deadline that there is not": sent(raised(CallTimeoutError("late"), 0.2)),
    "a deadline that has not come": sent(raised(CallTimeoutError("late"), 0.1), timeout=0.2),
    "a death that nobody brought": sent(raised(DIED)),
    "a death of another rank": sent(raised(DIED), killed(0)),
    "broken by nobody": sent(raised(GroupBrokenError("broke"))),
    "closed by nobody": sent(raised(GroupClosedError("closed")), killed()),
    "written to by nobody": sent(raised(UsageError("an argument was written to while"))),
    "refused by nobody": sent(Outcome("refused", 0.0, GroupBrokenError("broke"))),
    "an error of the library": sent(raised(InternalError("oops")), killed()),
    "results that don't join": sent(raised(DispatchError("no", results=[])), killed()),
}


@pytest.mark.parametrize("call", FINE, ids=lambda call: str(call.outcome)[:40])
def test_what_may_be_is_left_alone(call: Sent) -> None:
    assert model.complaint(call) is None


@pytest.mark.parametrize("what", WRONG)
def test_what_may_not_be_is_complained_of(what: str) -> None:
    assert model.complaint(WRONG[what])


def test_a_call_that_ends_long_after_a_death_is_complained_of() -> None:
    late = sent(raised(DIED, 7.0), killed(), made_at=9.0)
    assert model.late_complaints([late], bound=5.0)
    assert model.late_complaints([late], bound=6.5) == []


def order(logs: Mapping[int, list[int]], *calls: Sent, lane: str = "def") -> list[str]:
    return model.order_complaints(calls, logs, lane)


def test_the_same_order_on_all_ranks_is_right() -> None:
    calls = [sent(RIGHT, token=1), sent(RIGHT, token=2, ranks=(1,)), sent(RIGHT, token=3)]
    assert order({0: [1, 3], 1: [1, 2, 3]}, *calls) == []


@pytest.mark.parametrize(
    "logs",
    [
        {0: [2, 1], 1: [1, 2]},  # another order
        {0: [1, 1, 2], 1: [1, 2]},  # twice
        {0: [1, 2], 1: [1]},  # an answer of a rank that has not run it
    ],
)
def test_another_order_is_complained_of(logs: dict[int, list[int]]) -> None:
    assert order(logs, sent(RIGHT, token=1), sent(RIGHT, token=2))


def test_a_dropped_call_may_run_on_all_ranks_or_on_none() -> None:
    dropped = sent(CANCELLED, token=1, cancelled=True)
    assert order({0: [], 1: []}, dropped) == []
    assert order({0: [1], 1: [1]}, dropped) == []
    assert order({0: [1], 1: []}, dropped)


def test_a_call_may_not_run_on_a_rank_it_was_not_sent_to() -> None:
    assert order({0: [1], 1: [1]}, sent(RIGHT, token=1, ranks=(0,)))


def test_a_call_for_any_rank_runs_on_one() -> None:
    call = sent(RIGHT, token=1, anywhere=True)
    assert order({0: [], 1: [1]}, call) == []
    assert order({0: [1], 1: [1]}, call)
    assert order({0: [], 1: []}, call)


def test_lanes_are_looked_at_apart() -> None:
    assert order({0: [], 1: []}, sent(RIGHT, token=1, lane="async")) == []
    assert order({0: [], 1: []}, sent(RIGHT, token=1, lane="async"), lane="async")


def test_a_program_follows_from_its_seed_alone() -> None:
    assert list(program(3, 200, 2)) == list(program(3, 200, 2))
    assert list(program(3, 200, 2)) != list(program(4, 200, 2))


def test_a_program_knows_how_many_ranks_there_are() -> None:
    sizes = sizes_of(5, 2)
    for op in program(5, 3000, 2):
        if isinstance(op, CallOp):
            assert ranks_of(op.view, sizes[op.slot])[-1] < sizes[op.slot]
            assert max(op.failing, default=0) < sizes[op.slot]
        elif isinstance(op, GroupOp) and op.size:
            sizes[op.slot] = op.size


def test_what_would_never_end_has_an_end_of_its_own() -> None:
    for op in program(6, 3000, 2):
        if isinstance(op, CallOp) and op.method in ("until_told", "forever_async"):
            assert op.cancel is not None or op.options["timeout"] <= 0.2


@pytest.mark.parametrize("kind", [*ROWS, *OTHERS])
def test_a_value_is_the_same_each_time_and_another_for_another_seed(kind: str) -> None:
    assert equal(Value(kind, 64, 3).build(), Value(kind, 64, 3).build())
    assert kind == "none" or not equal(Value(kind, 64, 3).build(), Value(kind, 64, 4).build())


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "shared"])
def test_a_spoiled_value_is_another(kind: str) -> None:
    value = Value(kind, 64, 3).build()
    assert spoil(value)
    assert not equal(value, Value(kind, 64, 3).build())
    assert total(value) != total(Value(kind, 64, 3).build())


def test_the_note_of_a_group_that_was_broken_off_is_what_the_library_says() -> None:
    """The model recognises it by its text."""
    from pathlib import Path

    from asyncwg._driver import gang

    assert BROKEN_OFF in Path(gang.__file__).read_text()
