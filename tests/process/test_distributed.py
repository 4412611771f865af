"""``torch.distributed`` between real workers: every way of joining, and who can reach what."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from asyncwg import Worker, WorkerGroupError, distributed, register
from tests.leaks import bounded
from tests.process.workers_values import Collective, group

JOIN = 50.0
"""Seconds that joining is given on a busy machine."""


async def test_plain_init_process_group_needs_nothing_but_the_environment() -> None:
    async with group(Collective) as wg:
        assert await bounded(wg.join("gloo"), JOIN) == [("gloo", 2)] * 2
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]


async def test_the_workers_own_init_takes_gloo_where_there_is_no_gpu() -> None:
    async with group(Collective) as wg:
        assert await bounded(wg.join_as_worker(), JOIN) == [("gloo", 2)] * 2
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]


async def test_a_fresh_interpreter_joins_as_well() -> None:
    """There torch is imported after the rendezvous was put in its place."""
    async with group(Collective, start_method="spawn") as wg:
        await bounded(wg.join("gloo"), JOIN)
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]


async def test_a_second_init_after_a_destroy_works() -> None:
    """It read the keys of the first one."""
    async with group(Collective) as wg:
        for _ in range(3):
            await bounded(wg.join("gloo"), JOIN)
            assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]
            await bounded(wg.leave())


async def test_a_device_mesh_works() -> None:
    def summed(_worker: Worker) -> float:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        tensor = torch.ones(1)
        torch.distributed.all_reduce(tensor, group=mesh.get_group("dp"))
        return float(tensor)

    async with group(Collective) as wg:
        assert await bounded(wg.run(summed), JOIN) == [2.0, 2.0]


async def test_an_init_by_tcp_with_an_address_of_its_own_works() -> None:
    """The variable that makes torch use the agent's store breaks it."""
    async with group(Collective) as wg:
        address = await bounded(wg.execute_rank_zero("get_available_master_addr_port"))
        url = "tcp://" + ":".join(address)
        assert await bounded(wg.join_at(url), JOIN) == [2.0, 2.0]


async def test_an_init_by_a_file_works(tmp_path: Path) -> None:
    async with group(Collective) as wg:
        assert await bounded(wg.join_at(f"file://{tmp_path}/store"), JOIN) == [2.0, 2.0]


RENDEZVOUS = """
import os, sys, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo")
print(dist.get_world_size(), "TORCHELASTIC_USE_AGENT_STORE" in os.environ)
"""


async def test_a_subprocess_of_a_worker_can_have_a_rendezvous_of_its_own() -> None:
    """The variable that makes torch use the agent's store would reach it too."""

    def in_subprocess(_worker: Worker, script: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, timeout=150, check=False
        )
        return done.stdout.decode().strip() or done.stderr.decode()

    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        assert await bounded(wg[1].run(in_subprocess, RENDEZVOUS), 60) == "1 False"
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]


@pytest.fixture
def port_29500() -> Iterator[None]:
    """Somebody else has torch's usual port."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("", 29500))
        except OSError:
            pass  # somebody else has it indeed
        taken.listen()
        yield


@pytest.mark.usefixtures("port_29500")
async def test_six_groups_at_once_each_meet_among_themselves() -> None:
    """A probed port was taken by another: https://github.com/meta-pytorch/torchrec/pull/3969."""

    async def summed() -> list[float]:
        async with group(Collective) as wg:
            await wg.join("gloo")
            result: list[float] = await wg.sum_of_ones()
            return result

    sums = await bounded(asyncio.gather(*(summed() for _ in range(6))), 60)
    assert sums == [[2.0, 2.0]] * 6


GARBAGE = {
    "MASTER_ADDR": "no.such.host",
    "MASTER_PORT": "1",
    "WORLD_SIZE": "99",
    "RANK": "5",
    "LOCAL_RANK": "7",
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "7",
    "SLURM_NTASKS": "9",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


async def test_what_the_controllers_environment_says_has_no_influence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """https://github.com/pytorch/pytorch/issues/121807, https://github.com/NovaSky-AI/SkyRL/pull/1592."""
    for name, value in GARBAGE.items():
        monkeypatch.setenv(name, value)
    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]
    assert {name: os.environ[name] for name in GARBAGE} == GARBAGE


