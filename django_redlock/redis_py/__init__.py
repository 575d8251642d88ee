"""The parts of :mod:`django_redlock.compat`, redis-py's lock over these nodes (internal)."""
