"""What a call costs: the floor of the machine, asyncwg, and what others made, side by side."""
