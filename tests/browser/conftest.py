"""A real browser before a real server; left out, with a reason, where there is none."""

import threading
from collections.abc import Iterator

import django
import pytest
from django.test import Client, override_settings
from pytest_django.live_server_helper import LiveServer

from django_redlock import inventory, locks
from django_redlock.testing import Servers
from tests.chromium import MISSING, start_chromium

try:
    from playwright.sync_api import expect as expect
except ImportError:
    expect = None  # the fixture ``browser`` says what to install

TIMEOUT = 60_000.0  # milliseconds for what happens at once unless the machine is busy


@pytest.fixture(scope="package")
def browser():
    """
    Chromium; see :mod:`tests.chromium`.

    Playwright's blocking interface runs an event loop in this thread, in which Django would refuse to touch the
    database, and other tests could run no loop of theirs: so it lives no longer than the tests of this folder.
    """
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    with pytest.MonkeyPatch.context() as patch, api.sync_playwright() as playwright:
        chromium = start_chromium(playwright) or pytest.skip(MISSING)
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        api.expect.set_options(timeout=TIMEOUT)
        yield chromium
        chromium.close()


@pytest.fixture(scope="package")
def live_site(django_db_setup, django_db_blocker, servers: Servers) -> Iterator[str]:
    """The admin over five real servers; where Django can, with a policy that runs nothing without a nonce."""
    options = {"restart_guard": False, "node_timeout": 7.0, "max_ttl": 900.0}
    redlock = {"default": {"NODES": named(servers), "OPTIONS": options}}
    with override_settings(ALLOWED_HOSTS=["localhost"], REDLOCK=redlock, **strict_policy()):
        with django_db_blocker.unblock():
            server = LiveServer("localhost")
        yield server.url
        with django_db_blocker.unblock():
            server.stop()


@pytest.fixture
def site(transactional_db, nodes: Servers, live_site: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same, with servers that run and hold nothing; its pages wait for late nodes, and its threads end in time."""
    for listing in (inventory.held_locks, inventory.held_in_each):
        monkeypatch.setitem(listing.__kwdefaults__, "seconds", 7.0)
    locks.reset()
    yield live_site
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(5)


def named(nodes: Servers) -> list[dict[str, str]]:
    """Return the nodes as in settings, with names that one can say."""
    return [{"URL": url, "NAME": f"lock-{place}"} for place, url in enumerate(nodes.urls, 1)]


def strict_policy() -> dict[str, object]:
    """Return the settings of a nonce-only Content Security Policy, which the admin supports since Django 6.1."""
    if django.VERSION < (6, 1):
        return {}
    from django.conf import settings

    sentinel = ["<CSP_NONCE_SENTINEL>"]
    policy = {"default-src": ["'self'"], "script-src": sentinel, "style-src": sentinel, "img-src": ["'self'", "data:"]}
    [templates] = settings.TEMPLATES
    processors = [*templates["OPTIONS"]["context_processors"], "django.template.context_processors.csp"]
    return {
        "SECURE_CSP": policy,
        "MIDDLEWARE": [*settings.MIDDLEWARE, "django.middleware.csp.ContentSecurityPolicyMiddleware"],
        "TEMPLATES": [{**templates, "OPTIONS": {**templates["OPTIONS"], "context_processors": processors}}],
    }


def noteworthy(message) -> bool:
    """Return whether a message of the console is an error of the page; browsers ask for an icon by themselves."""
    return message.type == "error" and not message.location["url"].endswith("/favicon.ico")


@pytest.fixture
def open_page(browser, site, admin_user):
    """Return a function that opens a page as the administrator; at the end the console must be empty."""
    contexts, errors = [], []

    def open_with(**options):
        context = browser.new_context(base_url=site, **options)
        contexts.append(context)
        context.set_default_timeout(TIMEOUT)
        if options.get("java_script_enabled", True):
            context.clock.install()  # so that a test can have time pass there
        client = Client()
        client.force_login(admin_user)
        context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": site}])
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if noteworthy(message) else None)
        page.goto("/admin/redlock/heldlock/")
        return page

    yield open_with
    for context in contexts:
        context.close()
    assert errors == []
