"""A soak: singleton tasks under load while processes and a node are killed; see __main__.py."""
