"""What can be done with a ``Call``, with views, and with the ways to make calls."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from asyncwg import Call, GroupClosedError, PerRank, UsageError, WorkerDiedError, WorkerGroupError
from tests.leaks import PATIENCE, bounded
from tests.process.workers_life import AsyncSteps, Fifo, Mortal, Steps, group


async def test_a_call_is_sent_at_once_and_not_when_it_is_awaited(loop_kind: str) -> None:
    async with group(Steps, 1) as wg:
        call = wg.note("sent")
        assert await bounded(wg.notes()) == [["sent"]]
        assert await bounded(call) == ["sent"]


async def test_a_call_can_be_awaited_many_times(loop_kind: str) -> None:
    async with group(Steps, 1) as wg:
        call = wg.note("once")
        assert [await bounded(call), await bounded(call)] == [["once"], ["once"]]
        assert await bounded(wg.notes()) == [["once"]]


async def test_many_tasks_can_await_one_call_at_once(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        call = wg.hold(started, release, "v")

        async def wait() -> Any:
            return await call

        waiting = [asyncio.create_task(wait()) for _ in range(3)]
        await bounded(started.taken())
        release.put()
        assert await bounded(asyncio.gather(*waiting)) == [["v"]] * 3


async def test_a_failed_call_raises_each_time_it_is_awaited() -> None:
    async with group(Steps) as wg:
        call = wg[0].fail("again")
        for _ in range(2):
            with pytest.raises(ValueError, match="again"):
                await bounded(call)


async def test_gather_takes_calls(loop_kind: str) -> None:
    async with group(Steps) as wg:
        calls = [wg.echo(number) for number in range(5)]
        assert await bounded(asyncio.gather(*calls, calls[0])) == [
            [n, n] for n in (0, 1, 2, 3, 4, 0)
        ]


async def test_gather_with_return_exceptions_takes_failing_calls() -> None:
    async with group(Steps) as wg:
        good, bad = await bounded(asyncio.gather(wg.echo(1), wg.fail("no"), return_exceptions=True))
        assert good == [1, 1]
        assert isinstance(bad, WorkerGroupError)


async def test_wait_for_takes_a_call(loop_kind: str) -> None:
    async with group(Steps) as wg:
        assert await asyncio.wait_for(wg.echo(1), PATIENCE) == [1, 1]


async def test_timeout_takes_a_call(loop_kind: str) -> None:
    async with group(Steps) as wg:
        async with asyncio.timeout(PATIENCE):
            assert await wg.echo(1) == [1, 1]


async def test_as_completed_takes_calls(fifo: Callable[[], Fifo], loop_kind: str) -> None:
    started, release = fifo(), fifo()
    async with group(Steps) as wg:
        slow, fast = wg[0].hold(started, release, "slow"), wg[1].echo("fast")
        completed = asyncio.as_completed([slow, fast])
        assert await bounded(next(completed)) == "fast"
        release.put()
        assert await bounded(next(completed)) == "slow"


async def test_create_task_takes_a_call(loop_kind: str) -> None:
    async with group(Steps) as wg:
        assert await bounded(asyncio.create_task(wg.echo(1))) == [1, 1]


async def test_a_task_group_takes_one_call_several_times(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        call = wg.hold(started, release, "v")
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(call) for _ in range(3)]
            await started.taken()
            release.put()
        assert [task.result() for task in made] == [["v"]] * 3
        assert await bounded(asyncio.create_task(call)) == ["v"]


async def test_a_task_group_takes_a_call_that_is_done_several_times() -> None:
    async with group(Steps, 1) as wg:
        call = wg.echo("v")
        await bounded(call)
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            made = [tasks.create_task(call) for _ in range(2)]
        assert [task.result() for task in made] == [["v"]] * 2


async def test_ensure_future_makes_a_call_fit_for_wait(loop_kind: str) -> None:
    """As the documentation says: asyncio.wait refuses what could be a coroutine."""
    async with group(Steps) as wg:
        done, pending = await asyncio.wait({asyncio.create_task(wg.echo(1))}, timeout=PATIENCE)
        assert not pending
        assert done.pop().result() == [1, 1]


async def test_cancelling_one_awaiter_cancels_the_call_for_everyone(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        call = wg.hold(started, release)
        first, second = asyncio.create_task(call), asyncio.create_task(call)
        await bounded(started.taken())
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(second)
        assert call.cancelled()
        release.put()


async def test_shield_waits_without_owning_the_call(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        call = wg.hold(started, release, "v")
        await bounded(started.taken())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(call), 0.01)
        assert not call.done()
        release.put()
        assert await bounded(call) == ["v"]


async def test_a_timeout_of_wait_for_cancels_the_call(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        call = wg.hold(started, release)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.01)
        assert call.cancelled()
        release.put()


async def test_results_gives_every_ranks_own_with_exceptions_in_place(loop_kind: str) -> None:
    async with group(Steps, 3) as wg:
        first, second, third = await bounded(wg.fail("no", rank=1).results())
        assert (first, third) == (0, 2)
        assert isinstance(second, ValueError)
        assert second.rank == 1  # type: ignore[attr-defined]  # set by the group


async def test_results_of_a_call_that_a_death_ended_has_it_in_the_silent_ranks_places(
    fifo: Callable[[], Fifo],
) -> None:
    async with group(Mortal) as wg:
        results = await bounded(wg.die_after(fifo()).results())
        assert [type(each) for each in results] == [WorkerDiedError] * 2


async def test_as_completed_of_a_call_gives_ranks_as_they_answer(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 3) as wg:
        wg[0].hold(started, release)
        answers = wg.echo("v").as_completed()
        early = {await bounded(anext(answers)), await bounded(anext(answers))}
        assert early == {(1, "v"), (2, "v")}
        release.put()
        assert [each async for each in answers] == [(0, "v")]


async def test_as_completed_has_exceptions_in_place_of_values() -> None:
    async with group(Steps) as wg:
        found = {rank: value async for rank, value in wg.fail("no", rank=1).as_completed()}
        assert found[0] == 0
        assert isinstance(found[1], ValueError)


async def test_a_failed_call_that_nobody_looked_at_is_reported(loop_kind: str) -> None:
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reports.append(context))
    async with group(Steps, 1) as wg:
        wg.fail("overlooked")
        await bounded(wg.echo())
        gc.collect()
        assert len(reports) == 1
        assert "overlooked" in str(reports[0]["exception"].exceptions)


async def test_a_failed_call_that_somebody_looked_at_is_not_reported(loop_kind: str) -> None:
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reports.append(context))
    async with group(Steps, 1) as wg:
        call = wg.fail("seen")
        with pytest.raises(WorkerGroupError):
            await bounded(call)
        await bounded(wg[0].fail("seen").results())
        del call
        gc.collect()
        assert reports == []


async def test_calls_that_a_shutdown_cuts_off_are_told_so_and_not_reported(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: reports.append(context))
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        wg.hold(started, release)
        call = wg.echo()
        await bounded(started.taken())
        ending = asyncio.create_task(wg.shutdown())
        with pytest.raises(GroupClosedError):
            await bounded(call)
        release.put()
        await bounded(ending)
    del call
    gc.collect()
    assert reports == []


async def test_a_call_is_an_argument_before_it_has_a_value(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg, group(Steps, 1) as other:
        source = wg[0].hold(started, release, 21)
        call = other[0].doubled(source)
        await bounded(started.taken())
        assert not call.done()
        release.put()
        assert await bounded(call) == 42


async def test_a_call_of_the_same_group_is_an_argument() -> None:
    async with group(Steps, 1) as wg:
        assert await bounded(wg[0].doubled(wg[0].doubled(10))) == 40


async def test_a_call_is_found_in_a_container(loop_kind: str) -> None:
    async with group(Steps) as wg:
        values = {"a": [wg[0].doubled(1), 10, wg[1].doubled(2)]}
        assert await bounded(wg.total(values)) == [16, 16]


async def test_a_call_among_keyword_arguments_is_found() -> None:
    async with group(Steps, 1) as wg:
        assert await bounded(wg[0].rank_and_value(extra=wg[0].doubled(2))) == (0, None, 4)


async def test_one_call_stands_in_several_places() -> None:
    async with group(Steps, 1) as wg:
        source = wg[0].doubled(3)
        assert await bounded(wg[0].rank_and_value(source, extra=[source])) == (0, 6, [6])


async def test_a_call_that_is_done_is_an_argument() -> None:
    async with group(Steps, 1) as wg:
        source = wg[0].doubled(3)
        await bounded(source)
        assert await bounded(wg[0].doubled(source)) == 12


async def test_a_waiting_call_keeps_its_place_in_the_order(
    fifo: Callable[[], Fifo], loop_kind: str
) -> None:
    """O-1."""
    started, release = fifo(), fifo()
    async with group(Steps, 1) as source, group(Steps) as wg:
        needed = source[0].hold(started, release, "needed")
        wg.note("before")
        wg.note(needed)
        after = wg.note("after")
        await bounded(started.taken())
        release.put()
        await bounded(after)
        assert await bounded(wg.notes()) == [["before", "needed", "after"]] * 2


async def test_calls_on_other_ranks_pass_a_waiting_call(fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as source, group(Steps) as wg:
        waiting = wg[0].note(source[0].hold(started, release, "needed"))
        assert await bounded(wg[1].note("passes")) == "passes"
        assert not waiting.done()
        release.put()
        assert await bounded(waiting) == "needed"


async def test_the_error_of_an_argument_becomes_the_error_of_the_call(loop_kind: str) -> None:
    async with group(Steps, 1) as wg:
        source = wg[0].fail("first")
        following = wg[0].note("after")
        with pytest.raises(ValueError, match="first"):
            await bounded(wg[0].note(source))
        await bounded(following)
        assert await bounded(wg[0].notes()) == ["after"]


async def test_a_cancelled_argument_cancels_the_call(fifo: Callable[[], Fifo]) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as source, group(Steps, 1) as wg:
        needed = source[0].hold(started, release)
        waiting, following = wg[0].note(needed), wg[0].echo("goes on")
        await bounded(started.taken())
        needed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(waiting)
        assert await bounded(following) == "goes on"
        release.put()


async def test_a_waiting_call_that_is_cancelled_is_never_sent(fifo: Callable[[], Fifo]) -> None:
    """E-5."""
    started, release = fifo(), fifo()
    async with group(Steps, 1) as source, group(Steps, 1) as wg:
        needed = source[0].hold(started, release, "needed")
        waiting = wg[0].note(needed)
        following = wg[0].note("following")
        waiting.cancel()
        assert await bounded(following) == "following"
        release.put()
        await bounded(needed)
        assert await bounded(wg[0].notes()) == ["following"]


async def test_the_other_arguments_of_a_waiting_call_are_taken_at_the_call(
    fifo: Callable[[], Fifo],
) -> None:
    """O-7."""
    started, release = fifo(), fifo()
    async with group(Steps, 1) as source, group(Steps, 1) as wg:
        mutable = [1]
        waiting = wg[0].rank_and_value(source[0].hold(started, release, "v"), extra=mutable)
        mutable.append(2)
        release.put()
        assert await bounded(waiting) == (0, "v", [1])


async def test_arguments_are_taken_at_the_call(fifo: Callable[[], Fifo], loop_kind: str) -> None:
    """O-7: also those that the socket can't take at once."""
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        wg.hold(started, release)
        await bounded(started.taken())
        data = bytearray(3_000_000)
        call = wg[0].echo(data)
        data[:] = b"x" * len(data)
        release.put()
        assert await bounded(call) == bytes(3_000_000)


