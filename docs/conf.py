"""Sphinx settings; build with `tox run -e docs`."""

from importlib.metadata import version as version_of

project = "django_redlock"
author = "django_redlock contributors"
copyright = author
release = version = version_of("django-redlock")

extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"django_redlock {release}"
