"""The settings of the processes that these tests start: the database, the server and the nodes are those of a test."""

import os

SECRET_KEY = "for tests only"
USE_TZ = True
INSTALLED_APPS = ["django_tasks_db", "django_rq", "django_redlock"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["TEST_DATABASE"],
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
if os.environ.get("TEST_REPLICA"):
    DATABASES["replica"] = DATABASES["default"] | {"NAME": os.environ["TEST_REPLICA"]}
    DATABASE_ROUTERS = ["tests.server.tasks.task_settings.ReadsFromReplica"]
BACKENDS = {"db": "django_tasks_db.DatabaseBackend", "rq": "django_tasks_rq.RQBackend"}
TASKS = {"default": {"BACKEND": BACKENDS[os.environ["TEST_BACKEND"]]}}
RQ_QUEUES = {"default": {"URL": os.environ["TEST_SERVER"]}}
OPTIONS = {"restart_guard": False, "node_timeout": 1.0}
if os.environ.get("TEST_GUARD"):
    OPTIONS |= {"restart_guard": True, "ttl": 5.0, "max_ttl": 6.0}
REDLOCK = {"default": {"NODES": os.environ["TEST_NODES"].split(","), "OPTIONS": OPTIONS}}


class ReadsFromReplica:
    """Sends reads to a copy of the database."""

    def db_for_read(self, model: object, **hints: object) -> str:
        return "replica"

    def db_for_write(self, model: object, **hints: object) -> str:
        return "default"
