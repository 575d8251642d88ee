"""The simulation of singleton tasks: see :mod:`tests.machine.runner`."""

import os
import sys

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from tests.machine.runner import Simulation  # noqa: E402

from .mutants import MUTANTS, hunt  # noqa: E402
from .profiles import PROFILES  # noqa: E402
from .schedule import run  # noqa: E402

HUNTS = {"mutants": ("run the wrong protocols and print the score", lambda: [hunt(mutant) for mutant in MUTANTS])}

if __name__ == "__main__":
    sys.exit(Simulation("tests.slots", 20_000, PROFILES, run, HUNTS).main())
