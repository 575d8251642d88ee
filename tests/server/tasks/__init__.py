"""Django's own tasks with real workers; needs Django 6.0."""
