"""The same scenarios for this package and its peers, with real workers: ``tox run -e compare``."""
