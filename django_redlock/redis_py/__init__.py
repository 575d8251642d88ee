"""What :mod:`django_redlock.compat`, redis-py's lock over these nodes, is made of (internal)."""
