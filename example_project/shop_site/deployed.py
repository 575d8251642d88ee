"""
Settings of the example shop in containers: ``example_project/deploy`` has a compose file and Kubernetes manifests.

Each server has an address and a password of its own, and nothing has a default that a deployment could forget.
"""

from os import environ

from .settings import *  # noqa: F403, the usual way to build on other settings
from .settings import BASE_DIR
from .settings import MIDDLEWARE as PLAIN_MIDDLEWARE

DEBUG = False
SECRET_KEY = environ["SHOP_SECRET_KEY"]
ALLOWED_HOSTS = environ["SHOP_HOSTS"].split(",")

# Locks. The leases are those of the package: 30 seconds, and a node that restarted votes again after 60.
LOCKS_USER = {"username": "locks", "password": environ["LOCKS_PASSWORD"]}
REDLOCK = {
    "default": {
        "NODES": [
            {"URL": url, "NAME": f"lock-{number}", "OPTIONS": LOCKS_USER}
            for number, url in enumerate(environ["REDLOCK_NODES"].split(","), 1)
        ],
        "KEY_PREFIX": "shop",
        "OPTIONS": {"wait": 10},
    },
}

CELERY_BROKER_URL = environ["CELERY_BROKER_URL"]
CELERY_RESULT_BACKEND = CELERY_BROKER_URL

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": environ["DATABASE_HOST"],
        "NAME": "shop",
        "USER": "shop",
        "PASSWORD": environ["DATABASE_PASSWORD"],
    },
}

# gunicorn serves no files, so WhiteNoise does.
MIDDLEWARE = [PLAIN_MIDDLEWARE[0], "whitenoise.middleware.WhiteNoiseMiddleware", *PLAIN_MIDDLEWARE[1:]]
STATIC_ROOT = BASE_DIR / "static"
