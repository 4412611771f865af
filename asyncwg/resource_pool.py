"""Where a group's ranks run: how many there are per node, and which device each one gets.

A pool is a description until a group starts in it. Then the pool *holds* devices, for all groups
that share it, until the last of them has ended. Who holds what is written in one ledger per
controller process; the pools themselves don't change.

P-1  No two holds have a device in common.
P-2  All groups of a pool, and of what was split from it or merged with it, see the same devices.
P-3  `ResourcePool.acquire` takes everything it asks for or changes nothing.
P-4  A forked child holds nothing: it is another controller, with a ledger of its own.
"""

from __future__ import annotations

import copy
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple

from asyncwg._devices import Device, find_devices
from asyncwg.errors import ResourceError, UsageError

__all__ = ["ResourcePool", "ResourcePoolManager", "merge_resource_pool", "split_resource_pool"]


class _Family:
    """What a pool shares with the pools split from it: a row of places, held together.

    Equal only to itself. ``size`` grows with `ResourcePool.add_node` while nothing is held.
    """

    def __init__(self, candidates: tuple[Device, ...] | None) -> None:
        self.candidates: Final = candidates
        """The devices it may take, in order; None for places on CPUs."""
        self.size = 0
        """Number of places, one device each."""


class _Place(NamedTuple):
    """Where one rank runs."""

    family: _Family
    slot: int
    """Position in the family, so also in its devices."""
    node: int
    """Number of the node within the family."""


class _Grant(NamedTuple):
    """One group's use of some places of one family."""

    pool: ResourcePool
    group: str
    slots: frozenset[int]


@dataclass(slots=True)
class _Hold:
    """The devices of one family while groups use it; () on CPUs."""

    devices: tuple[Device, ...]
    grants: list[_Grant] = field(default_factory=list)

    def groups(self, slots: frozenset[int] | None = None) -> list[str]:
        """Names of the groups (that use one of ``slots``), in order of their start."""
        return [g.group for g in self.grants if slots is None or not slots.isdisjoint(g.slots)]


class _Ledger:
    """Which family holds which devices in this process. Only `ResourcePool` asks it."""

    def __init__(self) -> None:
        # Re-entrant: a group may be collected, and so ended, while its own thread is in here.
        self._lock = threading.RLock()
        self._holds: dict[_Family, _Hold] = {}

    def acquire(self, pool: ResourcePool, group: str) -> None:
        """Write down that ``group`` uses the pool's places; nothing is written if it can't."""
        with self._lock:
            wanted = _by_family(pool.places)
            holds = dict(self._holds)
            for family, slots in wanted.items():
                if family not in holds:
                    holds[family] = _Hold(_pick(family, holds))
                if pool.use_gpu:
                    _check_room(holds[family], slots, pool.max_colocate_count)
            for family, slots in wanted.items():
                holds[family].grants.append(_Grant(pool, group, slots))
                self._holds[family] = holds[family]

    def release(self, pool: ResourcePool, group: str) -> None:
        """Forget one use of the pool's places by ``group``; do nothing if there is none."""
        with self._lock:
            for family, slots in _by_family(pool.places).items():
                hold = self._holds.get(family)
                grant = _Grant(pool, group, slots)
                if hold is None or grant not in hold.grants:
                    continue
                hold.grants.remove(grant)
                if not hold.grants:
                    del self._holds[family]

    def get(self, family: _Family) -> _Hold | None:
        """Return what ``family`` holds."""
        with self._lock:
            return self._holds.get(family)

    def grow(self, family: _Family, count: int) -> None:
        """Give ``family`` more places, while nothing holds it to its number."""
        with self._lock:
            hold = self._holds.get(family)
            if hold is not None:
                raise UsageError(
                    f"a node can't be added while the pool is used by {_named(hold.groups())}: "
                    "add it before the first group starts"
                )
            if family.candidates is not None:
                _check_enough(family.candidates, family.size + count, self._holds)
            family.size += count

    def check_enough(self, candidates: Sequence[Device], count: int) -> None:
        """Raise if ``candidates`` are fewer than ``count``, free or not."""
        with self._lock:
            _check_enough(candidates, count, self._holds)


def _by_family(places: Iterable[_Place]) -> dict[_Family, frozenset[int]]:
    found: dict[_Family, set[int]] = {}
    for place in places:
        found.setdefault(place.family, set()).add(place.slot)
    return {family: frozenset(slots) for family, slots in found.items()}


