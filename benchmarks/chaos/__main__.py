"""Run a random program; print a seed that fails, and how to run it again."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import sys
import time
import traceback
from itertools import islice

import uvloop

from asyncwg.testing import no_leaks
from benchmarks.chaos.player import Player
from benchmarks.chaos.program import program, sizes_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="the first seed (the time if none)")
    parser.add_argument("--operations", type=int, default=10_000, help="of each seed")
    parser.add_argument(
        "--seconds", type=float, default=None, help="go on with more seeds for so long"
    )
    parser.add_argument("--groups", type=int, default=2, help="groups that live at once")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), help="by the seed if not given")
    parser.add_argument("--verbose", action="store_true", help="tell every operation")
    options = parser.parse_args()
    faulthandler.enable()
    seed = int(time.time()) if options.seed is None else options.seed
    end = time.monotonic() + (options.seconds or 0)
    while True:
        failed = run(seed, options)
        if failed or time.monotonic() >= end:
            return failed
        seed += 1


def run(seed: int, options: argparse.Namespace) -> int:
    """Play one seed; 1 if it failed."""
    kind = options.loop or ("uvloop", "asyncio")[seed % 2]
    print(
        f"seed {seed}, {options.operations} operations, {options.groups} groups, {kind}", flush=True
    )
    factory = uvloop.new_event_loop if kind == "uvloop" else asyncio.SelectorEventLoop
    begun = time.monotonic()
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            player = runner.run(play(seed, options))
    except Exception:  # noqa: BLE001  # told, with what makes it happen again
        traceback.print_exc()
        print(
            f"failed: seed {seed}. Again: python -m benchmarks.chaos --seed {seed} "
            f"--operations {options.operations} --groups {options.groups} --loop {kind}"
        )
        return 1
    counts = ", ".join(f"{count} {name}" for name, count in player.counts.most_common())
    print(
        f"  {time.monotonic() - begun:.0f} s: {counts}; slowest end by a death {player.worst_death:.2f} s"
    )
    return 0


async def play(seed: int, options: argparse.Namespace) -> Player:
    """Play one seed on the running loop."""
    uvloop_pipe = uvloop.new_event_loop()  # libuv keeps a pipe for signals
    uvloop_pipe.close()
    async with no_leaks():
        # Values are made and compared on the loop: asyncio's debug mode would tell it each time.
        asyncio.get_running_loop().slow_callback_duration = 2.0
        player = Player(sizes_of(seed, options.groups), verbose=options.verbose)
        number = 0
        try:
            for number, op in enumerate(program(seed, options.operations, options.groups)):  # noqa: B007
                await player.play(op)
            await player.end()
        except BaseException:
            op = next(islice(program(seed, options.operations, options.groups), number, None))
            print(f"at operation {number}: {op}")
            print(await player.stacks(), flush=True)
            raise
    return player


if __name__ == "__main__":
    sys.exit(main())
