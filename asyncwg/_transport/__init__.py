"""Moving frames between two ends: one contract, over sockets and within a process."""
