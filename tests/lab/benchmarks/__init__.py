"""
Benchmarks: one interleaved run measures every row of the tables beside comparable libraries.

``tox run -e bench`` runs all of it, ``tox run -e bench -- --quick`` a part of it in less than five minutes. Nothing
here is a test: times depend on the machine, and only ratios within one run are meaningful.
"""
