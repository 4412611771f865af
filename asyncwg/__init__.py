"""A single controller for the worker processes of one machine, from ordinary asyncio code.

Everything a program needs is here, except `asyncwg.blocking` and `asyncwg.testing`. Importing the
package loads neither torch nor numpy nor cloudpickle: names that need them load them when they are
asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from asyncwg._link import link
from asyncwg._share import share, shared_empty
from asyncwg._worker.context import current_call
from asyncwg.call import Call
from asyncwg.colocated import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from asyncwg.decorator import (
    Dispatch,
    Execute,
    PerRank,
    Replicate,
    Shard,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from asyncwg.errors import (
    AsyncwgError,
    CallTimeoutError,
    DispatchError,
    GroupBrokenError,
    GroupClosedError,
    InternalError,
    ResourceError,
    UsageError,
    WorkerDiedError,
    WorkerError,
    WorkerGroupError,
    WorkerStartError,
)
from asyncwg.resource_pool import (
    ResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from asyncwg.rows import Rows, RowsClosed, RowsStatistics
from asyncwg.worker import DistGlobalInfo, DistRankInfo, Worker
from asyncwg.worker_group import ClassWithInitArgs, RestartPolicy, WorkerGroup

if TYPE_CHECKING:
    from asyncwg.protocol import (
        DataProto,
        all_gather_data_proto,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncwgError",
    "Call",
    "CallTimeoutError",
    "ClassWithInitArgs",
    "DataProto",
    "Dispatch",
    "DispatchError",
    "DistGlobalInfo",
    "DistRankInfo",
    "Execute",
    "GroupBrokenError",
    "GroupClosedError",
    "InternalError",
    "PerRank",
    "Replicate",
    "ResourceError",
    "ResourcePool",
    "ResourcePoolManager",
    "RestartPolicy",
    "Rows",
    "RowsClosed",
    "RowsStatistics",
    "Shard",
    "UsageError",
    "Worker",
    "WorkerDiedError",
    "WorkerError",
    "WorkerGroup",
    "WorkerGroupError",
    "WorkerStartError",
    "__version__",
    "all_gather_data_proto",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "current_call",
    "fold_batch_dim",
    "link",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "pad_dataproto_to_divisor",
    "register",
    "register_dispatch_mode",
    "run",
    "share",
    "shared_empty",
    "split_resource_pool",
    "unfold_batch_dim",
    "unpad_dataproto",
    "update_dispatch_mode",
]

T = TypeVar("T")

_FROM_PROTOCOL = {
    "DataProto",
    "all_gather_data_proto",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "unpad_dataproto",
}


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run ``main`` to its end, on uvloop where it is installed, and return its result.

    Args:
        main: as for ``asyncio.run``, which this is but for the loop.
        debug: asyncio's debug mode.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main, debug=debug)
    with asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def __getattr__(name: str) -> Any:
    if name in _FROM_PROTOCOL:
        from asyncwg import protocol

        return getattr(protocol, name)
    raise AttributeError(f"module 'asyncwg' has no attribute {name!r}")