def _pick(family: _Family, holds: Mapping[_Family, _Hold]) -> tuple[Device, ...]:
    """Choose the first free candidates."""
    if family.candidates is None:
        return ()
    taken = {device.key for hold in holds.values() for device in hold.devices}
    free = [device for device in family.candidates if device.key not in taken]
    if len(free) < family.size:
        raise ResourceError(
            f"{family.size} devices are needed and {len(free)} are free. "
            f"{_inventory(family.candidates, holds)}. End a group that holds some, share its pool, "
            "or ask for fewer"
        )
    return tuple(free[: family.size])


def _check_enough(candidates: Sequence[Device], count: int, holds: Mapping[_Family, _Hold]) -> None:
    if count > len(candidates):
        raise ResourceError(
            f"{count} devices are needed and there are {len(candidates)}. "
            f"{_inventory(candidates, holds)}. Ask for fewer processes, or pass use_gpu=False to "
            "run them on CPUs"
        )


def _check_room(hold: _Hold, slots: frozenset[int], limit: int) -> None:
    """Raise if ``limit`` groups use one of ``slots`` already."""
    users = Counter(slot for grant in hold.grants for slot in grant.slots)
    if any(users[slot] >= limit for slot in slots):
        raise ResourceError(
            f"max_colocate_count={limit} groups may share a device, and these are in use by "
            f"{_named(hold.groups(slots))}. End one of them, or build the pool with a larger "
            "max_colocate_count"
        )


def _inventory(candidates: Sequence[Device], holds: Mapping[_Family, _Hold]) -> str:
    """Say which of ``candidates`` are free and who holds the rest."""
    holder = {device.key: hold for hold in holds.values() for device in hold.devices}
    free = [device for device in candidates if device.key not in holder]
    parts = [f"Free: {_entries(free)}"]
    for hold in holds.values():
        held = [device for device in candidates if holder.get(device.key) is hold]
        if held:
            parts.append(f"held by {_named(hold.groups())}: {_entries(held)}")
    return "; ".join(parts)


def _named(groups: Sequence[str]) -> str:
    names = ", ".join(repr(group) for group in groups)
    return f"group {names}" if len(groups) == 1 else f"groups {names}"


def _entries(devices: Iterable[Device]) -> str:
    return ", ".join(repr(device.entry) for device in devices) or "none"


_ledger = _Ledger()


def _forget() -> None:
    """Start with an empty ledger and, should a thread have held it in the parent, a new lock."""
    global _ledger  # the one thing of this module that changes
    _ledger = _Ledger()


os.register_at_fork(after_in_child=_forget)


