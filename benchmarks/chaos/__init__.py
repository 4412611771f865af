"""Random programs against real groups, and a plain model of what must come back.

    python -m benchmarks.chaos --seed 7 --operations 10000

- `program`: a seed becomes a list of operations. Nothing else has a say in it.
- `values`: what is sent, made from a few numbers, so that what comes back can be told.
- `worker`: the methods.
- `model`: which outcomes each call may have, and in which order the ranks may have run them. Pure.
- `player`: plays a program and keeps the model's books.
"""
