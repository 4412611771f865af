"""``Worker``, the base class that users extend."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from asyncwg import distributed
from asyncwg._worker import context
from asyncwg.decorator import Dispatch, Execute, register
from asyncwg.errors import UsageError
from asyncwg.mesh import DispatchCollect, DistGlobalInfo, DistRankInfo, dp_place

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DistGlobalInfo", "DistRankInfo", "Worker"]

_ENV_KEYS = (
    "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip


class Worker:
    """One rank's object. Subclass it, and mark what the controller may call with ``@register``.

    It is built in the worker's process, in the main thread, with the process's environment
    complete. After ``__init__`` comes ``setup()``, and at a polite stop ``close()``, where a class
    has them; each may be ``def`` or ``async def``. A subclass need not call ``super().__init__()``,
    and may set ``device`` and the like to values of its own.
    """

    fused_worker_dict: Mapping[str, Any] = MappingProxyType({})
    """The roles that share this process, by name; empty where there are none.

    In ``__init__`` those that have been built before; afterwards all of them.
    """
    links: Mapping[str, Any] = MappingProxyType({})
    """The process groups that `asyncwg.link` has formed with other groups, by the link's name."""
    _dispatch_dp_rank: dict[str, int]
    _collect_dp_rank: dict[str, bool]
    _mesh_version: int = 0

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices

    @cached_property
    def rank(self) -> int:
        """Rank in the group; 0 outside of a worker process."""
        return context.place.rank if context.place else int(os.environ.get("RANK", "0"))

    @cached_property
    def world_size(self) -> int:
        """Ranks in the group; 1 outside of a worker process."""
        return context.place.world_size if context.place else int(os.environ.get("WORLD_SIZE", "1"))

    @cached_property
    def local_rank(self) -> int:
        """Place on the node. ``LOCAL_RANK`` is 0 instead where the rank is pinned to one GPU."""
        return context.place.local_rank if context.place else int(os.environ.get("LOCAL_RANK", "0"))

    @cached_property
    def local_world_size(self) -> int:
        """Ranks on the node."""
        if context.place:
            return context.place.local_world_size
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @cached_property
    def device(self) -> Any:
        """The ``torch.device`` of this rank: its GPU, or the CPU where torch sees none."""
        import torch  # import here: the package must not load it

        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")

    @classmethod
    def env_keys(cls) -> list[str]:
        """Return the names of the variables that make up a rank's environment."""
        return list(_ENV_KEYS)

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return where the group's store listens."""
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_cuda_visible_devices(self) -> str:
        """Return ``CUDA_VISIBLE_DEVICES``, or ``"not set"``."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Return an address on loopback that is free now, for a rendezvous of your own.

        Somebody else can take the port before it is used; the group's own store has no such gap.
        """
        with socket.socket() as sock:
            sock.bind((distributed.MASTER_ADDRESS, 0))
            return distributed.MASTER_ADDRESS, str(sock.getsockname()[1])

    def init_process_group(
        self, backend: str | None = None, timeout: float | timedelta | None = None
    ) -> None:
        """Join ``torch.distributed`` with the other ranks of the group.

        Every rank must call it. NCCL where torch sees a GPU, gloo elsewhere. A process joins once, so
        where it has joined already, as another role's, this does nothing.

        Args:
            backend: a backend's name, to choose another.
            timeout: seconds that joining and each collective may take.

        Raises:
            UsageError: the process has joined already, with another backend.
        """
        distributed.init_process_group(backend, timeout)

    def get_fused_worker_by_name(self, name: str) -> Any:
        """Return the role ``name`` that shares this process, or None."""
        return self.fused_worker_dict.get(name)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run ``func(self, *args, **kwargs)`` here, on this rank's shard of the batches."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``func(*args, **kwargs)`` on rank 0; it does not get the worker."""
        return func(*args, **kwargs)

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Say where this rank stands in a mesh. The controller knows it when the call returns.

        Raises:
            UsageError: the mesh is registered already, or ``dp_rank`` is no rank.
        """
        dispatch, collect = self._meshes()
        if mesh_name in dispatch:
            raise UsageError(f"mesh {mesh_name!r} is registered already on rank {self.rank}")
        if isinstance(dp_rank, bool) or not isinstance(dp_rank, int) or dp_rank < 0:
            raise UsageError(f"dp_rank of mesh {mesh_name!r} must be 0 or more, not {dp_rank!r}")
        dispatch[mesh_name] = dp_rank
        collect[mesh_name] = bool(is_collect)
        self._mesh_version += 1

    def register_mesh(
        self,
        mesh_name: str,
        mesh: DeviceMesh | DistGlobalInfo,
        dp: str | int | Sequence[str | int] = "dp",
        *,
        collect: Mapping[str, int] | Mapping[int, int] | None = None,
    ) -> None:
        """Say where this rank stands in a mesh, from torch's `DeviceMesh` or from the sizes alone.

        ``self.register_mesh("actor", mesh, dp="dp")``. The controller knows it when the call, or the start
        of the group, has ended.

        Args:
            mesh_name: what methods name it by.
            mesh: over all ranks of the group; not a slice of it, in which several ranks have the same
                place.
            dp: name (or number) of the dimension over which batches are split; or several, counted
                together, the last of them fastest.
            collect: where on the other dimensions the rank stands whose result counts, if not at 0; a
                negative number counts from the end. ``{"pp": -1}`` is the default for a
                `DistGlobalInfo`, whose last pipeline stage has the results.

        Raises:
            UsageError: the mesh is registered already, is not over all ranks, or has no such dimension.
        """
        if isinstance(mesh, DistGlobalInfo):
            axes, size = mesh.axes(self.rank), mesh.world_size
            collect = {"pp": -1} if collect is None else collect
        else:
            axes, size = _axes_of(mesh, mesh_name), mesh.size()
        if size != self.world_size:
            raise UsageError(
                f"mesh {mesh_name!r} has {size} ranks and the group {self.world_size}: register "
                "the whole mesh on every rank, not a slice of it"
            )
        dims = [dp] if isinstance(dp, str | int) else list(dp)
        dp_rank, is_collect = dp_place(mesh_name, axes, dims, collect or {})
        self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        dispatch, _ = self._meshes()
        self._check_mesh(mesh_name)
        return dispatch[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Return whether this rank's results count in the mesh."""
        self._check_mesh(mesh_name)
        return self._meshes()[1][mesh_name]

    def get_dispatch_collect(self) -> DispatchCollect:
        """Return ``{"dispatch_dp_rank": {mesh: dp rank}, "collect_dp_rank": {mesh: collects}}``."""
        dispatch, collect = self._meshes()
        return DispatchCollect(dispatch_dp_rank=dict(dispatch), collect_dp_rank=dict(collect))

    def set_dispatch_collect(
        self,
        mesh_name: str,
        dispatch_dp_rank: Mapping[str, int],
        collect_dp_rank: Mapping[str, bool],
        *,
        source: str | None = None,
    ) -> None:
        """Register an inner worker's mesh here, as ``mesh_name``.

        ``self.set_dispatch_collect("actor", **inner.get_dispatch_collect(), source="train")`` takes the
        mesh that the inner worker calls ``"train"``.

        Args:
            mesh_name: the name here.
            dispatch_dp_rank: of the inner worker's ``get_dispatch_collect()``.
            collect_dp_rank: likewise.
            source: the inner worker's name for it; None for the same name, or its only mesh.

        Raises:
            UsageError: the inner worker has no such mesh, or several and it was not said which; or the
                name is taken here.
        """
        if source is None:
            only = len(dispatch_dp_rank) == 1 and mesh_name not in dispatch_dp_rank
            source = next(iter(dispatch_dp_rank)) if only else mesh_name
        if source not in dispatch_dp_rank:
            raise UsageError(
                f"the inner worker has the meshes {sorted(dispatch_dp_rank)}, none called "
                f"{source!r}: say with source= which of them is {mesh_name!r} here"
            )
        self._register_dispatch_collect_info(
            mesh_name, dispatch_dp_rank[source], collect_dp_rank[source]
        )

    def _meshes(self) -> tuple[dict[str, int], dict[str, bool]]:
        # Made on demand, so that a subclass may leave out super().__init__().
        if "_dispatch_dp_rank" not in vars(self):
            self._dispatch_dp_rank = {}
            self._collect_dp_rank = {}
        return self._dispatch_dp_rank, self._collect_dp_rank

    def _check_mesh(self, mesh_name: str) -> None:
        known = self._meshes()[0]
        if mesh_name not in known:
            raise UsageError(
                f"mesh {mesh_name!r} is not registered on rank {self.rank} "
                f"(known: {sorted(known) or 'none'}): call _register_dispatch_collect_info"
            )


def _axes_of(mesh: DeviceMesh, mesh_name: str) -> dict[Any, tuple[int, int]]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError(f"this rank is not in the mesh that is to be {mesh_name!r}")
    names = mesh.mesh_dim_names or range(len(mesh.shape))
    return dict(zip(names, zip(coordinate, mesh.shape, strict=True), strict=True))
