"""How long tests wait for what comes: as long as only something that hangs has not."""

from __future__ import annotations

from typing import Final

PATIENCE: Final = 50.0
"""Seconds in which whatever does not hang has come, however busy the machine is. pytest's own report of a
test that hangs comes later, and says less."""

SETTLE: Final = 20.0
"""The same, for what a test leaves that is about to go."""

GRACE: Final = 30.0
"""The same, for ranks that have to answer after the first that failed. Where a test is about ranks that
do not, its group has an ``error_grace`` of its own."""
