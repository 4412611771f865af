"""What a caller gets when methods, arguments and results fail: promises E-1, E-2 and E-3."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from asyncwg import GroupBrokenError, WorkerDiedError, WorkerError, WorkerGroup, WorkerGroupError
from tests.hostile import (
    EXIT_STATUS,
    TEXT,
    Hostile,
    HostileBaseError,
    HostileError,
    How,
    When,
    hostiles,
)
from tests.leaks import bounded
from tests.process.workers_life import (
    AtHome,
    ChainedError,
    Fifo,
    KeywordError,
    Mortal,
    OddError,
    Raiser,
    ShoutingError,
    alive,
    group,
)

HARMLESS: tuple[How, ...] = ("raise", "raise base", "exit")
"""What a process survives that serves others."""


async def failure(call: Any) -> Exception:
    """Return what awaiting ``call`` raises."""
    try:
        await bounded(call)
    except Exception as error:  # noqa: BLE001  # the tests say which
        return error
    raise AssertionError("it did not fail")


def rank_of(error: BaseException) -> int | None:
    """Return the rank that an exception came from."""
    rank: int | None = getattr(error, "rank", None)
    return rank


async def in_step(wg: WorkerGroup) -> bool:
    """Whether the group answers as if nothing had happened."""
    answers: list[int] = await bounded(wg.ping())
    return answers == list(range(wg.world_size)) and wg.alive


async def test_a_failed_rank_raises_the_original_exception_where_it_is_the_only_one(
    loop_kind: str,
) -> None:
    """Users had to parse text: https://github.com/ray-project/ray/pull/3208. E-1."""
    async with group(Raiser) as wg:
        with pytest.raises(ChainedError) as caught:
            await bounded(wg[1].throw("chained"))
        assert str(caught.value) == "x"
        assert rank_of(caught.value) == 1
        assert await in_step(wg)


async def test_a_remote_exception_is_printed_with_its_origin_cause_notes_and_rank() -> None:
    """They were lost: https://github.com/iree-org/iree/issues/11655. E-1."""
    async with group(Raiser) as wg:
        text = "".join(traceback.format_exception(await failure(wg[1].throw("chained"))))
    assert "workers_life.py" in text
    assert ", line " in text
    assert "in _raise_chained" in text
    assert "ZeroDivisionError: the cause" in text
    assert "hint" in text
    assert "rank 1" in text


async def test_a_remote_exception_keeps_its_cause_and_notes_as_objects() -> None:
    """E-1."""
    async with group(Raiser, 1) as wg:
        error = await failure(wg[0].throw("chained"))
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.__notes__[0] == "hint"


async def test_two_ranks_that_fail_differently_are_both_reported(fifo: Callable[[], Fifo]) -> None:
    """https://github.com/ray-project/ray/pull/3208. E-1: the first to fail comes first."""
    first_done = fifo()
    async with group(Raiser, error_grace=30) as wg:
        call = wg.throw_by_rank(first_done)
        answers = call.as_completed()
        rank, _ = await bounded(anext(answers))
        assert rank == 1
        first_done.put()
        error = await failure(call)
        await answers.aclose()
        assert isinstance(error, WorkerGroupError)
        assert [(type(each), str(each), rank_of(each)) for each in error.exceptions] == [
            (ValueError, "from rank one", 1),
            (TypeError, "from rank zero", 0),
        ]
        assert await in_step(wg)


async def test_except_star_picks_the_ranks_errors_by_type(fifo: Callable[[], Fifo]) -> None:
    """E-1, E-2: what is left over is still a WorkerGroupError."""
    release = fifo()
    release.put()
    picked: list[BaseException] = []
    async with group(Raiser, error_grace=30) as wg:

        async def pick() -> None:
            try:
                await wg.throw_by_rank(release)
            except* ValueError as errors:
                picked.append(errors)

        with pytest.raises(WorkerGroupError) as rest:
            await bounded(pick())
    assert [str(error) for error in rest.value.exceptions] == ["from rank zero"]
    assert isinstance(picked[0], WorkerGroupError)
    assert [str(error) for error in picked[0].exceptions] == ["from rank one"]


async def test_a_failure_of_one_rank_of_several_comes_in_a_group() -> None:
    """E-1: the type does not depend on how many have failed."""
    async with group(Mortal, 2) as wg:
        error = await failure(wg.run(_fail_on, 1))
        assert isinstance(error, WorkerGroupError)
        assert [rank_of(each) for each in error.exceptions] == [1]
        assert await bounded(wg.ping(1)) == [1, 1]


def _fail_on(worker: Any, rank: int) -> int:
    if worker.rank == rank:
        raise ValueError("only here")
    return rank


