"""GRPO on questions of reasoning-gym: synchronous, one step off, and fully asynchronous."""
