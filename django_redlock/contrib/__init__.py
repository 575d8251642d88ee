"""Integrations with other projects; the extras of this package install what they need."""
