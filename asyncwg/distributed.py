"""``torch.distributed`` under asyncwg: a rank's environment, the rendezvous, the process group.

The controller binds one port on loopback and keeps it, so nobody can take it between the choice and
the use. The store behind it is made when the first rank knocks, so a group that never uses
``torch.distributed`` costs the controller no import of torch. In the workers the ``env://``
rendezvous at exactly that address is a client of the controller's store; every other rendezvous
(another address, ``tcp://``, ``file://``, a subprocess's own) is torch's and untouched.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Final
from urllib.parse import parse_qs, urlparse

from asyncwg.errors import UsageError

__all__ = ["all_reduce", "broadcast", "init_process_group", "reduce", "scatter"]

MASTER_ADDRESS: Final = "127.0.0.1"
PROTECTED: Final = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "WG_BACKEND",
        "WG_PREFIX",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
    }
)
"""Variables that are asyncwg's to set."""
_FOREIGN: Final = ("GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE",
                   "LOCAL_WORLD_SIZE", "NODE_RANK")  # fmt: skip
"""What other launchers leave behind and libraries read for a rank."""
_FOREIGN_PREFIXES: Final = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_")
THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Where a user says how many threads a process may have."""
_READ_AT_START: Final = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "BLIS_", "LD_", "PYTHON",
    "MALLOC_", "GLIBC_", "TORCH_", "PYTORCH_", "ATEN_", "CUBLAS_", "CUDNN_", "TBB", "ASAN_", "LC_",
)  # fmt: skip
"""Prefixes of variables that the loader, the interpreter, torch or what it links read when they start."""
_READ_LATER: Final = (
    "NCCL_", "GLOO_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_", "VLLM_", "SGLANG_",
)  # fmt: skip
"""Prefixes of variables that are known to be read when a library is used."""


def check_worker_env(worker_env: Mapping[str, str] | None) -> dict[str, str]:
    """Check a group's ``worker_env`` and return a copy.

    Raises:
        UsageError: a protected name (it is a `ValueError`), or what is no pair of strings.
    """
    checked: dict[str, str] = {}
    for name, value in (worker_env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"worker_env maps strings to strings, not {name!r} to {value!r}")
        if name in PROTECTED:
            raise UsageError(
                f"worker_env may not set {name}: asyncwg sets it for each rank"
                + (" from the pool's devices" if name.endswith("VISIBLE_DEVICES") else "")
            )
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"worker_env: {name!r} can't be a variable of an environment")
        checked[name] = value
    return checked


def rank_environment(
    base: Mapping[str, str],
    *,
    group: str,
    session: tuple[str, str],
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    port: int,
    device: str | None,
    threads: int | None,
    worker_env: Mapping[str, str],
) -> dict[str, str]:
    """Return the whole environment of a rank.

    Args:
        base: the controller's environment; what it says of ranks and masters has no influence.
        group: the group's name.
        session: name and value of the variable that marks its processes.
        rank: rank in the group.
        world_size: ranks in the group.
        local_rank: place on the node.
        local_world_size: ranks on the node.
        port: the store's port on loopback.
        device: the entry of ``CUDA_VISIBLE_DEVICES``; None pins the rank to no GPU.
        threads: threads per process; None where the user has set the number.
        worker_env: the user's own variables, checked.
    """
    env = {
        name: value
        for name, value in base.items()
        if name not in PROTECTED and name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    env.update(worker_env)
    pinned = device is not None
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        # A rank that is pinned to one GPU sees one device, and libraries take device LOCAL_RANK.
        LOCAL_RANK="0" if pinned else str(local_rank),
        LOCAL_WORLD_SIZE="1" if pinned else str(local_world_size),
        MASTER_ADDR=MASTER_ADDRESS,
        MASTER_PORT=str(port),
        WG_BACKEND="asyncwg",
        WG_PREFIX=group,
        CUDA_VISIBLE_DEVICES=device if device is not None else "",
    )
    env[session[0]] = session[1]
    return env


def threads_per_rank(
    base: Mapping[str, str], worker_env: Mapping[str, str], ranks: int
) -> int | None:
    """Return a rank's share of the cores, or None where the user has set the number."""
    if any(name in base or name in worker_env for name in THREAD_VARIABLES):
        return None
    return max(1, len(os.sched_getaffinity(0)) // max(1, ranks))


def needs_fresh_interpreter(
    base: Mapping[str, str],
    frozen: Mapping[str, str],
    worker_env: Mapping[str, str],
) -> bool:
    """Tell whether a fork of the guardian would come too late for some variable.

    Args:
        base: the controller's environment now.
        frozen: the environment in which the guardian started.
        worker_env: the user's own variables. One that nobody knows counts as read at start.
    """
    if any(not name.startswith(_READ_LATER) for name in worker_env):
        return True
    return any(
        base.get(name) != frozen.get(name)
        for name in base.keys() | frozen.keys()
        if name.startswith(_READ_AT_START)
    )


class Store:
    """The controller's side of the rendezvous: a bound port, and a store when it is first used.

    Belongs to the event loop that made it. One per generation: what an earlier generation wrote
    must not be found.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listener: socket.socket | None = socket.socket()
        self._listener.bind((MASTER_ADDRESS, 0))
        self._listener.listen(1024)
        self.port: int = self._listener.getsockname()[1]
        self._store: Any = None
        self._closed = False
        loop.add_reader(self._listener.fileno(), self._knocked)

    def _knocked(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        self._loop.remove_reader(listener.fileno())
        fd = listener.detach()
        # In a thread: torch may not be imported yet, and that takes most of a second.
        threading.Thread(target=self._serve, args=(fd,), name="asyncwg-store", daemon=True).start()

    def _serve(self, fd: int) -> None:
        import torch.distributed as dist  # import here: only for those who use it

        store = dist.TCPStore(  # type: ignore[attr-defined]  # not in its stub's __all__
            MASTER_ADDRESS, self.port, is_master=True, wait_for_workers=False, master_listen_fd=fd
        )
        if not self._closed:
            self._store = store

    def close(self) -> None:
        """Give the port back."""
        self._closed = True
        self._store = None
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None


_meetings = 0
"""How often this process has met its group at the controller's store."""


def install_rendezvous() -> None:
    """Have ``env://`` at the group's own address use the controller's store. In workers only."""
    if "torch.distributed.rendezvous" in sys.modules:
        _patch(sys.modules["torch.distributed.rendezvous"])
    else:
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Patches the module when it is first imported, in a worker that starts without torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch.distributed.rendezvous":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch(module: Any) -> None:
    plain = module._rendezvous_handlers["env"]  # noqa: SLF001  # its register function refuses a known scheme
    address = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    owner = os.getpid()

    def env_rendezvous(url: str, timeout: timedelta | None = None, **kwargs: Any) -> Iterator[Any]:
        given = {} if timeout is None else {"timeout": timeout}
        here = (os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
        if here != address or os.getpid() != owner:
            return plain(url, **given, **kwargs)  # type: ignore[no-any-return]
        return _meet(url, given)

    module._rendezvous_handlers["env"] = env_rendezvous  # noqa: SLF001


def _meet(url: str, given: dict[str, timedelta]) -> Iterator[Any]:
    global _meetings  # ranks count alike, so they meet under the same prefix
    import torch.distributed as dist  # import here: torch is loaded already

    query = parse_qs(urlparse(url).query)
    rank = int(query.get("rank", [os.environ["RANK"]])[0])
    world_size = int(query.get("world_size", [os.environ["WORLD_SIZE"]])[0])
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    prefixed: Any = dist.PrefixStore  # type: ignore[attr-defined]
    try:
        store = make(MASTER_ADDRESS, int(os.environ["MASTER_PORT"]), is_master=False, **given)
        # A second init in one process must not read what the first one wrote.
        own = prefixed(f"asyncwg/{_meetings + 1}", store)
        _wait_for_all(own, rank, world_size)
    except BaseException:
        if not dist.is_initialized():
            # torch has counted a group that is none, and would look for the next one by another name
            # than the ranks that have not tried in vain.
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        raise
    # Only now: one that waited in vain tries again where the others will look for it.
    _meetings += 1
    yield own, rank, world_size
    raise RuntimeError("a rendezvous happens once per init_process_group")


def _wait_for_all(store: Any, rank: int, world_size: int) -> None:
    """Wait for every rank, and say which has not come; torch tells the name of a key."""
    import torch.distributed as dist  # import here: torch is loaded already

    keys = [f"here/{each}" for each in range(world_size)]
    end = time.monotonic() + store.timeout.total_seconds()
    store.set(keys[rank], b"")
    missing = keys
    try:
        while missing:
            left = timedelta(seconds=max(0.001, end - time.monotonic()))
            store.wait(missing, left)
            # One that was there may have lost its patience while others were waited for.
            missing = [key for key in keys if not store.check([key])]
    except dist.DistStoreError as error:
        missing = [str(each) for each, key in enumerate(keys) if not store.check([key])]
        store.delete_key(keys[rank])  # nobody may start to count on this rank
        if not missing:
            raise
        raise dist.DistStoreError(
            f"rank {', '.join(missing)} of {world_size} ranks has not called init_process_group, and "
            f"rank {rank} has waited for it as long as it may"
        ) from error


def init_process_group(
    backend: str | None = None, timeout: float | timedelta | None = None
) -> None:
    """Join this rank's group: NCCL where torch sees a GPU, gloo elsewhere.

    A process joins once. Where it has joined already, as when the roles of a colocated class each say
    that they need it, this does nothing, and ``timeout`` has no effect.

    Args:
        backend: a backend's name, to choose another.
        timeout: seconds (or a timedelta) that joining and each collective may take.

    Raises:
        UsageError: the process has joined already, with another backend.
    """
    import torch  # import here: the package must not load it
    import torch.distributed as dist

    if dist.is_initialized():
        _check_backend(backend, dist.get_backend_config())
        return
    options: dict[str, Any] = {}
    if timeout is not None:
        options["timeout"] = (
            timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = backend or "nccl"
    dist.init_process_group(backend or "gloo", **options)


def _check_backend(wanted: str | None, joined: str) -> None:
    """Refuse a backend that the process's group does not have; both are as torch writes them."""
    have = dict(entry.split(":") for entry in joined.split(",") if ":" in entry)
    if wanted is None:
        return
    for entry in wanted.lower().split(","):
        device, _, backend = entry.rpartition(":")
        if backend not in ([have.get(device)] if device else have.values()):
            raise UsageError(
                f"this process has joined torch.distributed with {joined!r} already, so not with "
                f"{wanted!r} too: make a group beside it with torch.distributed.new_group(backend=...)"
            )


def broadcast(tensor: Any, src: int, group: Any = None) -> None:
    """As ``torch.distributed.broadcast``, right for tensors that are not contiguous too.

    Gloo takes the memory behind a non-contiguous tensor for the tensor, and gives wrong numbers
    without an error (pytorch#192920).
    """
    import torch.distributed as dist  # import here: the package must not load torch

    _through_contiguous(tensor, lambda dense: dist.broadcast(dense, src, group=group))


def all_reduce(tensor: Any, op: Any = None, group: Any = None) -> None:
    """As ``torch.distributed.all_reduce``, right for tensors that are not contiguous too."""
    import torch.distributed as dist  # import here: the package must not load torch

    chosen = dist.ReduceOp.SUM if op is None else op
    _through_contiguous(tensor, lambda dense: dist.all_reduce(dense, chosen, group=group))


def reduce(tensor: Any, dst: int, op: Any = None, group: Any = None) -> None:
    """As ``torch.distributed.reduce``, right for tensors that are not contiguous too."""
    import torch.distributed as dist  # import here: the package must not load torch

    chosen = dist.ReduceOp.SUM if op is None else op
    _through_contiguous(tensor, lambda dense: dist.reduce(dense, dst, chosen, group=group))


def scatter(
    tensor: Any, scatter_list: Sequence[Any] | None = None, src: int = 0, group: Any = None
) -> None:
    """As ``torch.distributed.scatter``, right for tensors that are not contiguous too."""
    import torch.distributed as dist  # import here: the package must not load torch

    parts = None if scatter_list is None else [part.contiguous() for part in scatter_list]
    _through_contiguous(tensor, lambda dense: dist.scatter(dense, parts, src=src, group=group))


def _through_contiguous(tensor: Any, collective: Any) -> None:
    if tensor.is_contiguous():
        collective(tensor)
        return
    dense = tensor.contiguous()
    collective(dense)
    tensor.copy_(dense)
