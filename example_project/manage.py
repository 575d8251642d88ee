#!/usr/bin/env python
"""Django's command line for the example shop; try ``manage.py demo``."""

import os
import sys
from pathlib import Path


def main() -> None:
    # Python does this by itself, unless PYTHONSAFEPATH prevents it.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop_site.settings")

    from django.core.management import execute_from_command_line

    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
