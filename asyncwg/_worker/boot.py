"""From a fresh process to one that may run user code: environment first, then everything else."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
from typing import Any

from asyncwg import _linux as linux
from asyncwg._wire.launch import STACKS_SIGNAL, BootRecord
from asyncwg._worker import context


def read_record(fd: int) -> BootRecord:
    """Read the record from its memory file and close it."""
    with open(fd, "rb") as file:
        file.seek(0)
        record: BootRecord = json.loads(file.read())
    return record


def prepare(record: BootRecord, stacks: int) -> None:
    """Make this process what the record says. No user code has run before, or runs here."""
    os.environ.clear()
    os.environ.update(record["env"])
    sys.path[:] = record["sys_path"]
    sys.argv[:] = record["argv"]
    try:
        os.chdir(record["cwd"])
    except OSError:
        pass  # it was removed; relative paths fail then, as they do in the controller
    # Ctrl-C is the controller's business. A handler, unlike SIG_IGN, is not inherited by programs.
    signal.signal(signal.SIGINT, lambda _signum, _frame: None)
    faulthandler.enable(file=2, all_threads=True)
    # The main thread alone, whose handler it is: other threads go on meanwhile, and what faulthandler
    # reads of their frames may be freed under its hands, which would end a healthy process.
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=False)
    context.place = context.Place(
        record["group"],
        record["rank"],
        record["world_size"],
        record["local_rank"],
        record["local_world_size"],
    )
    linux.set_name(f"{record['group'][:10]}:{record['rank']}")
    for name in record["preload"]:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # the guardian has told it, where it was asked for by name
    _settle_libraries(record["threads"])


def _settle_libraries(threads: int | None) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)
    random: Any = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()  # numpy seeds itself at import: forked ranks would all draw the same numbers
