"""A table in one of Django's databases as a node (internal)."""
