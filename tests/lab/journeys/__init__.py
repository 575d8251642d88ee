"""Journeys: the steps of a user who adopts the package in a project made by ``django-admin startproject``."""
