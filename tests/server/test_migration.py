"""The last step of leaving celery-once, as docs/howto/migrate-celery.md shows it."""

from django.test import override_settings

from django_redlock import lock
from django_redlock.testing import Server
from tests.typed import blocks


def test_old_keys_are_deleted_and_nothing_else():
    """The code of the page deletes the keys that celery-once leaves (of its version 3.0.1), and no others."""
    (code,) = (text for _, text in blocks("docs/howto/migrate-celery.md", "Change over with tasks in flight"))

    with Server() as server, server.client() as client, override_settings(REDLOCK={"default": {"NODES": server.url}}):
        with lock("qo_shop", wait=0):
            others = {"celery", "quo_vadis", *client.keys()}
            for key in ("qo_shop.tasks.sync_shop_id-7", "qo_shop.tasks.sync", "celery", "quo_vadis"):
                client.set(key, "x")
            exec(code.replace("redis://localhost:6379/0", server.url), {})

            assert set(client.keys()) == others
            assert len(others) > 2
