"""The life of a worker: build the user's object, serve calls, stop."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from asyncwg import _linux as linux
from asyncwg import distributed
from asyncwg._wire import codec, failures
from asyncwg._wire.frames import Kind, pack, unpack
from asyncwg._wire.launch import Descriptors, Init
from asyncwg._worker.blocks import Blocks
from asyncwg._worker.boot import prepare, read_record
from asyncwg._worker.control import ControlLane
from asyncwg._worker.lanes import AsyncLane, ComputeLane
from asyncwg._worker.parts import Objects, blaming, hooks_of, objects_of, raise_together
from asyncwg._worker.service import Service, UnreadableError


def main(descriptors: Descriptors, guardian: int) -> NoReturn:
    """Run a worker until the controller stops it. Called in the main thread of a fresh process."""
    linux.die_with_parent(guardian)
    record = read_record(descriptors["boot"])
    blocks = Blocks(descriptors["arena"], record["arena_size"])
    compute = ComputeLane(socket.socket(fileno=descriptors["compute"]))
    control = ControlLane(socket.socket(fileno=descriptors["control"]), compute, blocks)
    prepare(record, descriptors["stacks"])
    distributed.install_rendezvous()
    code = _serve(compute, control, blocks, descriptors["lane"])
    _finish(code)


def _serve(compute: ComputeLane, control: ControlLane, blocks: Blocks, lane_fd: int | None) -> int:
    body, n_buffers, init_id = compute.wait_for(Kind.INIT)
    lane: AsyncLane | None = None
    try:
        init = _read_init(body, n_buffers)
        if lane_fd is not None:
            lane = AsyncLane(socket.socket(fileno=lane_fd), init.limits)
        objects = objects_of(init.cls(*init.args, **init.kwargs), init.roles)
        _set_up(objects, lane)
    except BaseException as error:  # noqa: BLE001  # border: a user's exception becomes the answer
        compute.channel.send(Service({}, (), blocks, ()).failure(init_id, error, skip_frames=1))
        control.exit_asked.wait()
        return 1
    service = Service(objects, init.addresses, blocks, init.to_device)
    if lane is not None:
        control.attach(lane)
        lane.serve(service)
    meshes = service.meshes()
    if meshes is not None:
        compute.channel.send(meshes)
    compute.channel.send(pack(Kind.READY, init_id))
    stop_id = compute.serve(service)
    try:
        if lane is not None:
            lane.stop()
        _close(objects, lane)
        compute.channel.send(pack(Kind.STOPPED, stop_id))
    except BaseException as error:  # noqa: BLE001  # border: a user's exception becomes the answer
        compute.channel.send(service.failure(stop_id, error, skip_frames=1))
    del objects
    service.forget()
    # Ranks leave when all have closed, so that nobody loses a peer it still talks to.
    control.exit_asked.wait()
    return 0


def _read_init(body: memoryview, n_buffers: int) -> Init:
    stream, buffers = unpack(body, n_buffers)
    try:
        init: Init = codec.decode(stream, buffers)
        return init
    except BaseException as error:
        raise UnreadableError(
            f"the worker's class or its arguments can't be unpickled in the worker: "
            f"{type(error).__name__}: {failures.text_of(error)}"
        ) from error


def _set_up(objects: Objects, lane: AsyncLane | None) -> None:
    for role, hook in hooks_of(objects, "setup"):
        with blaming(role, "setup()"):
            _call_hook(hook, lane)


def _close(objects: Objects, lane: AsyncLane | None) -> None:
    """Run every ``close()``, also after one has failed."""
    errors: list[BaseException] = []
    for role, hook in hooks_of(objects, "close"):
        try:
            with blaming(role, "close()"):
                _call_hook(hook, lane)
        except BaseException as error:  # noqa: BLE001  # raised below, when all have closed
            errors.append(error)
    raise_together(errors)


def _call_hook(hook: Callable[[], Any], lane: AsyncLane | None) -> None:
    value = hook()
    if inspect.iscoroutine(value):
        if lane is None:
            asyncio.run(value)
        else:
            lane.run(value)


def _finish(code: int) -> NoReturn:
    """Leave as a program does, without tearing down the interpreter piece by piece.

    Taking torch apart costs 50 ms and frees nothing that the kernel does not.
    """
    try:
        # As the interpreter does: executors let their threads go, and those are waited for.
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
        atexit._run_exitfuncs()  # noqa: SLF001  # what multiprocessing's own children call
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)
