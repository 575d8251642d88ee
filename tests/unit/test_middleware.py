"""``locked_paths``: one request at a time on some paths; ``LockErrorMiddleware``: responses for uncaught errors."""

import re

import pytest
from asgiref.sync import sync_to_async
from django.conf.urls.i18n import i18n_patterns
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import include, path, re_path, reverse_lazy

from django_redlock import lock, locks
from django_redlock.middleware import locked_paths
from tests.shop.helpers import during, is_free, lose

NAME = "request:ip:127.0.0.1"


@pytest.fixture(autouse=True)
def under_middleware(shop, settings):
    """The shop under its middleware, over nodes without locks."""
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "tests.shop.middleware.one_per_user",
        "tests.shop.middleware.one_per_order",
        "django_redlock.middleware.LockErrorMiddleware",
    ]


def test_one_request_at_a_time_on_all_paths_together(client):
    """While one request runs, another of the same client to any of the paths gets 409; elsewhere it goes through."""
    answers = []

    def ask_meanwhile():
        during(lambda: None)
        answers.extend(Client().post(path).status_code for path in ("/touch/8/", "/stream/1/", "/touch-class/"))
        answers.append(Client(REMOTE_ADDR="127.0.0.2").post("/touch/7/").status_code)

    during(ask_meanwhile)

    # The view has a lock with another name; so do the requests for other orders.
    assert client.post("/touch/9/").status_code == 200
    assert answers == [409, 409, 404, 200]
    assert is_free(NAME)


def page(request, **arguments):
    return HttpResponse()


INNER = [path("touch/", page), path("pay/<int:pk>/", page), re_path(r"^astream/(?P<pk>\d+)/$", page)]


in_each_language = locked_paths([re.compile(r"^/([a-z-]+/)?touch/")])


@pytest.mark.parametrize(
    ("patterns", "translated"),
    [
        (i18n_patterns(path("touch/", page)), "/touch/"),
        (i18n_patterns(path("pay/<int:pk>/", page), prefix_default_language=False), "/pay/"),
        (i18n_patterns(path("apay/", include(INNER))), "/apay/touch/"),
        (i18n_patterns(path("", include(INNER))), "/touch/"),
        (i18n_patterns(path("", page), path("other/", page)), ""),
        (INNER, ""),
    ],
)
def test_path_that_is_served_for_each_language_is_a_warning(settings, patterns, translated):
    """``/de/touch/`` would not be locked, although ``/touch/`` is listed; a pattern that covers both is no warning."""
    settings.ROOT_URLCONF, settings.LANGUAGES = tuple(patterns), [("en-us", "English"), ("de", "Deutsch")]
    settings.LANGUAGE_CODE = "en-us"

    found = [each for each in run_checks(tags=["urls"]) if each.id == "redlock.W013"]

    language = "de" if translated == "/pay/" else "en-us"
    said = f"tests.shop.middleware.one_per_user locks '{translated}', but not '/{language}{translated}'"
    assert [said in each.msg for each in found] == ([True] if translated else [])
    assert all("re.compile(r'^/([a-z-]+/)?" in each.hint for each in found)
    # What the hint says to write locks the path in each language.
    settings.ROOT_URLCONF = tuple(i18n_patterns(path("touch/", page)))
    settings.MIDDLEWARE = [f"{__name__}.in_each_language", "no.such.middleware"]
    assert [each for each in run_checks(tags=["urls"]) if each.id == "redlock.W013"] == []


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
def test_lock_is_released_after_the_commit_of_the_request(client, order, atomic_requests, seen_at_release, leases):
    """The lock, by default that of the user, goes around the transaction of the request, and never inside one."""
    client.force_login(User.objects.create(pk=42))

    assert client.post("/pay/7/").status_code == 200

    assert [lease.name for lease in leases] == ["request:user:42", "view:order:7"]
    assert seen_at_release == [True, True]
    with pytest.raises(RuntimeError, match="locked_paths is inside a transaction"), transaction.atomic("warehouse"):
        locked_paths(["/"])(page)(RequestFactory().post("/"))


def test_key_methods_and_answer_are_chosen(client):
    """The arguments are those of ``locked_view``; a request without a value for the key raises, and locks nothing."""
    without_value = RequestFactory().post("/touch/7/", REMOTE_ADDR="")
    with pytest.raises(ImproperlyConfigured, match="the server passes no REMOTE_ADDR"):
        locked_paths([re.compile("touch")])(lambda request: pytest.fail("ran"))(without_value)
    with lock("request:7"):
        assert client.get("/touch/7/").status_code == 429
        assert client.get("/touch/8/").status_code == 200
        assert client.post("/touch/7/").status_code == 200


@pytest.mark.parametrize("path", ["/apay/7/", "/touch/7/"])
async def test_asynchronous_requests_are_locked(async_client, path):
    """Under ASGI the middleware is asynchronous, around asynchronous and blocking views."""
    held = []
    during(lambda: held.append(not is_free(NAME)))

    answer = await async_client.post(path)

    assert (answer.status_code, held, is_free(NAME)) == (200, [True], True)
    async with lock(NAME):
        assert (await async_client.post(path)).status_code == 409


def test_lost_lock_is_logged(client, leases, caplog):
    """When the response comes back, all is committed: it is sent, and the log reports the loss."""
    during(lambda: lose(leases[0]))

    assert client.post("/touch/7/").status_code == 200

    assert "the lock of view locked_paths ended before the view did" in caplog.text
    during(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.post("/touch/7/")
    assert is_free(NAME)


@pytest.mark.parametrize(
    ("paths", "options", "error", "message"),
    [
        ("/touch/", {}, TypeError, r"must be a list such as \['/touch/'\]"),
        (reverse_lazy("touch"), {}, TypeError, r"must be a list such as \['/checkout/'\], not __proxy__"),
        (
            [reverse_lazy("touch")],
            {},
            TypeError,
            "A path must be a str or a compiled .*, not __proxy__",
        ),
        ([], {}, ValueError, "locks no request"),
        (["touch/"], {}, ValueError, r"begins with '/', unlike 'touch/'; for a pattern pass re\.compile"),
        (["/"], {"key": "{pk}"}, ImproperlyConfigured, r"'\{pk\}' names no argument of the view"),
        (["/"], {"wait": -1}, ValueError, "wait"),
        (["/"], {"methods": "POST"}, TypeError, "methods"),
        (["/"], {"on_busy": 500}, ValueError, "on_busy"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(paths, options, error, message):
    """A mistake is an error when the server starts."""
    with pytest.raises(error, match=message):
        locked_paths(paths, **options)


# Errors of the view


async def test_error_of_a_lock_inside_is_answered(client, async_client):
    """A lock that the view could not get is 409 for people and programs; without a quorum it is 503."""
    ask = sync_to_async(client.post)
    async with lock("inside"):
        page, problem = await ask("/busy-inside/"), await ask("/busy-inside/", headers={"accept": "application/json"})
        assert (await async_client.post("/abusy-inside/")).status_code == 409
    for node in locks["default"].nodes[:2]:
        node.down = True
    unknown = await ask("/busy-inside/")

    assert (page.status_code, problem.status_code, unknown.status_code) == (409, 409, 503)
    assert b"<h1>Already in progress</h1>" in page.content
    assert problem["Content-Type"] == "application/problem+json"
