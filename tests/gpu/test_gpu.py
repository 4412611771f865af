"""What only a GPU can show. Skipped where torch sees none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncwg import ClassWithInitArgs, Dispatch, ResourcePool, Worker, WorkerGroup, register
from tests.leaks import bounded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

START = 120.0
"""Seconds that CUDA and NCCL are given to wake up."""


class OnDevice(Worker):
    """Computes on its GPU."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def devices(self) -> tuple[int, str, str, int]:
        """How many it sees, which it is on, what that is, and its place on the node."""
        return (
            torch.cuda.device_count(),
            str(self.device),
            str(torch.cuda.get_device_properties(0).uuid),
            self.local_rank,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join(self) -> str:
        self.init_process_group()
        return dist.get_backend()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def summed(self) -> float:
        tensor = torch.full((1024,), float(self.rank + 1), device=self.device)
        dist.all_reduce(tensor)
        return float(tensor[0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def made(self, count: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tensor = (torch.arange(count, device=self.device) % 100).to(dtype)
        return {"whole": tensor, "steps": tensor[::2], "grad": tensor.float().requires_grad_() * 2}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def made_async(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, to_device=True)
    def placed(self, value: Any) -> tuple[str, float]:
        return str(value["x"].device), float(value["x"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def doubled(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.to(self.device) * 2

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on_device(self) -> None:
        torch.zeros(2, device=self.device).add_(torch.zeros(3, device=self.device))


def group(ranks: int | None = None, **options: Any) -> WorkerGroup:
    """Return a group with a rank for each GPU, two at most, not started."""
    size = min(2, torch.cuda.device_count()) if ranks is None else ranks
    pool = ResourcePool([size], use_gpu=True)
    return WorkerGroup(pool, ClassWithInitArgs(OnDevice), start_timeout=START, **options)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
async def test_each_rank_sees_one_device_and_every_rank_another(start_method: str) -> None:
    """All ranks took device 0: https://github.com/NovaSky-AI/SkyRL/pull/1592."""
    async with group(start_method=start_method) as wg:
        seen = await bounded(wg.devices(), START)
        assert [(count, device) for count, device, _, _ in seen] == [(1, "cuda:0")] * wg.world_size
        assert len({uuid for _, _, uuid, _ in seen}) == wg.world_size
        assert [local_rank for *_, local_rank in seen] == list(range(wg.world_size))


async def test_ranks_meet_by_nccl() -> None:
    async with group() as wg:
        assert await bounded(wg.join(), START) == ["nccl"] * wg.world_size
        expected = sum(range(1, wg.world_size + 1))
        assert await bounded(wg.summed(), START) == [expected] * wg.world_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
async def test_results_on_a_gpu_arrive_on_the_cpu_with_their_values(dtype: torch.dtype) -> None:
    async with group(1) as wg:
        for count in (0, 1, 7, 5000, 5_000_001):
            [result] = await bounded(wg.made(count, dtype), START)
            whole = (torch.arange(count) % 100).to(dtype)
            assert {tensor.device.type for tensor in result.values()} == {"cpu"}
            assert torch.equal(result["whole"], whole)
            assert torch.equal(result["steps"], whole[::2])
            assert torch.equal(result["grad"], whole.float() * 2)


async def test_an_async_method_can_give_back_what_is_on_its_gpu() -> None:
    async with group(1) as wg:
        [result] = await bounded(wg.made_async(1_000_000), START)
        assert torch.equal(result, torch.arange(1_000_000))


async def test_arguments_are_placed_on_the_device_where_a_method_asks_for_it() -> None:
    async with group(1) as wg:
        for count in (10, 1_000_000):
            value = {"x": torch.ones(count), "name": "n"}
            assert await bounded(wg.placed(value), START) == [("cuda:0", count)]


async def test_a_batch_is_computed_on_all_gpus_and_joined_on_the_cpu() -> None:
    async with group() as wg:
        batch = torch.arange(4 * wg.world_size)
        assert torch.equal(await bounded(wg.doubled(batch), START), batch * 2)


async def test_what_goes_wrong_on_a_gpu_is_an_ordinary_exception() -> None:
    async with group(1) as wg:
        with pytest.raises(RuntimeError, match="must match the size"):
            await bounded(wg[0].fail_on_device(), START)
        assert len(await bounded(wg.devices(), START)) == 1


async def test_an_argument_on_the_controllers_gpu_arrives_on_the_cpu() -> None:
    async with group(1) as wg:
        echoed = wg.run(lambda _worker, tensor: (str(tensor.device), float(tensor.sum())), _ones())
        assert await bounded(echoed, START) == [("cpu", 5.0)]


def _ones() -> torch.Tensor:
    return torch.ones(5, device="cuda")


async def test_an_argument_that_another_stream_is_still_making_arrives_complete() -> None:
    """The thread that copies it has a stream of its own."""
    async with group(1) as wg:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # cycles: a tenth of a second
            value = torch.full((1 << 20,), 7.0, device="cuda")
            call = wg.run(_sum, value)
        assert await bounded(call) == [7.0 * (1 << 20)]


def _sum(_worker: OnDevice, value: torch.Tensor) -> float:
    return float(value.sum())
