"""Singleton tasks: what the edges for Celery and for Django's own tasks share (internal)."""
