"""The project of the tests for processes of their own: its nodes and its database come from the environment."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES, TEMPLATES  # noqa: F401

ROOT_URLCONF = "tests.shop.urls"
ALLOWED_HOSTS = ["127.0.0.1"]

REDLOCK = {
    "default": {
        "NODES": os.environ.get("LIVE_NODES", "memory://a,memory://b,memory://c"),
        "KEY_PREFIX": "live",
        "OPTIONS": {"ttl": float(os.environ.get("LIVE_TTL", "10")), "node_timeout": 1.0, "restart_guard": False},
    }
}
