"""Whether a call may start: what the control lane and a lane that runs calls agree on.

The controller can drop a call only on all ranks or on none, so it asks each rank first: a call that
is *held* does not start until the controller says which it is. Calls reach a lane in the order of
their numbers, so the number of the last one that started tells which have not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from asyncwg._worker.context import CurrentCall


class Gate:
    """The gate of one lane. ``enter`` and ``leave`` belong to the lane, the rest to the control lane."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wake = wake
        self._last = 0
        self._held: set[int] = set()
        self._dropped: set[int] = set()
        self._cancelled: set[int] = set()
        """Calls that have not started, and whose caller has gone all the same: another rank has."""
        self._running: dict[int, CurrentCall] = {}

    def enter(self, call: CurrentCall) -> bool:
        """Start ``call`` unless it was dropped; wait while it is held. Returns whether to run it."""
        with self._lock:
            while self._held and call.id in self._held:
                self._changed.wait()
            return self._start(call)

    def try_enter(self, call: CurrentCall) -> bool | None:
        """As ``enter``; None instead of waiting, and then the ``wake`` of the gate tells when to retry."""
        with self._lock:
            if call.id in self._held:
                return None
            return self._start(call)

    def _start(self, call: CurrentCall) -> bool:
        self._last = call.id
        if self._dropped and call.id in self._dropped:
            self._dropped.discard(call.id)
            return False
        if self._cancelled and call.id in self._cancelled:
            self._cancelled.discard(call.id)
            call.cancel()
        self._running[call.id] = call
        return True

    def leave(self, call: CurrentCall) -> None:
        """Take note that ``call`` has ended."""
        # Of the methods of a dict, each is one step: the control lane sees the call or does not.
        self._running.pop(call.id, None)

    def hold(self, call_id: int) -> bool:
        """Keep a call from starting. Returns False if it has started, or ended, already."""
        with self._changed:
            if call_id <= self._last:
                return False
            self._held.add(call_id)
            return True

    def drop(self, call_id: int) -> None:
        """Never start a call that is held."""
        with self._changed:
            self._held.discard(call_id)
            if call_id > self._last:
                self._dropped.add(call_id)
            self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    def resume(self, call_id: int) -> None:
        """Let a held call start, as one whose result nobody waits for."""
        with self._changed:
            self._held.discard(call_id)
            self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    def cancel(self, call_id: int) -> CurrentCall | None:
        """Tell a call that its caller has gone, now or when it starts; return it if it runs."""
        with self._changed:
            call = self._running.get(call_id)
            if call is not None:
                call.cancel()
            elif call_id > self._last:
                self._cancelled.add(call_id)
            return call