@pytest.mark.parametrize("method", ["throw", "throw_async"])
@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("sys.exit", "SystemExit"),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
        ("BaseException", "BaseOnlyError"),
        ("GeneratorExit", "GeneratorExit"),
        ("StopIteration", "StopIteration"),
        ("StopAsyncIteration", "StopAsyncIteration"),
        ("CancelledError", "CancelledError"),
    ],
)
async def test_what_would_be_taken_for_the_controllers_own_arrives_as_a_worker_error(
    method: str, name: str, type_name: str
) -> None:
    """E-2. No reply was sent.

    https://github.com/uqfoundation/multiprocess/issues/220, https://github.com/python/cpython/pull/101081
    """
    async with group(Raiser) as wg:
        error = await failure(getattr(wg[1], method)(name))
        if (method, name) == ("throw_async", "StopIteration"):
            # Python itself makes this of it when it leaves a coroutine.
            assert isinstance(error, RuntimeError)
        else:
            assert isinstance(error, WorkerError)
            assert type_name in error.type_name
        assert rank_of(error) == 1
        assert await in_step(wg)


async def test_the_status_of_sys_exit_is_shown() -> None:
    """https://github.com/uqfoundation/multiprocess/issues/220. E-2."""
    async with group(Raiser, 1) as wg:
        error = await failure(wg[0].throw("sys.exit"))
    assert isinstance(error, WorkerError)
    assert "3" in str(error)
    assert "SystemExit: 3" in error.remote_traceback


@pytest.mark.parametrize(
    ("name", "kind", "texts"),
    [
        ("odd", OddError, ["1:2"]),
        ("http", Exception, ["404", "nf"]),
        ("keyword", KeywordError, ["code=3"]),
        ("shouting", ShoutingError, ["AB!"]),
    ],
)
async def test_an_exception_with_a_signature_of_its_own_arrives_as_itself(
    name: str, kind: type[Exception], texts: list[str]
) -> None:
    """E-2. They hung the pool, or lost their text.

    https://github.com/agronholm/pythonfutures/issues/30, https://github.com/python/cpython/issues/79492,
    https://github.com/python/cpython/issues/103061, https://github.com/ray-project/ray/issues/20830,
    https://github.com/ray-project/ray/issues/34797
    """
    async with group(Raiser, 1) as wg:
        error = await failure(wg[0].throw(name))
        assert isinstance(error, kind)
        assert all(text in str(error) for text in texts)
        assert await in_step(wg)


async def test_a_message_is_not_formatted_a_second_time() -> None:
    """https://github.com/ray-project/ray/issues/34797."""
    async with group(Raiser, 1) as wg:
        assert str(await failure(wg[0].throw("shouting"))) == "AB!"


@pytest.mark.parametrize(
    ("name", "type_name", "text"),
    [
        ("unpicklable", "UnpicklableError", TEXT),
        ("unprintable", "UnprintableError", "in _throw"),
        ("far from home", "ValueError", "kept"),
        ("far from home, exit", "ValueError", "kept"),
    ],
)
async def test_an_exception_that_does_not_survive_the_trip_is_told_as_text(
    name: str, type_name: str, text: str
) -> None:
    """https://github.com/ray-project/ray/issues/20830. E-2."""
    async with group(Raiser, 1) as wg:
        error = await failure(wg[0].throw(name))
        told = "".join(traceback.format_exception(error))
        assert type_name in told
        assert text in told
        assert rank_of(error) == 0
        assert await in_step(wg)


async def test_an_argument_that_can_not_be_pickled_raises_at_the_call_and_nothing_is_sent() -> None:
    """E-2. It killed a feeder thread.

    https://github.com/noxdafox/pebble/issues/146, https://github.com/python/cpython/issues/75880,
    https://github.com/python/cpython/issues/83932
    """
    async with group(Raiser) as wg:
        with pytest.raises(TypeError, match=r"Raiser\.echo.*value\['a'\]\[1\].*lock"):
            wg.echo({"a": [1, threading.Lock()]})
        assert await in_step(wg)


async def test_a_result_that_can_not_be_pickled_names_the_method_and_the_part() -> None:
    """https://github.com/python/cpython/issues/75880."""
    async with group(Raiser, 1) as wg:
        error = await failure(wg[0].lock())
        assert isinstance(error, TypeError)
        assert "Raiser.lock" in str(error)
        assert "['inner'][0]" in str(error)
        assert await in_step(wg)