async def test_a_call_that_can_not_be_right_does_not_wait_for_its_arguments(
    fifo: Callable[[], Fifo],
) -> None:
    started, release = fifo(), fifo()
    async with group(Steps, 1) as wg:
        needed = wg[0].hold(started, release)
        with pytest.raises(TypeError, match="doubled"):
            wg[0].doubled(needed, 1, 2)
        release.put()
        await bounded(needed)


async def test_a_view_on_one_rank_gives_a_value() -> None:
    async with group(Steps, 3) as wg:
        assert await bounded(wg[0].rank_and_value("v")) == (0, "v", None)
        assert await bounded(wg.rank(2).rank_and_value("v")) == (2, "v", None)


async def test_a_slice_of_one_rank_gives_a_list() -> None:
    async with group(Steps, 3) as wg:
        assert await bounded(wg[0:1].rank_and_value("v")) == [(0, "v", None)]


async def test_a_view_on_some_ranks_calls_these_alone() -> None:
    async with group(Steps, 4) as wg:
        view = wg[1:3]
        assert view.world_size == 2
        assert [rank for rank, *_ in await bounded(view.rank_and_value())] == [1, 2]
        await bounded(view.note("x"))
        assert await bounded(wg.notes()) == [[], ["x"], ["x"], []]


async def test_indices_of_a_view_are_relative_and_may_be_negative() -> None:
    async with group(Steps, 4) as wg:
        assert (await bounded(wg[-1].rank_and_value()))[0] == 3
        assert (await bounded(wg[1:][0].rank_and_value()))[0] == 1
        assert (await bounded(wg[1:3][-1].rank_and_value()))[0] == 2
        assert [r for r, *_ in await bounded(wg[-2:].rank_and_value())] == [2, 3]
        assert [r for r, *_ in await bounded(wg[1:][1:].rank_and_value())] == [2, 3]


