"""The smallest Django project with an admin in which the locks can run."""

import os
import tempfile
from pathlib import Path

SECRET_KEY = "for tests only"
USE_TZ = True
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_redlock",
    "tests.history_app.Quiet",
    "tests.shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
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

DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
    # In a file, so that a second connection sees only committed data.
    "warehouse": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": ":memory:",
        "TEST": {"NAME": Path(tempfile.gettempdir()) / f"django_redlock_{os.getpid()}.sqlite3"},
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# A call that waits for the processor must not miss the replies of nodes in its own memory.
REDLOCK = {"default": {"NODES": ["memory://a", "memory://b", "memory://c"], "OPTIONS": {"node_timeout": 2.0}}}

# Set before the toolbar is imported: afterwards a change needs its models, which are not installed in other tests.
DEBUG_TOOLBAR_PANELS = [
    "debug_toolbar.panels.history.HistoryPanel",
    "django_redlock.contrib.debug_toolbar.LocksPanel",
]

# Since Django 6.0. The second one keeps what is enqueued.
TASKS = {
    "default": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend"},
    "kept": {"BACKEND": "django.tasks.backends.dummy.DummyBackend", "QUEUES": []},
    "other": {"BACKEND": "django.tasks.backends.dummy.DummyBackend", "QUEUES": []},
}
