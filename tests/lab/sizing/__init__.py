"""
What locks cost the servers, measured: memory per name, requests per lock, connections per process.

``python -m tests.lab.sizing`` starts a server of its own, the one that the tests use, and prints the three tables of
``docs/operate/topologies.md``.
"""