async def test_a_view_backwards_has_its_first_rank_first() -> None:
    async with group(Steps, 3) as wg:
        assert [r for r, *_ in await bounded(wg[::-1].rank_and_value())] == [2, 1, 0]
        assert (await bounded(wg[::-1].execute_rank_zero("plain", "v"))) == (2, "v")


async def test_rank_zero_of_a_view_is_its_first_rank() -> None:
    async with group(Steps, 3) as wg:
        assert await bounded(wg[1:].on_rank_zero("v")) == (1, "v")
        assert await bounded(wg[1:].execute_rank_zero("plain", "v")) == (1, "v")


async def test_per_rank_arguments_are_counted_by_the_view() -> None:
    async with group(Steps, 3) as wg:
        assert await bounded(wg[1:].echo(PerRank(["a", "b"]))) == ["a", "b"]
        with pytest.raises(UsageError, match="2"):
            wg[1:].echo(PerRank(["a", "b", "c"]))


async def test_there_is_no_view_on_a_rank_that_does_not_exist() -> None:
    async with group(Steps) as wg:
        with pytest.raises(IndexError, match="no rank 2"):
            wg[2]
        with pytest.raises(IndexError, match="no rank"):
            wg[2:]


async def test_execute_all_calls_a_method_that_is_not_registered(loop_kind: str) -> None:
    async with group(Steps) as wg:
        assert await bounded(wg.execute_all("plain", "v")) == [(0, "v"), (1, "v")]


