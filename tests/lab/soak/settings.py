"""Settings of the processes of the soak."""

import os

from tests.settings import *  # noqa: F403

REDLOCK = {
    "default": {
        "NODES": os.environ.get("SOAK_NODES", "memory://a,memory://b,memory://c"),
        "OPTIONS": {"ttl": 5.0, "max_ttl": 6.0, "node_timeout": 0.5},
    }
}