class ResourcePool:
    """The places of a group's ranks: processes per node, and a device for each.

    Several groups may share a pool, and with it the devices. Two pools never share one.

    Args:
        process_on_nodes: number of processes on each node, ``[2, 3]`` for two on the first and
            three on the second. The nodes of one machine are simulated: their ranks get disjoint
            devices.
        max_colocate_count: how many groups may share a device. Does not limit pools on CPUs.
        n_gpus_per_node: kept for programs written for verl.
        use_gpu: whether each rank gets a GPU; None for yes if any is visible.
        devices: the GPUs to take from, as ``CUDA_VISIBLE_DEVICES`` names them; None for every
            visible one. Rank i gets the i-th that is free.

    Raises:
        UsageError: an argument can't be right.
        ResourceError: an entry of ``devices`` or of ``CUDA_VISIBLE_DEVICES`` is not there, or more
            processes are asked for than there are devices, whoever holds them.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
        *,
        use_gpu: bool | None = None,
        devices: Sequence[str | int] | None = None,
    ) -> None:
        if use_gpu is not None and not isinstance(use_gpu, bool):
            raise UsageError(f"use_gpu must be True, False or None, not {use_gpu!r}")
        nodes = [] if process_on_nodes is None else _counts(process_on_nodes, "process_on_nodes")
        self.max_colocate_count: Final = _count(max_colocate_count, "max_colocate_count")
        self.n_gpus_per_node: Final = _count(n_gpus_per_node, "n_gpus_per_node")
        candidates = _candidates(use_gpu, devices)
        if candidates is not None:
            # All nodes at once: an error that counts the first ones alone would mislead.
            _ledger.check_enough(candidates, sum(nodes))
        self.use_gpu: Final = candidates is not None
        """Whether each rank gets a GPU."""
        self.places: tuple[_Place, ...] = ()
        """By rank. For `split_resource_pool` and `merge_resource_pool`, who also write it."""
        self.family: _Family | None = _Family(candidates)
        """What `add_node` adds to; None in a pool that has the places of others."""
        for count in nodes:
            self.add_node(count)

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return len(self.places)

    @property
    def store(self) -> list[int]:
        """Number of processes on each node."""
        return [len(node) for node in self._nodes()]

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each rank while groups run in the pool; () before, after, and on CPUs."""
        held = [entry for entry in self._held_entries() if entry is not None]
        return tuple(held)

    def __call__(self) -> list[int]:
        """Return `store`."""
        return self.store

    def add_node(self, process_count: int) -> None:
        """Add a node with ``process_count`` processes, while no group runs in the pool."""
        count = _count(process_count, "the number of processes on a node")
        if self.family is None:
            raise UsageError(
                "a pool that was split or merged has the places of others and takes no node of its "
                "own: add it to the pool it came from, before that"
            )
        first, node = self.family.size, len(self.store)
        _ledger.grow(self.family, count)
        self.places += tuple(_Place(self.family, first + i, node) for i in range(count))

    def local_world_size_list(self) -> list[int]:
        """Return, by rank, the number of processes on its node."""
        return [len(node) for node in self._nodes() for _ in node]

    def local_rank_list(self) -> list[int]:
        """Return, by rank, its position on its node."""
        return [position for node in self._nodes() for position in range(len(node))]

    def acquire(self, group_name: str) -> tuple[str | None, ...]:
        """Take the pool's devices for a group that starts. For `asyncwg.worker_group`.

        Args:
            group_name: shown to others who want the devices.

        Returns:
            The device of each rank, None for each on CPUs.

        Raises:
            ResourceError: devices are held by other pools, or too many groups share this one.
                Nothing has been taken.
        """
        if not self.places:
            raise ResourceError(
                "the pool has no process: give process_on_nodes, for example "
                "ResourcePool(process_on_nodes=[2]), or call add_node"
            )
        _ledger.acquire(self, group_name)
        return self._held_entries()

    def release(self, group_name: str) -> None:
        """Undo one `acquire`. Does nothing where there is none to undo, so clean-ups may repeat."""
        _ledger.release(self, group_name)

    def _nodes(self) -> list[list[_Place]]:
        """Group the places by node; neighbours on one node count together."""
        grouped = groupby(self.places, key=lambda place: (place.family, place.node))
        return [list(node) for _, node in grouped]

    def _held_entries(self) -> tuple[str | None, ...]:
        entries: list[str | None] = []
        for place in self.places:
            hold = _ledger.get(place.family)
            entries.append(hold.devices[place.slot].entry if hold and hold.devices else None)
        return tuple(entries)

    def __repr__(self) -> str:
        state = [repr(self.store), "GPUs" if self.use_gpu else "CPUs"]
        if self.devices:
            state.append("holds " + ", ".join(repr(entry) for entry in self.devices))
        groups: list[str] = []
        for family, slots in _by_family(self.places).items():
            hold = _ledger.get(family)
            groups += hold.groups(slots) if hold else []
        state.append(_named(list(dict.fromkeys(groups))) if groups else "idle")
        return f"ResourcePool({'; '.join(state)})"


