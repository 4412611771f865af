"""What faulthandler writes becomes a report: who is where, equal stacks told once."""

from __future__ import annotations

import asyncio
import os

import pytest

from asyncwg._driver import pending, stacks
from asyncwg._driver.stacks import QUIET, HangReport, StackPipe, Stacks, parse
from tests.leaks import PATIENCE, bounded

WORKER = stacks._OURS + "_worker/lanes.py"
TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


def text(*frames: tuple[str, int, str]) -> str:
    """Write a stack as faulthandler does."""
    lines = [
        "Stack (most recent call first):",
        *(f'  File "{file}", line {line} in {name}' for file, line, name in frames),
        f'  File "{WORKER}", line 100 in _run',
        '  File "<string>", line 1 in <module>',
    ]
    return "\n".join(lines)


STEP = ("/home/me/train.py", 88, "step")
REDUCE = text((TORCH, 5, "all_reduce"), (TORCH, 9, "wrapper"), STEP)
BATCH = text(("/home/me/data.py", 12, "next_batch"), STEP)
IDLE = text()


def test_the_main_threads_stack_is_kept_down_to_the_method() -> None:
    assert [frame.name for frame in parse(0, BATCH).frames] == ["next_batch", "step"]


def test_a_place_is_the_users_last_line_and_what_it_has_called() -> None:
    assert parse(0, REDUCE).where == "in all_reduce at train.py:88"
    assert parse(0, BATCH).where == "in next_batch at data.py:12"


def test_a_rank_that_runs_no_method_is_idle() -> None:
    assert parse(0, IDLE).where == "idle"


def test_a_rank_that_wrote_nothing_did_not_answer() -> None:
    assert parse(0, "").where == "no answer"


def test_a_text_that_is_cut_off_is_read_as_far_as_it_goes() -> None:
    for end in range(len(REDUCE)):
        assert parse(0, REDUCE[:end]).where


@pytest.mark.parametrize("cut", [5, 60, len(REDUCE) - 80])
async def test_a_text_that_comes_in_two_parts_is_waited_for(cut: int, loop_kind: str) -> None:
    """The process had to wait for a processor while it wrote, and half of it was taken for all."""
    pipe = StackPipe(asyncio.get_running_loop())
    complete = pipe.expect(lambda: None)
    whole = (REDUCE + "\n").encode()
    os.write(pipe.write, whole[:cut])
    await asyncio.wait({complete}, timeout=5 * QUIET)
    assert not complete.done()
    os.write(pipe.write, whole[cut:])
    assert await bounded(pipe.take(complete, PATIENCE)) == whole.decode()
    pipe.close()


def test_the_summary_is_one_line_with_equal_places_told_once() -> None:
    seen = Stacks(tuple(parse(n, t) for n, t in enumerate([REDUCE, BATCH, REDUCE, IDLE])))
    assert seen.summary == (
        "ranks 0, 2 in all_reduce at train.py:88; rank 1 in next_batch at data.py:12; rank 3 idle"
    )


def test_the_report_tells_equal_stacks_once_and_the_odd_one_first() -> None:
    told = str(Stacks(tuple(parse(n, t) for n, t in enumerate([REDUCE, BATCH, REDUCE]))))
    assert told.count("all_reduce") == 2  # in the summary, and in the one stack
    assert told.index("rank 1, most recent") < told.index("ranks 0, 2, most recent")


def test_a_hang_report_says_what_hangs_how_long_and_where() -> None:
    report = HangReport("actor", "Actor.step", 7, 60.0, [1], Stacks((parse(1, BATCH),)))
    assert str(report).startswith(
        "Actor.step (call 7) of group 'actor' has run for more than 60 s; no answer from rank 1\n"
        "rank 1 in next_batch at data.py:12"
    )


def failed(rank: int, traceback: str, error: type[Exception] = ValueError) -> Exception:
    raised = error("wrong")
    raised.rank = rank  # type: ignore[attr-defined]  # as on every error of a rank
    raised.add_note(f"Raised in Actor.step, rank {rank}, call 1:\n{traceback}")
    return raised


def test_equal_tracebacks_are_told_once_with_all_their_ranks() -> None:
    errors = [failed(rank, "one way" if rank != 2 else "another way") for rank in range(6)]
    pending.fold_equal(errors)
    assert errors[0].__notes__[-1] == "ranks 1, 3-5: the same"
    assert "one way" in errors[0].__notes__[0]
    assert errors[1].__notes__ == ["Raised in Actor.step, rank 1, call 1: the same as on rank 0"]
    assert "another way" in errors[2].__notes__[0]


def test_equal_tracebacks_of_different_exceptions_are_both_told() -> None:
    errors = [failed(0, "one way"), failed(1, "one way", KeyError)]
    pending.fold_equal(errors)
    assert all("one way" in error.__notes__[0] for error in errors)


def test_an_exception_without_a_traceback_is_left_alone() -> None:
    error = ValueError("from the controller")
    pending.fold_equal([error, failed(1, "one way")])
    assert not hasattr(error, "__notes__")
