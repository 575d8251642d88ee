"""Benchmarks: one run measures the rows of ``tables.md``, beside comparable libraries and raw sockets."""
