"""``python -m asyncwg``: what can be done about groups that outlive the program that started them."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from asyncwg._attach.look import ask, summaries
from asyncwg.errors import AsyncwgError

__all__ = ["main"]

_COLUMNS: Final = ("name", "pid", "class", "ranks", "devices", "state", "since")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncwg", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="show the groups of this user that can be attached to")
    stop = commands.add_parser("stop", help="end a group, politely if it lets us")
    stop.add_argument("name")
    stop.add_argument("--grace", type=float, default=5.0, help="seconds until it is killed")
    stacks = commands.add_parser("stacks", help="show where the ranks of a group are")
    stacks.add_argument("name")
    given = parser.parse_args(argv)
    try:
        if given.command == "list":
            _show(asyncio.run(summaries()))
        elif given.command == "stop":
            asyncio.run(ask(given.name, "shutdown", given.grace, until_gone=given.grace + 10))
        else:
            print(asyncio.run(ask(given.name, "stacks", 2.0)))
    except AsyncwgError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _show(found: Sequence[dict[str, Any]]) -> None:
    if not found:
        print("no groups")
        return
    rows: list[list[str]] = [list(_COLUMNS)]
    for each in found:
        since = each.get("since")
        shown = {
            **each,
            "devices": ",".join(each.get("devices", ())) or "-",
            "since": "-" if since is None else time.strftime("%F %T", time.localtime(since)),
        }
        rows.append([str(shown.get(column, "-")) for column in _COLUMNS])
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main())
