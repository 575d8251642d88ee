"""Interrupt every use of a lock at every event: ``python -m tests.lab.interrupts``."""

import os

import django


def main() -> None:
    """Run the sweep and the storm."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    from django.conf import settings

    from .storm import storm
    from .sweep import ASYNC, BLOCKING, OPTIONS, SLOW, sweep, witness

    settings.REDLOCK = {"default": {"NODES": ["memory://a", "memory://b", "memory://c"], "OPTIONS": OPTIONS}}
    with witness() as kept:
        for action in [*BLOCKING, *ASYNC]:
            found = sweep(action)
            print(
                f"{action.__name__}: {found.points} interruptions, {len(found.beyond(SLOW))} left the lock to its end"
            )
        print(f"signals at random: {dict(storm(2000))}")
    print(f"the lock of a witness was extended {kept.extensions} times")


if __name__ == "__main__":
    main()
