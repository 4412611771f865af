"""The workloads: what one repetition does, in which unit it is told, and what it should cost."""

from __future__ import annotations

from typing import NamedTuple

WORKERS = 4
BIG = 64 * 1024 * 1024  # float32 elements: 256 MB
SMALL = 1024  # float32 elements: 4 kB
IN_FLIGHT = 200


class Workload(NamedTuple):
    """One row of the results.

    ``floors`` are names of the floor's own measurements; the fastest of them counts. A name that
    starts with ``=`` is another workload of the same library.
    """

    name: str
    method: str
    text: str
    floors: tuple[str, ...]
    floor_text: str
    target: float
    large: bool = False

    @property
    def unit(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("_")[2]

    @property
    def scale(self) -> float:
        """What seconds are multiplied with."""
        return {"us": 1e6, "ms": 1e3, "s": 1.0}[self.unit]


_ECHO_ONE = ("one_us", "one_loop_us")
_ECHO_ALL = ("all_us", "all_loop_us")


WORKLOADS = [
    Workload("one_us", "one", "an empty call to one worker", _ECHO_ONE, "asyncio echo of one", 1.5),
    Workload("all_us", "all", "an empty call to all", _ECHO_ALL, "asyncio echo of four", 1.3),
    Workload(
        "pipelined_us", "pipelined", "200 empty calls in flight, per call",
        _ECHO_ONE, "asyncio echo of one", 0.6,
    ),
    Workload(
        "small4k_all_us", "small", "a 4 kB tensor to all, a float back",
        ("=all_us",), "its own all_us", 2.0,
    ),
    Workload(
        "broadcast_ms", "broadcast", "256 MB to all",
        ("broadcast_ms",), "one warm memcpy", 1.2, True,
    ),
    Workload(
        "scatter_ms", "scatter", "64 MB to each",
        ("scatter_ms",), "one warm memcpy", 1.2, True,
    ),
    Workload(
        "echo_ms", "echo", "64 MB to each and back",
        ("echo_ms",), "the computing alone", 1.25, True,
    ),
    Workload(
        "gather_ms", "gather", "64 MB from each, joined",
        ("gather_ms",), "the computing alone", 1.4, True,
    ),
]  # fmt: skip
FLOOR_ONLY = [
    Workload("pair_us", "pair", "blocking socket pair, no event loop", (), "", 0),
    Workload("one_us", "one", "echo of one, child blocks", (), "", 0),
    Workload("one_loop_us", "one_loop", "echo of one, child runs the loop", (), "", 0),
    Workload("all_us", "all", "echo of four, children block", (), "", 0),
    Workload("all_loop_us", "all_loop", "echo of four, children run the loop", (), "", 0),
    Workload("broadcast_ms", "broadcast", "one memcpy of big", (), "", 0, True),
    Workload("broadcast_two_ms", "broadcast_two", "the same in two threads", (), "", 0, True),
    Workload("scatter_ms", "scatter", "memcpy of four quarters", (), "", 0, True),
    Workload("echo_ms", "echo", "chunk * 1 in four processes", (), "", 0, True),
    Workload("echo_warm_ms", "echo_warm", "the same, into warm memory", (), "", 0, True),
    Workload("gather_ms", "gather", "torch.ones in four processes", (), "", 0, True),
    Workload("gather_warm_ms", "gather_warm", "the same, into warm memory", (), "", 0, True),
]
"""All that the floor measures. What ratios are taken to is said by the workloads."""
COLD = [
    Workload(
        "start_s", "", "first group, to its first answer", ("import_torch_s",), "import torch", 1.3
    ),
    Workload("second_start_s", "", "a second group", (), "0.05 s", 0.05),
    Workload("close_s", "", "until all processes are gone", (), "0.05 s", 0.05),
]
BY_NAME = {w.name: w for w in [*FLOOR_ONLY, *WORKLOADS, *COLD]}

PEER_TARGETS = {
    "one_us": {"ray": 15, "monarch": 15, "xoscar": 3},
    "all_us": {"ray": 20, "monarch": 20, "xoscar": 7},
    "pipelined_us": {"ray": 12, "monarch": 12},
    "small4k_all_us": {"ray": 20, "monarch": 20, "xoscar": 4},
    "broadcast_ms": {"ray": 20, "monarch": 20, "xoscar": 20},
    "scatter_ms": {"ray": 35, "monarch": 35, "xoscar": 35},
    "echo_ms": {"ray": 12, "monarch": 12, "xoscar": 12},
    "gather_ms": {"ray": 3, "monarch": 3, "xoscar": 3},
    "start_s": {"ray": 2, "monarch": 2, "xoscar": 2},
}
"""How many times longer than asyncwg a peer is meant to take."""
