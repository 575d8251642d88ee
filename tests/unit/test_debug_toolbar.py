"""
The panel of django-debug-toolbar: the locks that a request tried to take.
"""

import pytest
from asgiref.sync import sync_to_async
from django.core.checks.registry import registry
from django.test import Client

pytest.importorskip("debug_toolbar", reason="needs django-debug-toolbar: pip install django-debug-toolbar")

from django_redlock import lock, lock_for_update, locks
from django_redlock.celery.slots import Ticket
from tests.shop.helpers import during
from tests.shop.models import Order


@pytest.fixture(autouse=True)
def toolbar(shop, settings):
    """The shop under the toolbar, over nodes without locks."""
    checks = set(registry.registered_checks)
    settings.DEBUG = True
    settings.INTERNAL_IPS = ["127.0.0.1"]
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "debug_toolbar"]
    settings.MIDDLEWARE = ["debug_toolbar.middleware.DebugToolbarMiddleware"]
    settings.ROOT_URLCONF = "tests.shop.toolbar_urls"
    yield
    registry.registered_checks &= checks  # those of the toolbar, which is not installed in other tests


def shown(response):
    """Return the panel of a request, as shown to a user who opens it."""
    query = {"request_id": response.headers["djdt-request-id"], "panel_id": "LocksPanel"}
    return " ".join(Client().get("/__debug__/render_panel/", query).json()["content"].split())


@pytest.mark.django_db
def test_locks_of_a_request_are_shown(client):
    """The view's own lock, a row's lock and one that was taken are listed with their outcomes."""
    order = Order.objects.create(pk=9)

    def work():
        with lock_for_update(order):
            pass
        with lock("busy", label="the other <b>"):
            try:
                lock("busy", wait=0).acquire()
            except Exception:
                return

    during(work)
    content = shown(client.post("/touch/7/"))

    names = ["view:order:7", "model:shop.order:9", "busy", "busy"]
    assert content.count("<tr>") == 1 + len(names)
    for name in names:
        assert f"<code>{name}</code>" in content
    assert content.count("<td>released</td>") == 3
    assert "<td>taken (manual the other &lt;b&gt;)</td>" in content


def test_request_without_locks_has_an_empty_panel(client):
    with lock("elsewhere"):
        content = shown(client.get("/touch/7/"))

    assert content == "<p>No lock was tried in this request.</p>"


def test_lost_lock_and_missing_quorum_have_different_texts(client):
    def work():
        lease = lock("gone").acquire()
        locks["default"].release(lease.names, lease.secret)
        with lock("gone", wait=0):
            lease.extend()
        for node in locks["default"].nodes[:2]:
            node.down = True
        try:
            lock("unknown", wait=0).acquire()
        except Exception:
            return

    during(work)
    content = shown(client.post("/touch/7/"))

    assert "<td>lost (superseded)</td>" in content
    assert "<td>too few nodes answered</td>" in content


def test_slot_of_a_singleton_has_its_state(client):
    """The holder of a lock that waits in a queue is not shown as one that runs."""

    def work():
        Ticket("task:sync", "default", "id", "a" * 32).claim(60.0, "shop.sync")
        try:
            lock("task:sync", wait=0).acquire()
        except Exception:
            return

    during(work)

    assert "<td>taken (task shop.sync (claimed))</td>" in shown(client.post("/touch/7/"))


@pytest.mark.parametrize("path", ["/apay/7/", "/touch/7/"])
async def test_locks_of_asynchronous_requests_are_shown(async_client, path):
    """Under ASGI the locks of asynchronous views, and of blocking ones in their threads, belong to their request."""
    during(lambda: lock("inside", wait=0).acquire().release())

    content = await sync_to_async(shown)(await async_client.post(path))

    assert "<code>view:order:7</code>" in content
    assert "<code>inside</code>" in content
