"""Journeys: what a user types to adopt the package, in a project made by ``django-admin startproject``."""
