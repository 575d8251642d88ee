"""Instruments: they measure or take long; see README.md."""
