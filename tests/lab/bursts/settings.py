"""Settings of the processes of the bursts."""

import os

from tests.settings import *  # noqa: F403

REDLOCK = {
    "default": {
        "NODES": os.environ.get("BURSTS_NODES", "memory://a,memory://b,memory://c"),
        # On a busy machine nodes may answer late, and without their answer a call is sent without a slot.
        "OPTIONS": {"restart_guard": False, "node_timeout": 5.0, "max_ttl": 600},
    }
}
