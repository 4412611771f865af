"""Two groups are one process group for a while, and one gives its state to the other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

import asyncwg
from asyncwg import GroupBrokenError, UsageError, WorkerGroup, WorkerGroupError
from tests.leaks import bounded
from tests.process.workers_link import Rollout, Trainer
from tests.process.workers_values import group
from tests.times import GRACE

BACKENDS = pytest.mark.parametrize("backend", [None, "gloo"])


@pytest.fixture
def grace() -> float:
    """Seconds that ranks have after the first failure; tests of those that never answer give others."""
    return GRACE


@pytest_asyncio.fixture
async def trainer(torch_with_its_pipe: None, grace: float) -> AsyncIterator[WorkerGroup]:
    async with group(Trainer, 2, error_grace=grace) as started:
        yield started


@pytest_asyncio.fixture
async def rollout(torch_with_its_pipe: None, grace: float) -> AsyncIterator[WorkerGroup]:
    async with group(Rollout, 2, error_grace=grace) as started:
        yield started


async def test_the_ranks_of_both_are_one_process_group_and_keep_their_own(
    trainer: WorkerGroup, rollout: WorkerGroup
) -> None:
    await bounded(trainer.init())
    await bounded(rollout.init())
    async with asyncwg.link(trainer, rollout, name="weights") as link:
        assert await bounded(link.both.linked_sum("weights")) == [6.0] * 4
        assert await bounded(trainer.own_sum()) == [2.0] * 2
    assert await bounded(rollout.own_sum()) == [2.0] * 2


async def test_no_default_group_is_needed_and_none_is_made(
    trainer: WorkerGroup, rollout: WorkerGroup
) -> None:
    async with asyncwg.link(trainer, rollout) as link:
        assert link.name == "Trainer-Rollout"
        assert await bounded(link.both.linked_sum(link.name)) == [6.0] * 4
        assert await bounded(link.both.run(_has_default_group)) == [False] * 4
    assert await bounded(trainer.run(lambda worker: list(worker.links))) == [[], []]


def _has_default_group(_worker: object) -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


async def test_groups_can_be_linked_again_and_twice_at_once(
    trainer: WorkerGroup, rollout: WorkerGroup
) -> None:
    for _ in range(2):
        async with (
            asyncwg.link(trainer, rollout, name="a") as a,
            asyncwg.link(rollout, trainer, name="b") as b,
        ):
            assert await bounded(a.both.linked_sum("a")) == [6.0] * 4
            assert await bounded(b.both.linked_sum("b")) == [6.0] * 4


@BACKENDS
@pytest.mark.parametrize("how", ["state load", "state_async load_async"])
async def test_a_state_arrives_as_it_was_on_every_rank_of_the_other_side(
    trainer: WorkerGroup, rollout: WorkerGroup, backend: str | None, how: str
) -> None:
    """Of every dtype and layout, in many buckets and in one."""
    give, take = how.split()
    async with asyncwg.link(trainer, rollout, backend) as link:
        assert await bounded(link.broadcast_state(give, take)) == [True, True]
        assert await bounded(link.broadcast_state(give, take, bucket=1000)) == [True, True]


async def test_views_of_one_rank_can_be_linked(trainer: WorkerGroup, rollout: WorkerGroup) -> None:
    async with asyncwg.link(trainer[0], rollout[1]) as link:
        assert await bounded(link.broadcast_state("state", "load")) == [True]
    async with asyncwg.link(trainer[0], rollout[1], "gloo") as link:
        assert await bounded(link.broadcast_state("state", "load")) == [True]


async def test_a_state_is_loaded_while_async_methods_are_served(
    trainer: WorkerGroup, rollout: WorkerGroup
) -> None:
    async with asyncwg.link(trainer, rollout, "gloo") as link:
        loading = link.broadcast_state("state", "load")
        assert await bounded(rollout.ping()) == [0, 1]
        assert await bounded(loading) == [True, True]


@pytest.mark.parametrize(("backend", "grace"), [(None, GRACE), ("gloo", 0.2)])
async def test_a_state_that_can_not_be_made_is_told(
    trainer: WorkerGroup, rollout: WorkerGroup, backend: str | None
) -> None:
    """Through a process group, the other side waits for it, and is ended too."""
    with pytest.raises(WorkerGroupError) as caught:
        async with asyncwg.link(trainer, rollout, backend) as link:
            await bounded(link.broadcast_state("fail", "load"))
    assert caught.group_contains(ValueError, match="no state today")
    if backend is None:
        assert await bounded(rollout.ping()) == [0, 1]
    else:
        with pytest.raises(GroupBrokenError):
            rollout.ping()


@BACKENDS
async def test_a_state_that_can_not_be_loaded_is_told_and_both_stay_usable(
    trainer: WorkerGroup, rollout: WorkerGroup, backend: str | None
) -> None:
    async with asyncwg.link(trainer, rollout, backend) as link:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(link.broadcast_state("state", "refuse"))
        assert caught.group_contains(ValueError, match="does not fit")
        assert await bounded(link.broadcast_state("state", "load")) == [True, True]


async def test_what_is_no_state_is_refused(trainer: WorkerGroup, rollout: WorkerGroup) -> None:
    async with asyncwg.link(trainer, rollout) as link:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(link.broadcast_state("no_state", "load"))
        assert caught.group_contains(UsageError, match="state dict")


async def test_misuse_is_told_before_a_rank_gets_a_byte(
    trainer: WorkerGroup, rollout: WorkerGroup
) -> None:
    link = asyncwg.link(trainer, rollout)
    with pytest.raises(UsageError, match="not open"):
        await link.broadcast_state("state", "load")
    async with link:
        with pytest.raises(AttributeError, match="'staet'"):
            await link.broadcast_state("staet", "load")
        with pytest.raises(UsageError, match="open already"):
            await link.__aenter__()
    with pytest.raises(UsageError, match="backend"):
        asyncwg.link(trainer, rollout, "mpi")
    with pytest.raises(UsageError, match="twice"):
        asyncwg.link(trainer, trainer)
