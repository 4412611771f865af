"""Meshes from torch's ``DeviceMesh``, over real ranks that have joined ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from asyncwg import (
    ClassWithInitArgs,
    Dispatch,
    DispatchError,
    DistGlobalInfo,
    UsageError,
    Worker,
    WorkerGroupError,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from tests.leaks import bounded
from tests.process.workers_colocated import Outer, group_of
from tests.process.workers_life import Fifo
from tests.process.workers_values import group

JOIN = 60.0
"""Seconds that joining may take on a busy machine."""

pytestmark = pytest.mark.usefixtures("torch_with_its_pipe")


class Meshed(Worker):
    """Joins, makes a mesh, and registers it while it is set up."""

    def __init__(self, shape: Sequence[int], names: Sequence[str], **given: Any) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.names = tuple(names)
        self.given = given

    def setup(self) -> None:
        self.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=self.names)
        self.register_mesh("train", self.mesh, **self.given)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def tag(self, batch: torch.Tensor) -> torch.Tensor:
        """Say which rank had which row."""
        return torch.stack([batch, torch.full_like(batch, self.rank)], dim=1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_over(self, name: str, value: float) -> float:
        tensor = torch.tensor([value])
        torch.distributed.all_reduce(tensor, group=self.mesh.get_group(name))
        return float(tensor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def register_slice(self, name: str) -> None:
        self.register_mesh("slice", self.mesh[name], name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def register_more(self, sizes: Mapping[str, int]) -> None:
        self.register_mesh("sizes", DistGlobalInfo(**sizes))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("sizes"))
    def tag_by_sizes(self, batch: torch.Tensor) -> torch.Tensor:
        return self.tag(batch)


def listed(tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = tensor.tolist()
    return values


async def test_a_device_mesh_is_registered_in_one_line_and_known_after_the_start() -> None:
    async with group(Meshed, 4, [2, 2], ["dp", "tp"]) as wg:
        assert wg.dp_size("train") == 2
        tagged = await bounded(wg.tag(batch=torch.arange(4)))
        assert listed(tagged) == [[0, 0], [1, 0], [2, 2], [3, 2]]
        # The rows went to the ranks that torch's own groups hold together.
        assert await bounded(wg.sum_over("tp", 1.0), JOIN) == [2.0] * 4
        with pytest.raises(DispatchError, match="its rows would be lost"):
            wg[:2].tag(torch.arange(4))
        both = await bounded(wg[::2].tag(torch.arange(4)))
        assert listed(both) == [[0, 0], [1, 0], [2, 2], [3, 2]]


async def test_a_mesh_is_known_while_its_ranks_are_busy(fifo: Callable[[], Fifo]) -> None:
    """The first call over a mesh asked the ranks for it, behind what they were running (VERL.md, 1.6)."""
    gate = fifo()
    places = [(0, True), (1, True)]
    async with group_of(ClassWithInitArgs(Outer, places, places)) as wg:
        running = wg.run(lambda _worker, permit: permit.take(), gate)
        assert wg.dp_size("actor") == 2
        call = wg.tag([1, 2])
        assert not running.done()
        gate.put(2)
        assert await bounded(call) == [(1, 0, "inner"), (2, 1, "inner")]
        await bounded(running)


async def test_a_slice_of_a_mesh_is_refused() -> None:
    async with group(Meshed, 4, [2, 2], ["dp", "tp"]) as wg:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.register_slice("dp"))
        for error in caught.value.exceptions:
            assert isinstance(error, UsageError)
            assert "has 2 ranks and the group 4: register the whole mesh" in str(error)
        with pytest.raises(DispatchError, match="is not registered"):
            wg.dp_size("slice")


async def test_sizes_register_megatrons_order_in_a_method() -> None:
    """Ranks 0, 1 are tp 0, 1 of the first stage; 2, 3 those of the last, whose results count."""
    async with group(Meshed, 4, [4], ["dp"]) as wg:
        await bounded(wg.register_more({"tp_size": 2, "dp_size": 1, "pp_size": 2}))
        assert wg.dp_size("sizes") == 1
        assert listed(await bounded(wg.tag_by_sizes(torch.arange(2)))) == [[0, 2], [1, 2]]


async def test_roles_that_each_join_and_make_a_mesh_do_so_side_by_side() -> None:
    """A process joins torch.distributed once, whichever role comes first."""
    roles = {
        "actor": ClassWithInitArgs(Meshed, [2, 1], ["dp", "tp"]),
        "critic": ClassWithInitArgs(Meshed, [1, 2], ["dp", "tp"], collect={"tp": -1}),
    }
    async with group_of(create_colocated_worker_cls(roles), 2, preload=None) as wg:
        wg.fuse()
        assert (wg.actor.dp_size("train"), wg.critic.dp_size("train")) == (2, 1)
        assert await bounded(wg.critic.sum_over("tp", 1.0), JOIN) == [2.0, 2.0]
        rows = torch.arange(2)
        assert listed(await bounded(wg.actor.tag(rows))) == [[0, 0], [1, 1]]
        assert listed(await bounded(wg.critic.tag(rows))) == [[0, 1], [1, 1]]


async def test_a_role_that_joins_with_another_backend_is_told() -> None:
    def join(role: Worker, backend: str) -> None:
        role.init_process_group(backend)

    async with group(Meshed, 1, [1], ["dp"]) as wg:
        await bounded(wg.run(join, "gloo"), JOIN)
        await bounded(wg.run(join, "cpu:gloo"), JOIN)
        with pytest.raises(UsageError, match=r"has joined .* already, so not with 'nccl' too"):
            await bounded(wg[0].run(join, "nccl"), JOIN)
