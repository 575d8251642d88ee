"""Integrations with other projects; each needs an extra of the same name."""
