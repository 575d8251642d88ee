"""A migrated database of its own for the processes of a test, and the processes."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections

from django_redlock.models import Fence
from django_redlock.testing import Servers
from django_redlock.testing.servers import spawn
from tests.services import django_database
from tests.shop.models import Order

CHECKOUT = Path(__file__).parents[3]
PATIENCE = 60.0  # seconds


class Live(list["Popen[bytes]"]):
    """Processes of the project in this folder, over the same three servers."""

    def __init__(self, nodes: Servers) -> None:
        super().__init__()
        self.env = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.server.live.settings",
            "LIVE_NODES": ",".join(nodes.urls[:3]),
        }

    def python(self, *args: str, **options: Any) -> "Popen[bytes]":
        pipes = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, **options}
        self.append(spawn([sys.executable, *args], cwd=CHECKOUT, env=self.env, **pipes))
        return self[-1]

    def manage(self, *args: str, **options: Any) -> "Popen[bytes]":
        return self.python("-m", "django", *args, **options)

    def run(self, name: str, code: str, *args: str, options: tuple[str, ...] = ()) -> "Popen[bytes]":
        return self.manage("redlock_run", name, *options, "--", sys.executable, "-c", code, *args)

    def use(self, entry: dict[str, Any]) -> None:
        self.env["LIVE_DATABASE"] = json.dumps({key: value for key, value in entry.items() if value is not None})


@pytest.fixture
def live(nodes: Servers) -> Iterator[Live]:
    started = Live(nodes)
    yield started
    for process in started:
        process.kill()
        process.communicate()


def prepare(alias: str) -> None:
    """Create the tables of the package and of the shop."""
    call_command("migrate", "redlock", database=alias, verbosity=0)
    with connections[alias].schema_editor() as editor:
        for model in apps.get_app_config("shop").get_models():
            if not model._meta.proxy:
                editor.create_model(model)


@pytest.fixture
def database(engine: Any, live: Live, prepared: Any, django_db_blocker: Any) -> Iterator[str]:
    """The alias, in this process, of the processes' database; of each kind in turn, and without rows."""
    with django_db_blocker.unblock():
        entry = engine.settings(prepared.database(engine, prepare))
        live.use(entry)
        with django_database("live", entry):
            Order.objects.using("live").all().delete()
            Fence.objects.using("live").all().delete()
            yield "live"


def said(process: "Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def outcome(process: "Popen[bytes]", patience: float = PATIENCE) -> tuple[str, str, int]:
    out, err = process.communicate(timeout=patience)
    return out.decode().strip(), err.decode().strip(), process.returncode
