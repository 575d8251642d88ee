"""A table of one of the databases of Django as a node (internal)."""
