"""Calling a group from programs that did not start it; see "Attached groups" in docs/architecture.md."""
