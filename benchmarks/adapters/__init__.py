"""One module a peer; each has an ``Adapter`` with the names of `benchmarks.adapter.Adapter`."""
