"""Settings for this package's part in the comparison; the lock nodes are those of the script."""

import os

from tests.settings import *  # noqa: F403

REDLOCK = {
    "default": {
        "NODES": os.environ.get("COMPARE_NODES", "memory://a,memory://b,memory://c"),
        "OPTIONS": {"restart_guard": False, "node_timeout": 1.0},
    }
}
