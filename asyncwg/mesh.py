"""Which rank is where: tensor, data, pipeline and context parallelism. Arithmetic only.

A *mesh* is a name and, for each rank of a group, its data-parallel (dp) rank and whether its result
counts. Workers register it; `check_mesh` proves that a call over it loses no row and doubles none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypedDict

from asyncwg.errors import DispatchError, UsageError

__all__ = ["CheckedMesh", "DistGlobalInfo", "DistRankInfo", "MeshTable", "check_mesh"]

MeshTable: TypeAlias = Sequence[tuple[int, bool] | None]
"""By global rank: the dp rank and whether the rank collects; None where it has not registered."""


class DispatchCollect(TypedDict):
    """What a worker tells of its meshes, by their names."""

    dispatch_dp_rank: dict[str, int]
    """Its dp rank."""
    collect_dp_rank: dict[str, bool]
    """Whether its result counts."""


@dataclass(frozen=True, slots=True)
class DistRankInfo:
    """Where one rank stands along each axis, counted from 0."""

    tp_rank: int
    """Tensor parallel."""
    dp_rank: int
    """Data parallel."""
    pp_rank: int
    """Pipeline parallel."""
    cp_rank: int = 0
    """Context parallel."""


@dataclass(frozen=True, slots=True)
class DistGlobalInfo:
    """How many ranks there are along each axis. Ranks are counted in Megatron's order.

    That is: tp changes fastest, then cp, then dp, and pp slowest.

    Raises:
        UsageError: a size is less than 1.
    """

    tp_size: int
    """Tensor parallel."""
    dp_size: int
    """Data parallel."""
    pp_size: int
    """Pipeline parallel."""
    cp_size: int = 1
    """Context parallel."""

    def __post_init__(self) -> None:
        for name in ("tp_size", "dp_size", "pp_size", "cp_size"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)!r}")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp_size * self.cp_size * self.dp_size * self.pp_size

    def rank_info(self, rank: int) -> DistRankInfo:
        """Return where the global ``rank`` stands.

        Raises:
            UsageError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise UsageError(f"there is no rank {rank} among {self.world_size} ranks")
        rest, tp_rank = divmod(rank, self.tp_size)
        rest, cp_rank = divmod(rest, self.cp_size)
        pp_rank, dp_rank = divmod(rest, self.dp_size)
        return DistRankInfo(tp_rank, dp_rank, pp_rank, cp_rank)

    def rank_of(self, info: DistRankInfo) -> int:
        """Return the global rank that stands at ``info``.

        Raises:
            UsageError: ``info`` lies outside of an axis.
        """
        rank = 0
        for axis in ("pp", "dp", "cp", "tp"):
            place, size = getattr(info, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= place < size:
                raise UsageError(f"there is no {axis}_rank {place}: {axis}_size is {size}")
            rank = rank * size + place
        return rank

    def axes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return, by the name of the axis, the place of the global ``rank`` on it and its size.

        Raises:
            UsageError: there is no such rank.
        """
        info = self.rank_info(rank)
        return {
            "pp": (info.pp_rank, self.pp_size),
            "dp": (info.dp_rank, self.dp_size),
            "cp": (info.cp_rank, self.cp_size),
            "tp": (info.tp_rank, self.tp_size),
        }

    def collects(self, rank: int) -> bool:
        """Tell whether the result of ``rank`` counts: tp 0, cp 0, last pp; one rank for each dp.

        Raises:
            UsageError: there is no such rank.
        """
        info = self.rank_info(rank)
        return info.tp_rank == 0 and info.cp_rank == 0 and info.pp_rank == self.pp_size - 1


def dp_place(
    name: str,
    axes: Mapping[Any, tuple[int, int]],
    dp: Sequence[str | int],
    collect: Mapping[Any, int],
) -> tuple[int, bool]:
    """Return a rank's dp rank, and whether its result counts, from where it stands on each axis.

    Args:
        name: of the mesh, for messages.
        axes: by the name of the axis, the rank's place on it and its size.
        dp: the axes over which batches are split, counted together, the last of them fastest.
        collect: on the other axes, the place of the rank whose result counts, where it is not 0;
            a negative one counts from the end.

    Raises:
        UsageError: there is no such axis or place, or an axis is named twice.
    """
    known = ", ".join(repr(axis) for axis in axes)
    for axis in (*dp, *collect):
        if axis not in axes:
            raise UsageError(f"mesh {name!r} has no dimension {axis!r}; it has {known}")
    if not dp or len({*dp, *collect}) < len(dp) + len(collect):
        raise UsageError(
            f"mesh {name!r}: dp={list(dp)!r} and collect={dict(collect)!r} must name a dimension for "
            "the data and no dimension twice"
        )
    dp_rank = 0
    for axis in dp:
        place, size = axes[axis]
        dp_rank = dp_rank * size + place
    is_collect = True
    for axis in axes.keys() - set(dp):
        place, size = axes[axis]
        wanted = collect.get(axis, 0)
        if not -size <= wanted < size:
            raise UsageError(
                f"mesh {name!r}: collect={dict(collect)!r}, and dimension {axis!r} has {size} places"
            )
        is_collect = is_collect and place == wanted % size
    return dp_rank, is_collect


def learn_meshes(
    tables: dict[str | None, dict[str, list[tuple[int, bool] | None]]],
    told: Mapping[str | None, DispatchCollect],
    rank: int,
    world_size: int,
) -> None:
    """Write what ``rank`` tells of its meshes into the controller's tables.

    Args:
        tables: by role (None for the worker itself) and the mesh's name.
        told: by role, what ``get_dispatch_collect`` of that role returned.
        rank: who tells it.
        world_size: length of a new table.
    """
    for role, meshes in told.items():
        collects = meshes["collect_dp_rank"]
        for mesh, dp_rank in meshes["dispatch_dp_rank"].items():
            table = tables.setdefault(role, {}).setdefault(mesh, [None] * world_size)
            table[rank] = (dp_rank, bool(collects[mesh]))


class CheckedMesh(NamedTuple):
    """A mesh as a call uses it; `check_mesh` makes it. Positions count the ranks of the call."""

    dp_size: int
    """Number of dp ranks, so of shards."""
    dp_of: tuple[int, ...]
    """By position: the dp rank there."""
    collectors: tuple[int, ...]
    """By dp rank: the position whose result counts."""


def check_mesh(name: str, table: MeshTable, ranks: Sequence[int] | None = None) -> CheckedMesh:
    """Check that splitting over the dp ranks and collecting loses and doubles nothing.

    Args:
        name: of the mesh, for messages.
        table: of the whole group.
        ranks: the global ranks that the call goes to, in its order; None for all.

    Raises:
        DispatchError: a rank has not registered, dp ranks don't count from 0 without a gap, a dp
            rank has no collecting rank or several, or ``ranks`` misses a dp rank or its collector.
    """
    collectors = _check_whole(name, table)
    chosen = range(len(table)) if ranks is None else ranks
    dp_of = tuple(entry[0] for rank in chosen if (entry := table[rank]) is not None)
    position = {rank: i for i, rank in enumerate(chosen)}
    for dp_rank, collector in enumerate(collectors):
        if collector in position:
            continue
        here = _names(chosen)
        if dp_rank not in dp_of:
            raise DispatchError(
                f"mesh {name!r}: the call goes to {here} only, and none of them has dp rank "
                f"{dp_rank}: its rows would be lost. Call the whole group, or a view that has a "
                "rank of every dp rank, or use wg[rank] for a call that splits nothing"
            )
        raise DispatchError(
            f"mesh {name!r}: the call goes to {here} only, without rank {collector}, which "
            f"collects the results of dp rank {dp_rank}: take it into the view"
        )
    return CheckedMesh(len(collectors), dp_of, tuple(position[rank] for rank in collectors))


def _check_whole(name: str, table: MeshTable) -> list[int]:
    """Return the collecting global rank of each dp rank."""
    missing = [rank for rank, entry in enumerate(table) if entry is None]
    if missing or not table:
        raise DispatchError(
            f"mesh {name!r} is not registered on {_names(missing) or 'any rank'}: every rank must "
            f"call self._register_dispatch_collect_info({name!r}, dp_rank, is_collect), "
            "in its __init__ for example"
        )
    ranks_of: dict[int, list[int]] = {}
    collectors_of: dict[int, list[int]] = {}
    for rank, entry in enumerate(table):
        if entry is not None:
            ranks_of.setdefault(entry[0], []).append(rank)
            if entry[1]:
                collectors_of.setdefault(entry[0], []).append(rank)
    _check_dp_ranks(name, ranks_of)
    for dp_rank, ranks in sorted(ranks_of.items()):
        collectors = collectors_of.get(dp_rank, [])
        if len(collectors) != 1:
            found = f"{_names(collectors)} all collect" if collectors else "none collects"
            raise DispatchError(
                f"mesh {name!r}: of {_names(ranks)}, which have dp rank {dp_rank}, {found}: "
                "exactly one must be registered with is_collect=True"
            )
    return [collectors_of[dp_rank][0] for dp_rank in range(len(ranks_of))]


def _check_dp_ranks(name: str, ranks_of: dict[int, list[int]]) -> None:
    gaps = sorted(set(range(max(ranks_of) + 1)) - set(ranks_of))
    if gaps or min(ranks_of) < 0:
        what = f"no rank has dp rank {', '.join(map(str, gaps))}" if gaps else "one is negative"
        raise DispatchError(
            f"mesh {name!r}: dp ranks must count from 0 without a gap, and {what} "
            f"(registered: {', '.join(map(str, sorted(ranks_of)))})"
        )


def _names(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
