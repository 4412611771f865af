"""The three modes. All that differs is who waits for whom."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from asyncwg import Rows, RowsClosed

from .run import Run
from .sampler import Group


async def synchronous(run: Run) -> None:
    """Sample, learn, and only then sample again: every answer is by the latest weights."""
    async for _ in run.steps():
        groups = await run.sample()
        await run.learn(groups)
        await run.publish()


async def one_step_off(run: Run) -> None:
    """Learn from a batch while the next one is sampled by the weights from before."""
    coming = asyncio.create_task(run.sample())
    async for _ in run.steps():
        groups = await coming
        await run.publish()  # between two batches: each is by one version of the weights
        coming = asyncio.create_task(run.sample())
        await run.learn(groups)
    coming.cancel()


async def asynchronous(run: Run) -> None:
    """Sample without end, and learn from whatever is finished and not too old.

    New weights interrupt the answers that are under way; these go on with the new ones.
    """
    size = run.settings.questions
    rows: Rows[Group] = Rows(maxsize=size, max_staleness=run.settings.most_stale)
    interrupted: list[Group] = []

    async def work() -> AsyncIterator[Group]:
        while True:
            yield interrupted.pop(0) if interrupted else run.question()

    async def sample() -> None:
        groups = run.rollout.map("generate", work(), max_inflight=run.in_flight)
        try:
            async for group in groups:
                if group.finished:
                    await rows.put(group, version=group.version)
                else:
                    interrupted.append(group)
        except RowsClosed:
            pass

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sample())
        async for _ in run.steps():
            groups = await rows.take(size)
            await run.learn(groups)
            rows.advance()  # before the weights are out: no row may be from the future
            await run.rollout.pause()
            await run.publish()
            await run.rollout.resume()
        run.note(rows.statistics())
        rows.close()


MODES: dict[str, Callable[[Run], Awaitable[None]]] = {
    "synchronous": synchronous,
    "one-step-off": one_step_off,
    "asynchronous": asynchronous,
}
