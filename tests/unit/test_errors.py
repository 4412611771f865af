"""The error tree: what is what, what each says, and that all of it survives a pickle."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from asyncwg import errors
from asyncwg.errors import (
    AsyncwgError,
    CallTimeoutError,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerGroupError,
    WorkerStartError,
)


def died() -> WorkerDiedError:
    return WorkerDiedError(
        1, 4242, -9, "SIGKILL", ["first", "boom-123"], "", True, "Trainer.step", 7, "a note"
    )


def example(name: str) -> AsyncwgError:
    """Make one of the class ``name`` with all its fields."""
    match name:
        case "DispatchError":
            return DispatchError("does not join", [1, "two", None])
        case "WorkerError":
            return WorkerError("thing.Error", "why", "Traceback ...", 3)
        case "WorkerGroupError":
            return WorkerGroupError("step failed", [ValueError("x"), died()])
        case "WorkerStartError":
            return WorkerStartError("could not start", [ValueError("x")])
        case "WorkerDiedError":
            return died()
        case _:
            made: AsyncwgError = getattr(errors, name)("what happened")
            return made


def returned(error: Any) -> Any:
    return pickle.loads(pickle.dumps(error))


def seen(error: BaseException) -> Any:
    """Everything of an exception that can be compared."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    fields = {name: value for name, value in vars(error).items() if name != "__notes__"}
    return type(error), str(error), fields, getattr(error, "__notes__", []), [*map(seen, parts)]


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_a_pickle_with_its_fields_and_notes(name: str) -> None:
    error = example(name)
    error.add_note("hint")
    error.rank = 3  # type: ignore[attr-defined]  # set on whatever comes from a rank
    assert seen(returned(error)) == seen(error)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_an_asyncwg_error(name: str) -> None:
    assert isinstance(example(name), AsyncwgError)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("UsageError", ValueError),
        ("DispatchError", UsageError),
        ("ResourceError", UsageError),
        ("GroupClosedError", UsageError),
        ("WorkerStartError", WorkerGroupError),
        ("WorkerGroupError", ExceptionGroup),
        ("CallTimeoutError", TimeoutError),
    ],
)
def test_an_error_is_what_its_reader_would_catch(name: str, base: type[Exception]) -> None:
    assert isinstance(example(name), base)


def test_a_death_is_no_worker_error() -> None:
    """A handler for what a method raised must not go on with a group that is no longer whole."""
    assert not isinstance(died(), WorkerError)


def test_a_timeout_is_no_usage_error() -> None:
    assert not isinstance(CallTimeoutError("late"), UsageError)


def test_a_broken_group_is_not_a_closed_one() -> None:
    assert not isinstance(GroupBrokenError("x"), GroupClosedError)


def test_a_group_error_keeps_its_type_through_a_split() -> None:
    """Without ``derive``, ``except*`` hands out the plain class."""
    group = WorkerStartError("failed", [ValueError("x"), KeyError("y")])
    values, rest = group.split(ValueError)
    assert type(values) is WorkerStartError
    assert type(rest) is WorkerStartError


def test_a_group_error_works_with_except_star() -> None:
    caught: list[BaseExceptionGroup[Any]] = []
    try:
        raise WorkerGroupError("failed", [ValueError("x"), KeyError("y")])
    except* ValueError as group:
        caught.append(group)
    except* KeyError as group:
        caught.append(group)
    assert [(type(group), len(group.exceptions)) for group in caught] == [(WorkerGroupError, 1)] * 2


def test_results_that_do_not_join_are_kept_out_of_the_message() -> None:
    error = DispatchError("does not join", ["x" * 10_000])
    assert str(error) == "does not join"
    assert error.results == ["x" * 10_000]


def test_a_worker_error_says_type_and_text() -> None:
    assert str(WorkerError("thing.Error", "why")) == "thing.Error: why"
    assert str(WorkerError("KeyboardInterrupt", "")) == "KeyboardInterrupt"


def test_a_death_is_told_with_all_that_is_known() -> None:
    """Only "died unexpectedly" was told: https://github.com/vllm-project/vllm/issues/53157."""
    assert str(died()).splitlines() == [
        "rank 1 (pid 4242) was ended by SIGKILL during Trainer.step (call 7)",
        "the kernel's out-of-memory killer ended it: use less memory per rank",
        "last lines of its stderr:",
        "  first",
        "  boom-123",
    ]


def test_a_death_by_exit_says_the_code() -> None:
    assert "ended with exit code 7" in str(WorkerDiedError(0, 1, 7))


def test_a_death_of_an_unknown_kind_says_so() -> None:
    assert "how is not known" in str(WorkerDiedError(0, 1, None))


def test_a_death_with_the_guardian_says_so() -> None:
    error = WorkerDiedError(1, 2, None, guardian_pid=77)
    assert str(error) == (
        "rank 1 (pid 2) ended because the guardian process (pid 77), the parent of all workers, "
        "was killed"
    )


def test_a_stack_of_a_crash_is_shown_once() -> None:
    stack = "Fatal Python error: Segmentation fault\n  in step"
    error = WorkerDiedError(0, 1, -11, "SIGSEGV", stack.splitlines(), stack)
    assert str(error).count("Segmentation fault") == 1


def test_why_there_is_no_stderr_is_told() -> None:
    error = WorkerDiedError(0, 1, 1, stderr_note="its stderr is the controller's own")
    assert "the controller's own" in str(error)
