"""Pools under real groups: who gets which device, who may share it, and that all of it comes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from asyncwg import (
    ClassWithInitArgs,
    Dispatch,
    ResourceError,
    ResourcePool,
    ResourcePoolManager,
    Worker,
    WorkerGroup,
    WorkerStartError,
    create_colocated_worker_cls,
    merge_resource_pool,
    register,
    split_resource_pool,
)
from asyncwg._devices import MASKS
from tests.leaks import bounded


class Placed(Worker):
    """Tells where it runs; does not start where it is told so."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        if fails:
            raise ValueError("told to fail")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_name(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def node_place(self) -> tuple[int, int]:
        return self.local_rank, self.local_world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self) -> None:
        os._exit(3)


@pytest.fixture(autouse=True)
def six_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices "0" to "5" that are not there: without a driver the mask is believed."""
    monkeypatch.setattr("asyncwg._devices._ask_nvml", lambda: None)
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")


def group(pool: ResourcePool, *args: Any, **options: Any) -> WorkerGroup:
    return WorkerGroup(
        pool, ClassWithInitArgs(Placed, *args), preload=[], start_timeout=60, **options
    )


async def devices(wg: Any) -> list[str]:
    found: list[str] = await bounded(wg.device_name())
    return found


async def test_groups_in_different_pools_have_disjoint_devices() -> None:
    async with group(ResourcePool([2])) as one, group(ResourcePool([3])) as other:
        assert await devices(one) == ["0", "1"]
        assert await devices(other) == ["2", "3", "4"]


async def test_groups_in_one_pool_share_its_devices_up_to_its_limit() -> None:
    pool = ResourcePool([2], max_colocate_count=2)
    async with group(pool, name="one") as one, group(pool, name="two") as two:
        assert await devices(one) == await devices(two) == ["0", "1"]
        third = group(pool, name="three")
        with pytest.raises(ResourceError, match="max_colocate_count=2 groups may share a device"):
            await bounded(third.__aenter__())
        assert third.state == "closed"
    async with group(pool) as again:
        assert await devices(again) == ["0", "1"]


async def test_roles_that_are_colocated_are_one_group_for_the_limit() -> None:
    pool = ResourcePool([1], max_colocate_count=1)
    built = create_colocated_worker_cls(
        {"a": ClassWithInitArgs(Placed), "b": ClassWithInitArgs(Placed)}
    )
    async with WorkerGroup(pool, built, preload=[]) as wg:
        wg.fuse()
        assert await devices(wg.a) == await devices(wg.b) == ["0"]


async def test_parts_of_a_pool_run_beside_each_other_on_devices_of_their_own() -> None:
    first, second = split_resource_pool(ResourcePool([4]), 2)
    async with group(first) as one, group(second) as other:
        assert await devices(one) == ["0", "1"]
        assert await devices(other) == ["2", "3"]
        # The whole pool is held: nobody else gets the rest of it.
        with pytest.raises(ResourceError, match="3 devices are needed and 2 are free"):
            await bounded(group(ResourcePool([3])).__aenter__())


async def test_a_part_runs_alone_and_what_it_was_cut_from_is_held_with_it() -> None:
    _, second = split_resource_pool(ResourcePool([4]), [1, 3])
    async with group(second) as wg:
        assert await devices(wg) == ["1", "2", "3"]
        assert second.devices == ("1", "2", "3")
    assert not second.devices


async def test_parts_that_span_simulated_nodes_count_their_own_ranks() -> None:
    """Pools of unequal nodes had other numbers of ranks than of workers (VERL.md, 3.1, 6)."""
    parts = split_resource_pool(ResourcePool([2, 3]), [3, 2])
    async with group(parts[0]) as one, group(parts[1]) as other:
        assert (one.world_size, other.world_size) == (3, 2)
        assert await devices(one) == ["0", "1", "2"]
        assert await bounded(one.node_place()) == [(0, 2), (1, 2), (0, 1)]
        assert await devices(other) == ["3", "4"]
        assert await bounded(other.node_place()) == [(0, 2), (1, 2)]


async def test_a_part_that_is_split_again_keeps_its_places() -> None:
    """Placement groups came sorted or not, so ranks moved (VERL.md, 3.1, 9)."""
    _, right = split_resource_pool(ResourcePool([2, 2]), 2)
    first, second = split_resource_pool(right, [1, 1])
    async with group(second) as one, group(first) as other:
        assert await devices(one) == ["3"]
        assert await devices(other) == ["2"]


async def test_a_merged_pool_has_the_ranks_of_both_in_order() -> None:
    first, second = ResourcePool([1]), ResourcePool([2])
    async with group(second) as held, group(merge_resource_pool(first, second)) as both:
        assert await devices(held) == ["0", "1"]
        # It was taken already for the group that was there first.
        assert await devices(both) == ["2", "0", "1"]
        assert await bounded(both.node_place()) == [(0, 1), (0, 2), (1, 2)]


async def test_groups_of_a_merged_pool_and_its_parts_count_together() -> None:
    first, second = (ResourcePool([1], max_colocate_count=1) for _ in range(2))
    async with group(second):
        with pytest.raises(ResourceError, match="max_colocate_count=1"):
            await bounded(group(merge_resource_pool(first, second)).__aenter__())
        assert not first.devices  # what it got of the first pool was given back


async def test_roles_run_in_the_pools_that_they_are_mapped_to() -> None:
    manager = ResourcePoolManager(
        resource_pool_spec={"train": [2], "rollout": [1, 1]},
        mapping={"actor": "train", "critic": "train", "rollout": "rollout"},
    )
    manager.create_resource_pool()
    assert manager.get_n_gpus() == 4
    pools = [manager.get_resource_pool(role) for role in ("actor", "critic", "rollout")]
    assert pools[0] is pools[1]
    async with group(pools[0]) as actor, group(pools[1]) as critic, group(pools[2]) as rollout:
        assert await devices(actor) == await devices(critic) == ["0", "1"]
        assert await devices(rollout) == ["2", "3"]
        assert await bounded(rollout.node_place()) == [(0, 1), (0, 1)]


async def shut_down(wg: WorkerGroup) -> None:
    await bounded(wg.shutdown())


async def dies(wg: WorkerGroup) -> None:
    with pytest.raises(Exception, match="exit code 3"):
        await bounded(wg[0].die())
    await bounded(wg.shutdown())


@pytest.mark.parametrize("end", [shut_down, dies])
async def test_devices_come_back_when_the_group_ends(end: Callable[[WorkerGroup], Any]) -> None:
    pool = ResourcePool([6])
    wg = await WorkerGroup.start(pool, ClassWithInitArgs(Placed), preload=[])
    assert len(pool.devices) == 6
    await end(wg)
    assert not pool.devices
    async with group(ResourcePool([6])) as other:
        assert len(await devices(other)) == 6


async def test_devices_come_back_when_a_start_fails() -> None:
    pool = ResourcePool([6])
    with pytest.raises(WorkerStartError):
        await bounded(group(pool, True).__aenter__())
    assert not pool.devices


async def test_a_group_keeps_its_devices_over_a_restart() -> None:
    pool = ResourcePool([2])
    async with group(pool) as wg:
        before = await devices(wg)
        await bounded(wg.restart())
        assert await devices(wg) == before
        assert pool.devices == ("0", "1")
    assert not pool.devices