async def test_an_argument_that_fails_to_unpickle_in_the_worker_fails_its_call_alone() -> None:
    """https://github.com/python/cpython/issues/83932."""
    async with group(Raiser) as wg:
        failing = wg.echo(AtHome())
        following = wg.echo("next")
        error = await failure(failing)
        assert isinstance(error, WorkerGroupError)
        assert all("Raiser.echo" in str(each) for each in error.exceptions)
        assert all("far from home" in str(each) for each in error.exceptions)
        assert await bounded(following) == ["next", "next"]
        assert await in_step(wg)


@pytest.mark.parametrize("kind", [ValueError, HostileBaseError, SystemExit, KeyboardInterrupt])
async def test_a_result_that_fails_to_unpickle_in_the_controller_fails_its_call_alone(
    kind: type[BaseException], loop_kind: str
) -> None:
    """https://github.com/python/cpython/issues/83932. E-2: also what is no Exception."""
    async with group(Raiser) as wg:
        error = await failure(wg[1].make(AtHome, kind))
        assert isinstance(error, WorkerError)
        assert "Raiser.make on rank 1" in str(error)
        assert await in_step(wg)


@pytest.mark.parametrize("method", ["echo", "echo_async"])
@pytest.mark.parametrize(("when", "how"), hostiles(["unpickled"], HARMLESS))
async def test_a_hostile_argument_fails_its_call_and_the_worker_lives_on(
    when: When, how: How, method: str
) -> None:
    """E-2."""
    async with group(Raiser) as wg:
        pids = wg.pids
        error = await failure(getattr(wg, method)(Hostile(when, how)))
        assert isinstance(error, WorkerGroupError)
        assert len(error.exceptions) == 2
        assert await in_step(wg)
        assert wg.pids == pids


@pytest.mark.parametrize(("when", "how"), hostiles(["pickled"], HARMLESS))
async def test_a_hostile_argument_can_not_get_past_the_call_site(when: When, how: How) -> None:
    """E-2: nothing is sent, and the group serves the next call."""
    kinds: dict[How, tuple[type[BaseException], ...]] = {
        "raise": (TypeError,),
        "raise base": (HostileBaseError, TypeError),
        "exit": (SystemExit, TypeError),
    }
    async with group(Raiser) as wg:
        with pytest.raises(kinds[how]):
            wg.echo(Hostile(when, how))
        assert await in_step(wg)


@pytest.mark.parametrize(("when", "how"), hostiles(["pickled"], HARMLESS))
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_hostile_result_fails_its_call_and_the_worker_lives_on(
    when: When, how: How, asynchronous: bool
) -> None:
    """E-2."""
    async with group(Raiser) as wg:
        maker = _make_later if asynchronous else _make
        error = await failure(wg[1].run(maker, when, how))
        assert isinstance(error, TypeError)
        assert "can't be pickled" in str(error)
        assert await in_step(wg)


def _make(_worker: object, when: When, how: How) -> Hostile:
    return Hostile(when, how)


async def _make_later(_worker: object, when: When, how: How) -> Hostile:
    return Hostile(when, how)


@pytest.mark.parametrize(("when", "how"), hostiles(["pickled", "unpickled", "repr-ed"], HARMLESS))
async def test_an_exception_with_a_hostile_argument_is_an_ordinary_failure(
    when: When, how: How
) -> None:
    """E-2."""
    async with group(Raiser) as wg:
        error = await failure(wg[1].run(_throw_hostile, when, how))
        text = "".join(traceback.format_exception(error))
        assert "ValueError" in text
        assert "_throw_hostile" in text
        assert await in_step(wg)


def _throw_hostile(_worker: object, when: When, how: How) -> None:
    raise ValueError("first", Hostile(when, how))


@pytest.mark.parametrize(("when", "how"), hostiles(["repr-ed"], HARMLESS))
async def test_a_hostile_repr_is_never_asked_for(when: When, how: How) -> None:
    """E-2."""
    async with group(Raiser) as wg:
        echoed = await bounded(wg.echo([Hostile(when, how)]))
        assert [type(item) for (item,) in echoed] == [Hostile, Hostile]


@pytest.mark.parametrize(("when", "how"), hostiles(["repr-ed"], HARMLESS))
async def test_a_hostile_repr_beside_what_can_not_be_pickled_does_not_hide_that(
    when: When, how: How
) -> None:
    """E-2: the search for the culprit touches every key and attribute."""
    async with group(Raiser) as wg:
        with pytest.raises(TypeError, match=r"Raiser\.echo.*can't be pickled"):
            wg.echo({Hostile(when, how): threading.Lock()})
        error = await failure(wg[0].run(_make_lock_beside, when, how))
        assert isinstance(error, TypeError)
        assert "can't be pickled" in str(error)
        assert await in_step(wg)


def _make_lock_beside(_worker: object, when: When, how: How) -> Any:
    return {Hostile(when, how): threading.Lock()}


