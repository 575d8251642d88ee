"""
How fast the locks are: every row of the table of targets, beside the libraries of the field, in one interleaved run.

``tox run -e bench`` runs all of it, ``tox run -e bench -- --quick`` a part of it in less than five minutes. Nothing
here is a test: a time depends on the machine, and only ratios of one run mean something.
"""
