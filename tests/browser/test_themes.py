"""The admin's pages in the themes that many projects use, which have to be in ``INSTALLED_APPS`` from the start."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import needs

PROGRAM = """
import sys
from tests import settings

theme = sys.argv[1]
settings.INSTALLED_APPS = [theme, *settings.INSTALLED_APPS]
settings.ALLOWED_HOSTS = ["testserver"]
import django

django.setup()
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client

from django_redlock import lock
from django_redlock.admin import HeldLockAdminMixin
from django_redlock.inventory import find_lock
from django_redlock.models import HeldLock, key_of

call_command("migrate", verbosity=0)
if theme == "unfold":
    from unfold.admin import ModelAdmin

    admin.site.unregister(HeldLock)
    admin.site.register(HeldLock, type("Locks", (HeldLockAdminMixin, ModelAdmin), {}))
client = Client()
client.force_login(get_user_model().objects.create_superuser("admin", "", "password"))
lease = lock("orders:7", renew=False).acquire()
held = find_lock("orders:7")
base, key = "/admin/redlock/heldlock/", key_of(held.fingerprint, "default", held.slug)
release = {"action": "release", "_selected_action": key}
for answer in (
    client.get(base),
    client.get(base, {"node": "a"}),
    client.get(f"{base}live/"),
    client.get(f"{base}lock/", {"key": key}),
    client.post(base, {**release, "index": "0"}),
    client.post(base, {**release, "confirmed": "yes"}, follow=True),
):
    assert answer.status_code == 200, answer
    assert "orders:7" in answer.content.decode(), answer
assert client.get(f"{base}nodes/").status_code == 200
assert find_lock("orders:7") is None
assert lease.extend() is False
"""


@pytest.mark.parametrize("theme", ["unfold", "jazzmin"])
def test_the_pages_render_in_a_theme(theme):
    """Every page answers, and a lock is released, with the admin's templates replaced by a theme's."""
    needs(f"django-{theme}", find_spec(theme), f"pip install django-{theme}")
    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"}

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, theme], capture_output=True, text=True, timeout=120, env=environment
    )

    assert done.returncode == 0, done.stderr
