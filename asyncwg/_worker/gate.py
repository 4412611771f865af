"""Whether a call may start: what the control lane and a lane that runs calls agree on.

The controller can drop a call only on all ranks or on none, so it asks each rank first: a call that
is *held* does not start until the controller says which it is. Calls reach a lane in the order of
their numbers, so the number of the last one that started tells which have not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from asyncwg._worker.context import CurrentCall

_REMEMBERED: Final = 256
"""Generators that have ended and whose number of items is remembered: more than can be unanswered."""


class Gate:
    """The gate of one lane. ``enter`` and ``leave`` belong to the lane, the rest to the control lane."""

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._wake = wake
        self._last = 0
        self._held: set[int] = set()
        self._dropped: set[int] = set()
        self._cancelled: dict[int, int] = {}
        """Calls that have not started, and whose caller has gone all the same: another rank has. With the
        number of items at which a generator ends."""
        self._running: dict[int, CurrentCall] = {}
        self._items: dict[int, int] = {}
        """How many items generators had begun that have ended: the controller may not know it yet."""

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
            call.cancel(self._cancelled.pop(call.id))
        self._running[call.id] = call
        return True

    def leave(self, call: CurrentCall) -> None:
        """Take note that ``call`` has ended."""
        if call.credits is not None:
            self._items[call.id] = call.credits.freeze()
            if len(self._items) > _REMEMBERED:
                del self._items[next(iter(self._items))]
        # Of the methods of a dict, each is one step: the control lane sees the call or does not.
        self._running.pop(call.id, None)

    def hold(self, call_id: int) -> int | None:
        """Keep a call from starting.

        Returns:
            None; if it has started, or ended, already, how many items it has begun as a generator.
        """
        with self._changed:
            if call_id > self._last:
                self._held.add(call_id)
                return None
            call = self._running.get(call_id)
            if call is None or call.credits is None:
                return self._items.get(call_id, 0)
            return call.credits.freeze()

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

    def pull(self, call_id: int) -> None:
        """A reader wants one more item of a generator."""
        call = self._running.get(call_id)
        if call is not None and call.credits is not None:
            call.credits.add()

    def cancel_all(self) -> None:
        """Tell every call that runs that its caller has gone: the worker is about to end."""
        with self._changed:
            for call in list(self._running.values()):
                call.cancel()

    def cancel(self, call_id: int, items: int = 0) -> CurrentCall | None:
        """Tell a call that its caller has gone, now or when it starts; return it if it runs.

        A ``def`` generator ends at its item number ``items``.
        """
        with self._changed:
            call = self._running.get(call_id)
            if call is not None:
                call.cancel(items)
            elif call_id > self._last:
                self._cancelled[call_id] = items
            return call
