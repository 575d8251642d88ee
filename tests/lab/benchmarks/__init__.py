"""
Benchmarks: one run measures the rows of ``tables.md``, beside comparable libraries and raw sockets.

Nothing here is a test: times depend on the machine, and only ratios within one run are meaningful.
"""
