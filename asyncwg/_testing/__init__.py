"""What `asyncwg.testing` is made of."""
