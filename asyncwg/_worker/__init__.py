"""Everything that runs in the child, and nothing else. Imports nothing of the controller's side."""
