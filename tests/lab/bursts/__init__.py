"""Bursts of simultaneous calls of one key while a run of it is under way: ``python -m tests.lab.bursts``."""
