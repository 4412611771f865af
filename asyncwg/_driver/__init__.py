"""The controller's side of its processes: start, watch, end, explain; one rank, all ranks."""
