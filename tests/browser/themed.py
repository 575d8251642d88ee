"""
The admin's pages in a theme, which has to be in ``INSTALLED_APPS`` from the start: run as ``python -m``, with its name.

Prints what each page answered, as JSON.
"""

import json
import os
import sys

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"


def main(theme: str) -> None:
    """Open every page and release a lock."""
    from tests import settings

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
    assert held is not None
    base, key = "/admin/redlock/heldlock/", key_of(held.fingerprint, "default", held.slug)
    release = {"action": "release", "_selected_action": key}
    answers = {
        "list": client.get(base),
        "filtered": client.get(base, {"node": "a"}),
        "live": client.get(f"{base}live/"),
        "lock": client.get(f"{base}lock/", {"key": key}),
        "nodes": client.get(f"{base}nodes/"),
        "confirmation": client.post(base, {**release, "index": "0"}),
        "released": client.post(base, {**release, "confirmed": "yes"}, follow=True),
    }
    shown = {page: [answer.status_code, "orders:7" in answer.content.decode()] for page, answer in answers.items()}
    print(json.dumps({"pages": shown, "free": find_lock("orders:7") is None, "renewed": lease.extend()}))


if __name__ == "__main__":
    main(sys.argv[1])