NAMELESS = """
import asyncio
from tests.process.workers_values import Collective, group

async def main():
    async with group(Collective) as wg:
        await wg.join("gloo")
        print(await wg.sum_of_ones())

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_host_whose_name_nobody_knows_is_no_hindrance() -> None:
    """https://github.com/pytorch/pytorch/issues/74316: the name was looked up all the same."""
    nameless = ["unshare", "-u", "sh", "-c", 'hostname nohost && exec "$@"', "sh"]
    try:
        subprocess.run([*nameless, "true"], capture_output=True, timeout=50, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no hostname of our own can be had here")
    done = subprocess.run(
        [*nameless, sys.executable, "-c", NAMELESS],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "[2.0, 2.0]\n", done.stderr


async def test_a_rank_that_fails_before_it_joins_breaks_off_the_others() -> None:
    """Everyone waited for half an hour: https://github.com/pytorch/pytorch/issues/53395."""
    async with group(Collective, error_grace=0.2) as wg:
        with pytest.raises(WorkerGroupError) as caught:
            await bounded(wg.fail_before_joining(1))
        assert [str(error) for error in caught.value.exceptions] == ["bad row 7"]
        assert wg.state == "broken"


async def test_a_rank_that_never_comes_is_named_by_those_that_wait_for_it() -> None:
    """https://github.com/pytorch/pytorch/issues/52848."""
    async with group(Collective) as wg:
        with pytest.raises(RuntimeError, match="rank 1 of 2 ranks has not called") as caught:
            await bounded(wg[0].join_as_worker(timeout=1.0))
        assert getattr(caught.value, "rank", None) == 0


async def test_a_rank_that_has_waited_in_vain_meets_the_others_when_it_tries_again() -> None:
    """It tried under another prefix than the rank that had come late, and so did both for ever."""
    async with group(Collective) as wg:
        told = ""
        for seconds in (
            0.3,
            3.0,
            30.0,
        ):  # one of them is enough to reach the store on a busy machine
            if "has not called" not in told:
                with pytest.raises(RuntimeError) as caught:
                    await bounded(wg[0].join_as_worker(timeout=seconds), JOIN)
                told = str(caught.value)
        assert "has not called" in told
        assert await bounded(wg.join_as_worker(timeout=JOIN), JOIN) == [("gloo", 2)] * 2
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]
        await bounded(wg.leave())
        await bounded(wg.join_as_worker(timeout=JOIN), JOIN)
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]


def _fail_to_connect(worker: Worker) -> str:
    """Join when the store does not answer in time, as on a machine that is busy with others."""
    import torch.distributed as dist

    plain: Any = dist.TCPStore  # type: ignore[attr-defined]  # not in its stub's __all__

    def refuse(*_args: object, **_options: object) -> None:
        raise dist.DistNetworkError("no answer in time")

    dist.TCPStore = refuse  # type: ignore[attr-defined, assignment]
    try:
        worker.init_process_group()
    except dist.DistNetworkError as error:
        return str(error)
    finally:
        dist.TCPStore = plain  # type: ignore[attr-defined]
    return "joined"


async def test_a_rank_that_could_not_connect_meets_the_others_when_it_tries_again() -> None:
    """It looked for them by another name than they for it, as torch had counted its first try."""
    async with group(Collective) as wg:
        assert await bounded(wg[0].run(_fail_to_connect)) == "no answer in time"
        assert await bounded(wg.join_as_worker(timeout=JOIN), JOIN) == [("gloo", 2)] * 2
        assert await bounded(wg.sum_of_ones()) == [2.0, 2.0]


