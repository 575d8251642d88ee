"""Code that users write, for mypy --strict: nothing here is run."""
