"""The project of the tests for processes of their own: its nodes and its database come from the environment."""

import json
import os

from tests import drivers
from tests.settings import *  # noqa: F403

ROOT_URLCONF = "tests.server.live.views"
ALLOWED_HOSTS = ["127.0.0.1"]
INSTALLED_APPS = ["django_redlock", "tests.shop"]
MIDDLEWARE = ["tests.server.live.views.one_at_a_time", "tests.server.live.views.notices_cancellation"]

IN_MEMORY = '{"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}'
DATABASES = {"default": {**json.loads(os.environ.get("LIVE_DATABASE", IN_MEMORY)), "ATOMIC_REQUESTS": True}}
if DATABASES["default"]["ENGINE"].endswith("mysql"):
    drivers.install_mysql()

TTL = float(os.environ.get("LIVE_TTL", "60"))  # seconds, short only where a lease must end
PATIENT = {"node_timeout": 0.24 * TTL} if "LIVE_DEFAULTS" not in os.environ else {}
REDLOCK = {
    "default": {
        "NODES": os.environ.get("LIVE_NODES", "memory://a,memory://b,memory://c"),
        "KEY_PREFIX": "live",
        "OPTIONS": {"ttl": TTL, "restart_guard": False, **PATIENT},
    }
}