@pytest.mark.parametrize(
    ("how", "told"), [("die", f"exit code {EXIT_STATUS}"), ("crash", "SIGSEGV")]
)
async def test_a_value_that_ends_the_process_ends_the_call_with_its_death(
    how: How, told: str
) -> None:
    """E-2, E-4: nothing can hang a call."""
    async with group(Raiser) as wg:
        error = await failure(wg[1].echo(Hostile("unpickled", how)))
        assert isinstance(error, WorkerDiedError)
        assert told in str(error)


@pytest.mark.parametrize(
    ("how", "told"), [("die", f"exit code {EXIT_STATUS}"), ("crash", "SIGSEGV")]
)
async def test_a_result_that_ends_the_process_ends_the_call_with_its_death(
    how: How, told: str
) -> None:
    """E-2, E-4."""
    async with group(Raiser) as wg:
        error = await failure(wg[1].run(_make, "pickled", how))
        assert isinstance(error, WorkerDiedError)
        assert told in str(error)


async def test_a_hostile_function_fails_like_a_method() -> None:
    """E-2."""
    async with group(Raiser) as wg:
        error = await failure(wg[0].run(Hostile("called", "raise")))
        assert isinstance(error, HostileError)
        assert await in_step(wg)


async def test_a_failure_is_told_when_the_others_have_not_answered_within_the_grace(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """E-3."""
    started, release = fifo(), fifo()
    async with group(Raiser, error_grace=0.05) as wg:
        error = await failure(wg.fail_or_hold(started, release))
        assert isinstance(error, WorkerGroupError)
        assert [str(each) for each in error.exceptions] == ["bad row 7"]


async def test_a_failure_shows_where_the_silent_ranks_are(fifo: Callable[[], Fifo]) -> None:
    """E-3."""
    started, release = fifo(), fifo()
    async with group(Raiser, error_grace=0.05) as wg:
        notes = "\n".join((await failure(wg.fail_or_hold(started, release))).__notes__)
    assert "rank 1 had not answered" in notes
    assert "fail_or_hold" in notes
    assert "workers_life.py" in notes


async def test_by_default_the_group_is_broken_off_after_the_grace(
    fifo: Callable[[], Fifo],
) -> None:
    """E-3."""
    started, release = fifo(), fifo()
    async with group(Raiser, error_grace=0.05) as wg:
        pids = wg.pids
        pending = wg.fail_or_hold(started, release)
        queued = wg.ping()
        await failure(pending)
        assert isinstance(await failure(queued), GroupBrokenError)
        with pytest.raises(GroupBrokenError, match="fail_or_hold"):
            wg.ping()
        assert wg.state == "broken"
        assert not wg.alive
        await bounded(wg.shutdown())
        assert alive(pids) == []


@pytest.mark.parametrize("of_the_call", [False, True])
async def test_on_error_wait_leaves_the_others_running_and_later_calls_queue_behind(
    fifo: Callable[[], Fifo], of_the_call: bool
) -> None:
    """E-3."""
    started, release = fifo(), fifo()
    options: dict[str, Any] = {} if of_the_call else {"on_error": "wait"}
    async with group(Raiser, 2, error_grace=0.05, **options) as wg:
        method = wg.fail_or_hold.options(on_error="wait") if of_the_call else wg.fail_or_hold
        error = await failure(method(started, release))
        assert isinstance(error, WorkerGroupError)
        following = wg.ping()
        assert wg.alive
        release.put()
        assert await bounded(following) == [0, 1]


async def test_a_group_stays_usable_when_every_rank_has_answered_within_the_grace() -> None:
    """E-3."""
    async with group(Raiser, error_grace=30) as wg:
        for _ in range(3):
            with pytest.raises(WorkerGroupError):
                await bounded(wg.throw("odd"))
        assert await in_step(wg)


async def test_a_failure_beside_a_collective_is_told_long_before_its_timeout(
    torch_with_its_pipe: None,
) -> None:
    """The error came late or never: https://github.com/dmlc/xgboost/issues/11217. E-3."""
    async with group(Mortal, preload=None, error_grace=0.5) as wg:
        loop = asyncio.get_running_loop()
        call = wg.fail_beside_a_collective()
        answers = call.as_completed()
        await bounded(anext(answers))
        failed_at = loop.time()
        error = await failure(call)
        assert loop.time() - failed_at < 100  # the collective waits for 600
        await answers.aclose()
    assert isinstance(error, WorkerGroupError)
    first = error.exceptions[0]
    assert isinstance(first, ValueError)
    assert (str(first), rank_of(first)) == ("bad row 7", 0)
