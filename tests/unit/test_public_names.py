"""The public names change on purpose only: here, and in what users are told."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from types import ModuleType
from typing import Any, Final

import pytest

import asyncwg

NAMES: Final[dict[str, frozenset[str]]] = {
    "blocking": frozenset({"Handle", "WorkerGroup"}),
    "call": frozenset({"Call"}),
    "colocated": frozenset(
        {
            "create_colocated_worker_cls",
            "create_colocated_worker_cls_fused",
            "create_colocated_worker_raw_cls",
        }
    ),
    "decorator": frozenset(
        {
            "Dispatch",
            "Execute",
            "PerRank",
            "Replicate",
            "Shard",
            "make_nd_compute_dataproto_dispatch_fn",
            "register",
            "register_dispatch_mode",
            "update_dispatch_mode",
        }
    ),
    "errors": frozenset(
        {
            "AsyncwgError",
            "CallTimeoutError",
            "DispatchError",
            "GroupBrokenError",
            "GroupClosedError",
            "InternalError",
            "ResourceError",
            "UsageError",
            "WorkerDiedError",
            "WorkerError",
            "WorkerGroupError",
            "WorkerStartError",
        }
    ),
    "protocol": frozenset(
        {
            "DataProto",
            "all_gather_data_proto",
            "fold_batch_dim",
            "pad_dataproto_to_divisor",
            "unfold_batch_dim",
            "unpad_dataproto",
        }
    ),
    "resource_pool": frozenset(
        {"ResourcePool", "ResourcePoolManager", "merge_resource_pool", "split_resource_pool"}
    ),
    "rows": frozenset({"Rows", "RowsClosed", "RowsStatistics"}),
    "testing": frozenset({"FaultPlan", "Sequencer", "no_leaks"}),
    "worker": frozenset({"DistGlobalInfo", "DistRankInfo", "Worker"}),
    "worker_group": frozenset({"ClassWithInitArgs", "RestartPolicy", "WorkerGroup"}),
}
"""By public module, without ``asyncwg.``."""

NOT_AT_THE_TOP: Final = frozenset({"blocking", "testing"})
"""Public modules whose names ``asyncwg`` does not repeat."""

TOP: Final = frozenset({"__version__", "current_call", "link", "run", "share", "shared_empty"})
"""What ``asyncwg`` has beside the names of its modules."""

NOT_YET: Final[frozenset[str]] = frozenset()
"""Names of the design that are still to come."""


def _load(name: str) -> ModuleType:
    if importlib.util.find_spec(f"asyncwg.{name}") is None:
        pytest.skip(f"there is no asyncwg.{name} yet")
    return importlib.import_module(f"asyncwg.{name}")


def _public_modules() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(asyncwg.__path__))
    return sorted(name for name in found if not name.startswith("_"))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_module_offers_exactly_these_names(name: str) -> None:
    module = _load(name)
    assert set(module.__all__) == NAMES[name] - NOT_YET
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


@pytest.mark.parametrize("name", _public_modules())
def test_a_public_module_says_what_is_public(name: str) -> None:
    names: Any = _load(name).__all__
    assert list(names) == sorted(set(names))


def test_the_package_repeats_the_names_of_its_modules() -> None:
    here = set(_public_modules()) - NOT_AT_THE_TOP
    repeated = (names for module, names in NAMES.items() if module in here)
    expected = TOP.union(*repeated) - NOT_YET
    package: Any = asyncwg
    assert set(package.__all__) == expected
    assert [name for name in sorted(expected) if not hasattr(asyncwg, name)] == []
