"""Settings of the processes of an instrument, whose nodes and options are in their environment."""

import json
import os

from tests.settings import *  # noqa: F403

REDLOCK = {
    "default": {
        "NODES": os.environ.get("LAB_NODES", "memory://a,memory://b,memory://c"),
        "OPTIONS": json.loads(os.environ.get("LAB_OPTIONS", "{}")),
    }
}
