"""The whole environment of a rank, and when a fork of the guardian would come too late for it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from asyncwg.distributed import (
    PROTECTED,
    check_worker_env,
    needs_fresh_interpreter,
    rank_environment,
    threads_per_rank,
)
from asyncwg.errors import UsageError


def environment(base: dict[str, str] | None = None, **changes: Any) -> dict[str, str]:
    """Return that of rank 1 of 2 on one node, changed as asked."""
    given: dict[str, Any] = {
        "group": "actor",
        "session": ("ASYNCWG_SESSION", "abc"),
        "rank": 1,
        "world_size": 2,
        "local_rank": 1,
        "local_world_size": 2,
        "port": 4711,
        "device": None,
        "threads": 1,
        "worker_env": {},
        **changes,
    }
    return rank_environment(base or {}, **given)


def test_a_rank_without_a_device_is_told_its_place_and_sees_no_gpu() -> None:
    assert environment() == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4711",
        "WG_BACKEND": "asyncwg",
        "WG_PREFIX": "actor",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "ASYNCWG_SESSION": "abc",
    }


@pytest.mark.parametrize("device", ["3", "GPU-1234", "MIG-GPU-12/0/1"])
def test_a_pinned_rank_sees_its_device_as_the_only_one(device: str) -> None:
    """All took device 0: https://github.com/NovaSky-AI/SkyRL/pull/1592."""
    env = environment(device=device)
    assert env["CUDA_VISIBLE_DEVICES"] == device
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "1")
    assert (env["RANK"], env["WORLD_SIZE"]) == ("1", "2")


GARBAGE = {
    "RANK": "5",
    "WORLD_SIZE": "99",
    "LOCAL_RANK": "7",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "no.such.host",
    "MASTER_PORT": "1",
    "GROUP_RANK": "3",
    "NODE_RANK": "3",
    "SLURM_PROCID": "7",
    "SLURM_LOCALID": "7",
    "SLURM_NTASKS": "9",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "x",
    "OMPI_COMM_WORLD_RANK": "7",
    "PMI_RANK": "7",
    "WG_PREFIX": "other",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "HIP_VISIBLE_DEVICES": "0,1",
    "ROCR_VISIBLE_DEVICES": "0,1",
    "ASYNCWG_SESSION": "of a parent",
}


def test_what_the_controllers_environment_says_of_ranks_has_no_influence() -> None:
    """https://github.com/pytorch/pytorch/issues/121807."""
    assert environment(GARBAGE) == environment()


def test_the_rest_of_the_controllers_environment_is_inherited() -> None:
    assert environment({"FOO": "1", "PATH": "/bin"}).items() >= {"FOO": "1", "PATH": "/bin"}.items()


def test_the_controllers_own_environment_is_not_changed() -> None:
    base = dict(GARBAGE)
    environment(base, device="0")
    assert base == GARBAGE


def test_an_interface_that_the_user_has_chosen_stays() -> None:
    env = environment({"NCCL_SOCKET_IFNAME": "eth0"}, worker_env={"GLOO_SOCKET_IFNAME": "eth1"})
    assert (env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("eth0", "eth1")


def test_the_users_variables_win_over_the_controllers() -> None:
    assert environment({"FOO": "1"}, worker_env={"FOO": "2"})["FOO"] == "2"


def test_the_users_number_of_threads_wins() -> None:
    assert environment(threads=1, worker_env={"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_no_number_of_threads_is_set_where_the_user_has() -> None:
    env = environment({"OMP_NUM_THREADS": "2"}, threads=None)
    assert env["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize("name", sorted(PROTECTED))
def test_a_protected_variable_is_refused_by_name(name: str) -> None:
    """The user's value was silently replaced: https://github.com/verl-project/verl/issues/2876."""
    with pytest.raises(ValueError, match=name):
        check_worker_env({name: "x"})


def test_a_refused_device_variable_points_to_the_pool() -> None:
    with pytest.raises(UsageError, match="pool's devices"):
        check_worker_env({"CUDA_VISIBLE_DEVICES": "x"})


@pytest.mark.parametrize("pair", [("FOO", 1), (5, "x"), ("FOO", None), ("FOO", b"x")])
def test_what_is_no_pair_of_strings_is_refused(pair: tuple[Any, Any]) -> None:
    with pytest.raises(UsageError, match="strings to strings"):
        check_worker_env(dict([pair]))


@pytest.mark.parametrize("pair", [("", "x"), ("A=B", "x"), ("A\0", "x"), ("A", "x\0")])
def test_what_no_environment_can_hold_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="can't be a variable"):
        check_worker_env(dict([pair]))


def test_the_users_variables_are_copied() -> None:
    given = {"FOO": "1"}
    checked = check_worker_env(given)
    given["FOO"] = "2"
    assert checked == {"FOO": "1"}
    assert check_worker_env(None) == {}


@pytest.mark.parametrize(("ranks", "cores", "share"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (9, 8, 1)])
def test_each_rank_gets_its_share_of_the_cores(
    ranks: int, cores: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process took all cores: https://github.com/pytorch/pytorch/issues/22260."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    assert threads_per_rank({}, {}, ranks) == share


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_a_number_of_threads_that_the_user_has_set_is_left_alone(name: str) -> None:
    assert threads_per_rank({name: "2"}, {}, 2) is None
    assert threads_per_rank({}, {name: "2"}, 2) is None


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "FOO"])
def test_a_variable_that_may_be_read_at_start_needs_a_fresh_interpreter(name: str) -> None:
    assert needs_fresh_interpreter({}, {}, {name: "1"})


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "HF_HOME", "VLLM_USE_V1", "WANDB_MODE"])
def test_a_variable_that_is_read_later_needs_none(name: str) -> None:
    assert not needs_fresh_interpreter({}, {}, {name: "1"})


def test_no_variable_needs_no_fresh_interpreter() -> None:
    assert not needs_fresh_interpreter({"FOO": "1"}, {"FOO": "1"}, {})


@pytest.mark.parametrize(
    ("base", "frozen"),
    [
        ({"OMP_NUM_THREADS": "2"}, {}),
        ({}, {"OMP_NUM_THREADS": "2"}),
        ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_a_controller_that_has_changed_its_own_variable_since_needs_one(
    base: dict[str, str], frozen: dict[str, str]
) -> None:
    assert needs_fresh_interpreter(base, frozen, {})


def test_a_controller_that_has_changed_what_nobody_reads_at_start_needs_none() -> None:
    assert not needs_fresh_interpreter({"FOO": "2"}, {"FOO": "1"}, {})
