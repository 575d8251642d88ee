"""Settings of the soak and of the processes that it starts; the nodes are in their environment."""

import os

from tests.settings import *  # noqa: F403

REDLOCK = {
    "default": {
        "NODES": os.environ.get("SOAK_NODES", "memory://a,memory://b,memory://c"),
        "OPTIONS": {"ttl": 5.0, "max_ttl": 6.0, "node_timeout": 0.5},
    }
}
