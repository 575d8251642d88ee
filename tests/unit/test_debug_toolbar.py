"""The panel of django-debug-toolbar: the locks that a request tried to take."""

import re
from contextlib import suppress

import pytest
from asgiref.sync import sync_to_async
from django.core.checks.registry import registry
from django.test import Client

pytest.importorskip("debug_toolbar", reason="needs django-debug-toolbar: pip install django-debug-toolbar")

from django_redlock import LockTakenError, QuorumUnavailableError, lock, lock_for_update, locks
from django_redlock.singleton.driver import Nodes
from django_redlock.singleton.questions import Claim
from django_redlock.singleton.ticket import Ticket
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
    """Each is listed with its outcome in words; a holder that waits in a queue is not shown as one that runs."""
    order = Order.objects.create(pk=9)

    def work():
        with lock_for_update(order):
            pass
        lease = lock("gone").acquire()
        locks["default"].release(lease.names, lease.secret)
        with lock("gone", wait=0), lock("busy", label="the other <b>"):
            lease.extend()
            Nodes("default", "shop.sync").claim(Claim(Ticket("task:sync", "default", "id", "a" * 32), 60.0))
            for name in ("busy", "task:sync"):
                with suppress(LockTakenError):
                    lock(name, wait=0).acquire()
        for node in locks["default"].nodes[:2]:
            node.down = True
        with suppress(QuorumUnavailableError):
            lock("unknown", wait=0).acquire()
        for node in locks["default"].nodes[:2]:
            node.down = False

    during(work)
    content = shown(client.post("/touch/7/"))

    names = {"view:order:7", "model:shop.order:9", "gone", "busy", "task:sync", "unknown"}
    assert set(re.findall("<code>(.*?)</code>", content)) == names
    assert content.count("<td>released</td>") == 4
    for outcome in ("lost (superseded)", "taken (manual the other &lt;b&gt;)", "taken (task shop.sync (claimed))"):
        assert f"<td>{outcome}</td>" in content
    assert "<td>too few nodes answered</td>" in content


@pytest.mark.parametrize("path", ["/apay/7/", "/touch/7/"])
async def test_locks_of_asynchronous_requests_are_shown(async_client, path):
    """Under ASGI the locks of asynchronous views, and of blocking ones in their threads, belong to their request."""
    during(lambda: lock("inside", wait=0).acquire().release())

    content = await sync_to_async(shown)(await async_client.post(path))

    assert "<code>view:order:7</code>" in content
    assert "<code>inside</code>" in content