async def test_execute_all_calls_an_async_method_that_is_not_registered() -> None:
    async with group(AsyncSteps) as wg:
        assert await bounded(wg.execute_all("echo_async", "v")) == ["v", "v"]


async def test_execute_rank_zero_gives_a_value() -> None:
    async with group(Steps) as wg:
        assert await bounded(wg.execute_rank_zero("plain", "v")) == (0, "v")


async def test_run_calls_a_function_with_each_worker(loop_kind: str) -> None:
    async with group(Steps) as wg:
        offset = 40
        assert await bounded(wg.run(lambda worker, n: worker.rank + offset + n, 2)) == [42, 43]


async def test_call_takes_the_method_itself() -> None:
    async with group(Steps) as wg:
        assert await bounded(wg.call(Steps.doubled, 4)) == [8, 8]
        assert await bounded(wg[1].call(Steps.doubled, 4)) == 8


async def test_a_misspelt_method_is_an_attribute_error_with_the_nearest_name() -> None:
    async with group(Steps) as wg:
        with pytest.raises(AttributeError, match=r"'dubled'.*'doubled'"):
            wg.dubled(1)
        with pytest.raises(AttributeError, match=r"'dubled'.*'doubled'"):
            wg[0].dubled(1)
        with pytest.raises(AttributeError, match=r"'plian'.*'plain'"):
            wg.execute_all("plian")


async def test_a_method_that_is_not_registered_says_how_to_call_it() -> None:
    async with group(Steps) as wg:
        with pytest.raises(AttributeError, match=r"not registered.*@register.*execute_all"):
            wg.plain(1)


async def test_arguments_that_do_not_fit_are_a_type_error_at_the_call() -> None:
    async with group(Steps) as wg:
        with pytest.raises(TypeError, match=r"Steps\.doubled.*value"):
            wg.doubled()
        with pytest.raises(TypeError, match=r"Steps\.doubled.*valve"):
            wg.doubled(1, valve=1)
        assert await bounded(wg.notes()) == [[], []]


async def test_a_proxy_has_the_methods_name_documentation_and_signature() -> None:
    async with group(Steps) as wg:
        for surface in (wg, wg[0], wg[0:1], wg.any):
            assert surface.doubled.__name__ == "doubled"
            assert surface.doubled.__doc__ == "Double it."
            assert str(inspect.signature(surface.doubled)) == "(value: 'int') -> 'int'"
            assert {"doubled", "hold"} <= set(dir(surface))
            assert "plain" not in dir(surface)


async def test_an_unknown_option_of_a_call_is_a_type_error_with_the_nearest_name() -> None:
    async with group(Steps) as wg:
        with pytest.raises(TypeError, match=r"'timeuot'.*'timeout'"):
            wg.echo.options(timeuot=3)


async def test_options_leave_the_proxy_as_it_was() -> None:
    async with group(Steps, 1) as wg:
        wg.remaining.options(timeout=50)
        assert await bounded(wg.remaining()) == [None]


async def test_a_call_is_what_proxies_return() -> None:
    async with group(Steps, 1) as wg:
        call = wg.echo(1)
        assert isinstance(call, Call)
        assert "Steps.echo pending" in repr(call)
        await bounded(call)
        assert "Steps.echo done" in repr(call)
