"""What surrounds a real worker: variables, devices, folders, threads; and what it may start itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncwg import (
    ClassWithInitArgs,
    Dispatch,
    ResourceError,
    ResourcePool,
    UsageError,
    Worker,
    WorkerGroup,
    register,
)
from tests.leaks import Heartbeat, bounded, in_one_try


class Place(Worker):
    """Says where it is. It imports ``probe`` when it is built, as users' classes import theirs."""

    def __init__(self, probe: str | None = None) -> None:
        super().__init__()
        self.probe: Any = None if probe is None else __import__(probe)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen_at_import(self) -> Any:
        return self.probe.SEEN

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def properties(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whereabouts(self) -> tuple[str, list[str]]:
        return os.getcwd(), list(sys.path)


def group(
    ranks: int | Sequence[int] = 2, *, probe: str | None = None, gpu: bool = False, **options: Any
) -> WorkerGroup:
    """Return a group of `Place`, not started; without torch, unless it is asked for."""
    pool = ResourcePool([ranks] if isinstance(ranks, int) else list(ranks), use_gpu=gpu)
    given: dict[str, Any] = {"preload": [], "start_timeout": 60, **options}
    return WorkerGroup(pool, ClassWithInitArgs(Place, probe), **given)


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's that records what it sees when it is imported."""
    names = ["CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "WG_PREFIX", "FOO"]
    (tmp_path / "probe_module.py").write_text(
        f"import os\nSEEN = {{name: os.environ.get(name) for name in {names}}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "probe_module"


@pytest.fixture
def mask(monkeypatch: pytest.MonkeyPatch) -> str:
    """Two devices that this machine is said to have; without a driver a mask is believed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    return "2,5"


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
async def test_the_environment_is_complete_when_a_users_module_is_imported(
    probe: str, mask: str, start_method: str
) -> None:
    """A pin that comes after an import has no effect: https://github.com/pytorch/pytorch/issues/80876."""
    async with group(
        probe=probe, gpu=True, start_method=start_method, name="actor", worker_env={"FOO": "1"}
    ) as wg:
        seen = await bounded(wg.seen_at_import())
    assert seen == [
        {
            "CUDA_VISIBLE_DEVICES": device,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "WG_PREFIX": "actor",
            "FOO": "1",
        }
        for rank, device in enumerate(("2", "5"))
    ]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == mask


async def test_a_single_device_of_a_mask_is_not_renumbered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It became 0: https://github.com/verl-project/verl/issues/589."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    async with group(1, gpu=True) as wg:
        assert await bounded(wg.environment("CUDA_VISIBLE_DEVICES")) == [["3"]]


async def test_hip_and_cuda_never_disagree_in_a_worker(
    mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://github.com/verl-project/verl/issues/2876."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", mask)
    async with group(gpu=True) as wg:
        names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        assert await bounded(wg.environment(*names)) == [["2", None, None], ["5", None, None]]


@pytest.mark.usefixtures("mask")
def test_hip_and_cuda_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """https://github.com/verl-project/verl/issues/2876."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    with pytest.raises(ResourceError, match="differ"):
        ResourcePool([1])


def test_a_users_own_device_variable_is_refused_aloud() -> None:
    """https://github.com/ray-project/ray/issues/49147."""
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        group(worker_env={"CUDA_VISIBLE_DEVICES": "x"})


@pytest.mark.usefixtures("mask")
async def test_a_pinned_rank_knows_its_place_on_the_node_by_its_properties() -> None:
    """Libraries take device LOCAL_RANK: https://github.com/NovaSky-AI/SkyRL/pull/1592."""
    async with group(gpu=True) as wg:
        assert await bounded(wg.environment("LOCAL_RANK", "LOCAL_WORLD_SIZE")) == [["0", "1"]] * 2
        assert await bounded(wg.properties()) == [(0, 2, 0, 2), (1, 2, 1, 2)]


async def test_a_rank_without_a_gpu_has_the_place_of_its_variables() -> None:
    async with group([2, 2]) as wg:
        assert await bounded(wg.environment("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES")) == [
            ["0", "0", ""], ["1", "1", ""], ["2", "0", ""], ["3", "1", ""],
        ]  # fmt: skip
        assert await bounded(wg.properties()) == [
            (0, 4, 0, 2), (1, 4, 1, 2), (2, 4, 0, 2), (3, 4, 1, 2),
        ]  # fmt: skip


async def test_what_slurm_says_in_the_controller_does_not_reach_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """https://github.com/NovaSky-AI/SkyRL/pull/1592."""
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "LOCAL_RANK", "RANK"):
        monkeypatch.setenv(name, "7")
    async with group() as wg:
        assert await bounded(wg.environment("SLURM_LOCALID", "LOCAL_RANK", "RANK")) == [
            [None, "0", "0"],
            [None, "1", "1"],
        ]


async def test_a_variable_that_is_set_after_the_first_group_reaches_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The environment of multiprocessing's fork server is frozen."""
    async with group() as wg:
        assert await bounded(wg.environment("ASYNCWG_TEST_LATE")) == [[None], [None]]
    monkeypatch.setenv("ASYNCWG_TEST_LATE", "yes")
    async with group() as wg:
        assert await bounded(wg.environment("ASYNCWG_TEST_LATE")) == [["yes"], ["yes"]]


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
async def test_a_worker_has_the_controllers_folder_and_path(
    start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork server ignores changes of sys.path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "somewhere")
    async with group(start_method=start_method) as wg:
        assert await bounded(wg.whereabouts()) == [(str(tmp_path), sys.path)] * 2


async def test_a_variable_that_the_interpreter_reads_takes_effect() -> None:
    async with group(1, worker_env={"PYTHONHASHSEED": "0"}) as wg:
        first = await bounded(wg.run(lambda _worker: hash("word")))
    async with group(1, worker_env={"PYTHONHASHSEED": "0"}) as wg:
        second = await bounded(wg.run(lambda _worker: hash("word")))
    assert first == second


def test_importing_the_package_imports_nothing_heavy() -> None:
    """Each worker imported torch again, for seconds: https://github.com/vllm-project/vllm/pull/22214."""
    heavy = "{'torch', 'numpy', 'cloudpickle', 'tensordict'}"
    script = f"import asyncwg, sys; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=True
    )
    assert done.stdout == "set()\n"


async def test_each_rank_takes_its_share_of_the_cores() -> None:
    """Each sized its pool to all: https://github.com/pytorch/pytorch/issues/22260."""
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    async with group(preload=None) as wg:
        assert await bounded(wg.threads(), 60) == [share, share]


async def test_the_users_number_of_threads_is_used_and_the_controllers_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """https://github.com/meta-pytorch/torchtitan/pull/4031."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    async with group(2, worker_env={"OMP_NUM_THREADS": "2"}) as wg:
        assert await bounded(wg.threads(), 60) == [2, 2]
    assert "OMP_NUM_THREADS" not in os.environ


async def test_a_number_of_threads_in_the_controllers_environment_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """https://github.com/vllm-project/vllm/pull/45124."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    async with group(2) as wg:
        assert await bounded(wg.threads(), 60) == [2, 2]


async def test_numpy_draws_other_numbers_in_every_rank() -> None:
    """Forks of one process would all draw the same."""

    def draw(_worker: Worker) -> float:
        import numpy as np

        return float(np.random.rand())

    async with group(preload=None) as wg:
        first, second = await bounded(wg.run(draw), 60)
    assert first != second


SLOW_MODULE = """
import os, pathlib, time
here = pathlib.Path(__file__).parent
(here / f"at-{os.environ['RANK']}").touch()
SEEN = []
while len(SEEN) < 2:
    time.sleep(0.001)
    SEEN = sorted(path.name for path in here.glob("at-*"))
"""


async def test_ranks_import_a_slow_module_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, each for seconds: https://github.com/vllm-project/vllm/pull/22214.

    The import takes until both are at it.
    """
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    async with group(2, probe="slow_module") as wg:
        assert await bounded(wg.seen_at_import()) == [["at-0", "at-1"]] * 2


async def test_the_loop_goes_on_while_a_group_starts() -> None:
    """`start()` blocked on the imports of the child: https://github.com/python/cpython/issues/137996."""

    async def it_goes_on() -> bool:
        with Heartbeat() as heart:
            async with group(2, start_method="spawn"):
                pass
        return heart.longest < 0.2  # as the report asks

    assert await in_one_try(it_goes_on)


def _double(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
async def test_a_worker_can_use_multiprocessing(method: str) -> None:
    def pooled(_worker: Worker, method: str, function: Any) -> list[int]:
        import multiprocessing

        with multiprocessing.get_context(method).Pool(2) as pool:
            return pool.map(function, [1, 2, 3])

    async with group(1) as wg:
        assert await bounded(wg.run(pooled, method, _double), 60) == [[2, 4, 6]]


async def test_a_worker_can_use_a_data_loader() -> None:
    def loaded(_worker: Worker) -> list[int]:
        import torch
        from torch.utils.data import DataLoader

        rows: Any = torch.arange(8)
        return [int(batch.sum()) for batch in DataLoader(rows, batch_size=4, num_workers=2)]

    async with group(1, preload=None) as wg:
        assert await bounded(wg.run(loaded), 60) == [[6, 22]]


async def test_a_worker_can_have_a_group_of_its_own() -> None:
    def nested(_worker: Worker) -> Any:
        async def main() -> Any:
            async with group(2) as inner:
                return await inner.environment("RANK", "WG_PREFIX")

        return asyncio.run(main())

    async with group(1, name="outer") as wg:
        [ranks] = await bounded(wg.run(nested), 60)
        assert ranks == [["0", "Place"], ["1", "Place"]]
        assert await bounded(wg.environment("WG_PREFIX")) == [["outer"]]