async def test_ranks_that_still_wait_meet_one_that_has_gone_and_come_back() -> None:
    """Its key was there before the last rank came, and nobody was behind it any more."""
    async with group(Collective, 3) as wg:
        patient = wg[1].join_as_worker(timeout=JOIN)
        # Rank 1 may not be there yet either.
        with pytest.raises(RuntimeError, match=r"rank (1, )?2 of 3 ranks has not called"):
            await bounded(wg[0].join_as_worker(timeout=1.0), JOIN)
        late = wg[2].join_as_worker(timeout=JOIN)
        again = wg[0].join_as_worker(timeout=JOIN)
        for call in (patient, late, again):
            assert await bounded(call, JOIN) == ("gloo", 3)
        assert await bounded(wg.sum_of_ones()) == [3.0] * 3


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def addresses(pids: list[int]) -> set[str]:
    """Return what these processes listen on."""
    return {
        str(connection.laddr.ip)
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


async def test_nothing_listens_outside_of_loopback() -> None:
    """Not the controller's store, nor gloo in the workers; nor is anything connected elsewhere."""
    ours = set(psutil.Process().net_connections("inet"))
    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        await bounded(wg.sum_of_ones())
        assert addresses(wg.pids) <= LOOPBACK
        new = set(psutil.Process().net_connections("inet")) - ours
        assert {str(connection.laddr.ip) for connection in new} <= LOOPBACK
        listening = [c.laddr.port for c in new if c.status == psutil.CONN_LISTEN]
        assert listening == [wg.master_port]


async def test_the_store_is_gone_with_its_group() -> None:
    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        address = (wg.master_address, wg.master_port)
    with pytest.raises(OSError, match="refused"), socket.create_connection(address, 2):
        pass
    assert wg.master_port == 0


async def test_scattering_what_has_gaps_gives_the_right_numbers() -> None:
    """Gloo gives wrong ones without an error: https://github.com/pytorch/pytorch/issues/192920."""
    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        assert await bounded(wg.scatter_odd()) == [[0.0, 2.0, 4.0], [10.0, 12.0, 14.0]]


async def test_broadcasting_a_column_gives_the_right_numbers_and_leaves_the_rest() -> None:
    """https://github.com/pytorch/pytorch/issues/24836."""
    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        assert await bounded(wg.broadcast_column()) == [
            [[0.0, 0.0], [1.0, 1.0]],
            [[0.0, 10.0], [1.0, 11.0]],
        ]


async def test_reducing_a_column_gives_the_right_numbers() -> None:
    """https://github.com/pytorch/pytorch/issues/74809."""
    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        assert (await bounded(wg.reduce_column(False)))[0] == [3.0, 5.0]
        assert await bounded(wg.reduce_column(True)) == [[3.0, 5.0]] * 2


async def test_gathering_a_data_proto_gives_every_rank_the_rows_of_all() -> None:
    async with group(Collective) as wg:
        await bounded(wg.join("gloo"), JOIN)
        for rows in ([3, 1], [0, 2]):
            for data in await bounded(wg.gather_rows(rows)):
                assert data.batch["x"].tolist() == [*range(rows[0]), *range(100, 100 + rows[1])]
                names = [f"{rank}:{i}" for rank in (0, 1) for i in range(rows[rank])]
                assert list(data.non_tensor_batch["name"]) == names


class Counting(Worker):
    """Joins in its ``__init__``, as trainers do."""

    def __init__(self) -> None:
        super().__init__()
        self.init_process_group()

    @register()
    def summed(self) -> float:
        tensor = torch.full((1,), float(self.rank + 1))
        distributed.all_reduce(tensor)
        return float(tensor)


async def test_a_worker_can_join_in_its_init() -> None:
    async with group(Counting) as wg:
        assert await bounded(wg.summed()) == [3.0, 3.0]


async def test_two_groups_one_after_the_other_do_not_meet_in_one_store() -> None:
    """A store can't be used by a second generation of processes."""
    results: list[Any] = []
    for _ in range(2):
        async with group(Counting) as wg:
            results.append(await bounded(wg.summed()))
    assert results == [[3.0, 3.0]] * 2