def split_resource_pool(
    resource_pool: ResourcePool, split_size: int | Sequence[int]
) -> list[ResourcePool]:
    """Cut a pool into pools with disjoint devices.

    The parts hold the whole pool's devices together: while a group runs in one, nobody else gets
    the devices of the others. A part can be split again, and may span nodes.

    Args:
        resource_pool: is not changed, and can still be used.
        split_size: number of processes in each part, which must divide ``world_size``; or one
            number per part, which must sum to it.

    Returns:
        The parts, in rank order.
    """
    _check_pool(resource_pool)
    total = resource_pool.world_size
    if isinstance(split_size, Sequence) and not isinstance(split_size, str | bytes):
        sizes = _counts(split_size, "split_size")
        if sum(sizes) != total:
            raise UsageError(
                f"split_size={sizes} sums to {sum(sizes)} and the pool has {total} processes: "
                "every process belongs to one part"
            )
    else:
        size = _count(split_size, "split_size")
        if not total or total % size:
            raise UsageError(
                f"split_size={size} does not divide the pool's {total} processes: give a divisor, "
                "or a list with the size of each part"
            )
        sizes = [size] * (total // size)
    ends = accumulate(sizes)
    return [
        _derive(resource_pool, resource_pool.places[end - size : end])
        for size, end in zip(sizes, ends, strict=True)
    ]


def merge_resource_pool(rp1: ResourcePool, rp2: ResourcePool) -> ResourcePool:
    """Make one pool of two: the ranks of the first, then those of the second.

    It has the very devices of both, and groups in any of the three count together for
    ``max_colocate_count``. Neither pool is changed.
    """
    _check_pool(rp1)
    _check_pool(rp2)
    for option in ("use_gpu", "max_colocate_count", "n_gpus_per_node"):
        first, second = getattr(rp1, option), getattr(rp2, option)
        if first != second:
            raise UsageError(
                f"the pools differ in {option} ({first!r} and {second!r}): build them alike"
            )
    places = rp1.places + rp2.places
    if len(set(places)) < len(places):
        raise UsageError("the pools have ranks in common: merge pools that are disjoint")
    return _derive(rp1, places)


def _derive(model: ResourcePool, places: tuple[_Place, ...]) -> ResourcePool:
    """Make a pool of places that other pools have, with the options of ``model``."""
    pool = copy.copy(model)
    pool.places = places
    pool.family = None
    return pool


class ResourcePoolManager:
    """Pools by name, and which of them each role of a program uses.

    Args:
        resource_pool_spec: processes per node of each pool, by the pool's name.
        mapping: the pool's name, by role; a role may be anything that can be a key.
        max_colocate_count: as for `ResourcePool`, for each pool.
        use_gpu: as for `ResourcePool`, for each pool.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Any, str],
        *,
        max_colocate_count: int = 10,
        use_gpu: bool | None = None,
    ) -> None:
        self.resource_pool_spec: Final = {
            name: _counts(nodes, f"resource_pool_spec[{name!r}]")
            for name, nodes in resource_pool_spec.items()
        }
        self.mapping: Final = dict(mapping)
        self.resource_pool_dict: Final[dict[str, ResourcePool]] = {}
        """The pools by name, once `create_resource_pool` has been called."""
        self._max_colocate_count = _count(max_colocate_count, "max_colocate_count")
        self._use_gpu = use_gpu
        for role, name in self.mapping.items():
            if name not in self.resource_pool_spec:
                raise UsageError(
                    f"role {role!r} is mapped to the pool {name!r}, and resource_pool_spec has "
                    f"{sorted(self.resource_pool_spec)}"
                )

    def create_resource_pool(self) -> None:
        """Build the pools. Later calls change nothing.

        Raises:
            ResourceError: the pools together need more devices than there are. None is built.
        """
        if self.resource_pool_dict:
            return
        # One pool with all nodes can be built exactly when there are devices for all pools.
        self._build([count for nodes in self.resource_pool_spec.values() for count in nodes])
        pools = {name: self._build(nodes) for name, nodes in self.resource_pool_spec.items()}
        self.resource_pool_dict.update(pools)

    def _build(self, nodes: Sequence[int]) -> ResourcePool:
        return ResourcePool(nodes, self._max_colocate_count, use_gpu=self._use_gpu)

    def get_resource_pool(self, role: Any) -> ResourcePool:
        """Return the pool of ``role``."""
        if role not in self.mapping:
            known = ", ".join(repr(known) for known in self.mapping)
            raise UsageError(f"there is no role {role!r} in the mapping; it has {known}")
        if not self.resource_pool_dict:
            raise UsageError("there are no pools yet: call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of processes, and so of GPUs where there are any, of all pools."""
        return sum(sum(nodes) for nodes in self.resource_pool_spec.values())


def _candidates(
    use_gpu: bool | None, devices: Sequence[str | int] | None
) -> tuple[Device, ...] | None:
    """Return the devices that a new pool may take; None for a pool on CPUs."""
    wanted = None if devices is None else _device_entries(devices)
    if use_gpu is False:
        if wanted:
            raise UsageError(f"use_gpu=False and devices={wanted} contradict: leave one out")
        return None
    found = find_devices(wanted)
    if found:
        return found
    if use_gpu:
        raise ResourceError(
            "use_gpu=True, and no GPU is visible: CUDA_VISIBLE_DEVICES names none and no driver "
            "lists one. Pass use_gpu=False, or devices= where they exist and can't be listed"
        )
    return None


def _device_entries(devices: Sequence[str | int]) -> list[str]:
    if not isinstance(devices, Sequence) or isinstance(devices, str | bytes):
        raise UsageError(f"devices must be a list such as ['0', '1'], not {devices!r}")
    entries: list[str] = []
    for device in devices:
        if isinstance(device, bool) or not isinstance(device, str | int):
            raise UsageError(f"devices has {device!r}: name a device by its index or its UUID")
        entry = str(device).strip()
        if not entry or "," in entry or entry.startswith("-"):
            raise UsageError(f"devices has {device!r}, which names no device, or not just one")
        entries.append(entry)
    return entries


def _counts(values: Sequence[int], what: str) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UsageError(f"{what} must be a list with one number per node or part, not {values!r}")
    return [_count(value, f"each number in {what}") for value in values]


def _count(value: Any, what: str) -> int:
    """Check a number of things that there must be at least one of."""
    # Not isinstance(int): numpy's integers are welcome. bool has __index__ too.
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"{what} must be an int, not {value!r}")
    count = int(value)
    if count < 1:
        raise UsageError(f"{what} must be at least 1, not {count}")
    return count


def _check_pool(value: object) -> None:
    if not isinstance(value, ResourcePool):
        raise UsageError(f"a ResourcePool is needed, not {value!r}")
