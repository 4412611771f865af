"""The parts of `asyncwg.protocol`: plain functions on a TensorDict and on a dict of arrays."""
