"""The gate of a lane: what is held does not start, and all ranks can agree to drop it (E-5)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import Final

import pytest

from asyncwg._worker.context import CurrentCall
from asyncwg._worker.credits import ThreadCredits
from asyncwg._worker.gate import Gate

BOUND: Final = 10.0
"""Seconds that something that must happen is given."""
A_MOMENT: Final = 0.05
"""Seconds after which what has not happened counts as not happening."""

InThread = Callable[[Callable[[], object]], "Future[object]"]


def call(number: int) -> CurrentCall:
    return CurrentCall(number, "Trainer.step")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def in_thread() -> InThread:
    """Run something in a thread that stands for the lane, and that nobody joins if it is stuck."""

    def begin(act: Callable[[], object]) -> Future[object]:
        future: Future[object] = Future()
        threading.Thread(target=lambda: future.set_result(act()), daemon=True).start()
        return future

    return begin


def waits(future: Future[object]) -> bool:
    try:
        future.result(A_MOMENT)
    except NotYetError:
        return True
    return False


def test_a_call_that_nobody_holds_starts(gate: Gate) -> None:
    assert gate.enter(call(1))


def test_a_call_that_is_held_waits_until_it_is_resumed(gate: Gate, in_thread: InThread) -> None:
    assert gate.hold(1) is None
    entering = in_thread(lambda: gate.enter(call(1)))
    assert waits(entering)
    gate.resume(1)
    assert entering.result(BOUND) is True


def test_a_call_that_is_dropped_does_not_start(gate: Gate, in_thread: InThread) -> None:
    gate.hold(1)
    entering = in_thread(lambda: gate.enter(call(1)))
    gate.drop(1)
    assert entering.result(BOUND) is False


def test_a_call_that_was_dropped_before_it_arrived_does_not_start(gate: Gate) -> None:
    gate.hold(5)
    gate.drop(5)
    assert gate.enter(call(4))
    assert not gate.enter(call(5))
    assert gate.enter(call(6))


def test_a_running_call_can_not_be_held(gate: Gate) -> None:
    gate.enter(call(1))
    assert gate.hold(1) == 0


def test_a_call_that_has_ended_can_not_be_held(gate: Gate) -> None:
    served = call(1)
    gate.enter(served)
    gate.leave(served)
    assert gate.hold(1) == 0


def test_a_generator_tells_how_many_items_it_has_begun_also_when_it_has_ended(gate: Gate) -> None:
    """Its end may be on its way when the others are asked: they would begin none, and it has."""
    served = call(1)
    served.credits = wants = ThreadCredits()
    gate.enter(served)
    for begun in (1, 2):
        wants.take()
        assert gate.hold(1) == begun
        wants.stop_at(9)
    gate.leave(served)
    gate.enter(call(2))
    assert gate.hold(1) == 2


def test_a_call_below_the_last_one_that_started_counts_as_started(gate: Gate) -> None:
    """Calls reach a lane in the order of their numbers; a rank of a view misses some."""
    gate.enter(call(7))
    assert gate.hold(3) == 0


def test_a_dropped_call_counts_as_passed(gate: Gate) -> None:
    gate.hold(1)
    gate.drop(1)
    gate.enter(call(1))
    assert gate.hold(1) == 0


def test_a_drop_that_comes_too_late_drops_no_later_call(gate: Gate) -> None:
    gate.enter(call(3))
    gate.drop(3)
    assert gate.enter(call(4))


def test_dropping_one_call_lets_the_one_behind_it_start(gate: Gate, in_thread: InThread) -> None:
    gate.hold(1)

    def lane() -> list[bool]:
        return [gate.enter(call(1)), gate.enter(call(2))]

    entering = in_thread(lane)
    assert waits(entering)
    gate.drop(1)
    assert entering.result(BOUND) == [False, True]


def test_resuming_another_call_does_not_let_this_one_start(gate: Gate, in_thread: InThread) -> None:
    gate.hold(1)
    gate.hold(2)
    entering = in_thread(lambda: gate.enter(call(1)))
    gate.resume(2)
    assert waits(entering)
    gate.resume(1)
    assert entering.result(BOUND) is True


def test_cancelling_tells_the_running_call(gate: Gate) -> None:
    served = call(1)
    gate.enter(served)
    assert gate.cancel(1) is served
    assert served.cancelled


def test_cancelling_a_call_that_does_not_run_tells_nobody(gate: Gate) -> None:
    served = call(1)
    gate.enter(served)
    gate.leave(served)
    assert gate.cancel(1) is None
    assert not served.cancelled


def test_a_call_that_was_cancelled_before_it_started_knows_it_when_it_starts(gate: Gate) -> None:
    """It was held here and had started elsewhere: nobody would tell it a second time."""
    served = call(1)
    gate.hold(1)
    gate.resume(1)
    assert gate.cancel(1) is None
    assert gate.enter(served) is True
    assert served.cancelled


def test_trying_does_not_wait_for_a_call_that_is_held(gate: Gate) -> None:
    gate.hold(1)
    assert gate.try_enter(call(1)) is None
    gate.resume(1)
    assert gate.try_enter(call(1)) is True


def test_trying_a_call_that_was_dropped_says_so(gate: Gate) -> None:
    gate.hold(1)
    gate.drop(1)
    assert gate.try_enter(call(1)) is False


@pytest.mark.parametrize("decide", [Gate.drop, Gate.resume])
def test_a_decision_wakes_who_was_told_to_wait(decide: Callable[[Gate, int], None]) -> None:
    woken = threading.Event()
    gate = Gate(woken.set)
    gate.hold(1)
    assert not woken.is_set()
    decide(gate, 1)
    assert woken.is_set()
