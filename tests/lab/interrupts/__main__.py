"""Interrupt every use of a lock at every event: ``python -m tests.lab.interrupts``."""

import argparse
import os

import django


def main() -> None:
    """Run the sweep and the storm."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.interrupts", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="interrupt at each event with a multiple of this number")
    parser.add_argument("--hits", type=int, default=2000, help="how many signals interrupt at random (default: 2000)")
    parser.add_argument("--nodes", nargs="+", default=["memory://a", "memory://b", "memory://c"], metavar="URL")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from django.conf import settings

    from .storm import storm
    from .sweep import ASYNC, BLOCKING, OPTIONS, SLOW, sweep, witness

    settings.REDLOCK = {"default": {"NODES": options.nodes, "OPTIONS": OPTIONS}}
    with witness() as kept:
        for action in [*BLOCKING, *ASYNC]:
            found = sweep(action, every=options.every)
            print(
                f"{action.__name__}: {found.points} interruptions, {len(found.beyond(SLOW))} left the lock to its end"
            )
        print(f"signals at random: {dict(storm(options.hits))}")
    print(f"the lock of a witness was extended {kept.extensions} times")


if __name__ == "__main__":
    main()
