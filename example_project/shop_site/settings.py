"""
Settings of the example shop.

``manage.py demo`` starts everything that is needed and passes the addresses in the environment. To start the shop
yourself, run a Redis or Valkey on its usual port, or name your own servers:

    REDLOCK_NODES=redis://lock-1:6379,redis://lock-2:6379,redis://lock-3:6379 \\
    CELERY_BROKER_URL=redis://localhost:6379/1 python manage.py runserver
"""

import re
from os import environ
from pathlib import Path

BASE_DIR = Path(__file__).resolve().parent.parent

# Locks. A list of URLs, or one string with commas between them, is enough; the names are for the admin and the logs.
# The members of a cluster have commas between them, too, but only the first has a scheme.
LOCK_URLS = re.split(r",(?=[a-z+]+://)", environ.get("REDLOCK_NODES", "redis://localhost:6379/0"))
REDLOCK = {
    "default": {
        "NODES": [{"URL": url, "NAME": f"lock-{number}"} for number, url in enumerate(LOCK_URLS, 1)],
        "KEY_PREFIX": "shop",
        # A lease is renewed while it is held: ttl is how long others wait when a holder dies, not how long work may
        # take. A node that restarted votes again after max_ttl. Both are short here because the demo kills nodes and
        # people watch it; leave OPTIONS out for 30 and 60 seconds. etcd and ZooKeeper wait for disks, and need a longer
        # node_timeout than Redis.
        "OPTIONS": {"ttl": 6, "max_ttl": 6, "node_timeout": float(environ.get("REDLOCK_NODE_TIMEOUT", "0.25"))},
    },
}

# Celery
CELERY_BROKER_URL = environ.get("CELERY_BROKER_URL", "redis://localhost:6379/1")
CELERY_RESULT_BACKEND = environ.get("CELERY_RESULT_BACKEND", CELERY_BROKER_URL)
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True

# The supplier's server is slow, and beat is impatient: it submits the next import long before the last one has ended.
SHOP_IMPORT_SECONDS = float(environ.get("SHOP_IMPORT_SECONDS", "30"))
SHOP_IMPORT_EVERY = float(environ.get("SHOP_IMPORT_EVERY", "8"))
SHOP_PAYMENT_SECONDS = float(environ.get("SHOP_PAYMENT_SECONDS", "1.5"))
CELERY_BEAT_SCHEDULE = {
    "import-catalogue": {"task": "shop.tasks.import_catalogue", "schedule": SHOP_IMPORT_EVERY},
}

# Web and worker write at the same time, so a writer waits for its turn instead of failing. SQLite offers that to
# transactions that announce at the start that they will write.
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": environ.get("SHOP_DATABASE", BASE_DIR / "shop.sqlite3"),
        "OPTIONS": {
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
        },
    },
}

# The rest is what startproject writes.
SECRET_KEY = environ.get("SHOP_SECRET_KEY", "not a secret: this is an example")
DEBUG = environ.get("SHOP_DEBUG", "1") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_redlock",
    "shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGIN_REDIRECT_URL = LOGOUT_REDIRECT_URL = "front"
LOGIN_URL = "login"
ROOT_URLCONF = "shop_site.urls"
STATIC_URL = "static/"
TIME_ZONE = "UTC"
USE_TZ = True
WSGI_APPLICATION = "shop_site.wsgi.application"
