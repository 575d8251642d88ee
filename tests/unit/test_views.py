"""``locked_view``: one request at a time for each value of the key, with the transaction inside the lock."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial, wraps
from inspect import isawaitable
from io import BytesIO
from itertools import product
from types import SimpleNamespace
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import AnonymousUser, User
from django.core.checks import run_checks
from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.db import connections
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.test import Client, RequestFactory
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.utils.functional import lazystr
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from django_redlock import LockLostError, LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.signals import lock_acquired
from django_redlock.testing import Simulation
from django_redlock.views import locked_view, response_to
from tests.shop.helpers import PATIENCE, during, is_free, lose, paid_as_others_see
from tests.shop.models import Order
from tests.shop.views import pay, save_as_paid

NAME = "view:order:7"

pytestmark = pytest.mark.usefixtures("shop")

TWO_DATABASES = pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
requests = RequestFactory()


def show(request, pk, order_id=None):
    return HttpResponse()


@locked_view  # type: ignore[arg-type]
def without_key(request):
    return HttpResponse()


class WithoutKey(View):
    @locked_view  # type: ignore[arg-type]
    def post(self, request):
        return HttpResponse()


@pytest.mark.parametrize("view", [without_key, csrf_exempt(without_key), WithoutKey.as_view()])
def test_decorator_without_a_key_is_found_before_the_first_request(client, settings, view):
    """The function is taken for the key; the check says so, and so does the first request."""
    settings.ROOT_URLCONF = (path("", include(([path("pay/", view), path("sound/", pay)], "shop"))),)
    [message] = run_checks(tags=["urls"])

    assert message.id == "redlock.E012"
    assert "'pay/'" in message.msg
    assert "needs a key in parentheses" in message.hint
    with pytest.raises(TypeError, match="needs a key in parentheses"):
        client.post("/pay/")


@pytest.mark.parametrize("about", [{"cls": Order}, {"view_class": "Order"}, {"actions": ["pay"]}])
def test_attributes_of_a_function_may_have_names_that_views_of_classes_use(client, settings, about):
    """The project, or another package, may mean something else by them: neither the check nor a request fails."""
    view = locked_view("order")(lambda request: HttpResponse())
    vars(view).update(about)
    settings.ROOT_URLCONF = (path("pay/", view),)

    assert run_checks(tags=["urls"]) == []
    assert client.post("/pay/").status_code == 200


def name_of(key, request=None, **kwargs):
    """Return the name under which a request is locked."""
    names = []

    def look(lease, **about):
        names.extend(lease.names)

    lock_acquired.connect(look)
    try:
        locked_view(key)(lambda request, **kwargs: HttpResponse())(request or requests.post("/pay/"), **kwargs)
    finally:
        lock_acquired.disconnect(look)
    return names[0]


# One at a time


def test_second_request_gets_a_retry_after(client):
    """While one request runs, another for the same order gets 409, and one for another order goes through."""
    answers = []

    def ask_meanwhile():
        during(lambda: None)
        answers.extend(Client().post(path).status_code for path in ("/touch/7/", "/touch/8/"))
        with pytest.raises(LockTakenError, match=r"held by view tests\.shop\.views\.touch POST"):
            lock(NAME, wait=0).acquire()

    during(ask_meanwhile)

    assert client.post("/touch/7/").status_code == 200
    assert answers == [409, 200]
    assert is_free(NAME)


@pytest.mark.parametrize(
    ("options", "locked"),
    [
        ({}, {"POST", "PUT", "LOCK"}),
        ({"methods": ["get"]}, {"GET", "HEAD"}),
        ({"methods": ("POST", "LOCK")}, {"POST", "LOCK"}),
    ],
)
def test_methods_choose_what_is_locked(options, locked):
    """Safe methods are not locked. ``methods`` names those that are; HEAD goes with GET, as in Django."""
    view = locked_view("order", **options)(lambda request: HttpResponse())
    methods = ("GET", "HEAD", "OPTIONS", "TRACE", "POST", "PUT", "LOCK")

    with lock("view:order"):
        refused = {method for method in methods if view(requests.generic(method, "/")).status_code == 409}

    assert refused == locked


def test_waiting_request_continues_when_the_lock_is_free():
    """With ``wait``, a request waits for its turn. A wrapped view keeps its attributes; a partial object has none."""
    view = locked_view("order:{pk}", wait=PATIENCE)(partial(show, order_id=1))
    held = lock(NAME).acquire()

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(view, requests.post("/"), pk=7)
        held.release()
        assert waiting.result(PATIENCE).status_code == 200
    assert (pay.__name__, pay.csrf_exempt) == ("pay", True)


class Parent(View):
    @locked_view("order:{pk}")
    def post(self, request, pk):
        return HttpResponse()


class Override(Parent):
    @locked_view("order:{pk}")
    def post(self, request, pk):
        with pytest.raises(LockTakenError):
            lock(NAME, wait=0).acquire()
        return super().post(request, pk)


@locked_view("order:{pk}")
class Child(Override):
    pass


@locked_view("order:{pk}")
def calls_another_view(request, pk):
    return Child.as_view()(request, pk=pk)


@locked_view("order:{pk}")
async def inner(request, pk):
    return HttpResponse()


@locked_view("order:{pk}")
async def awaits_another_view(request, pk):
    await inner(request, pk)
    assert not is_free(NAME)
    return await inner(request, pk)


@pytest.mark.parametrize("view", [Override.as_view(), Child.as_view(), calls_another_view, awaits_another_view])
async def test_request_is_not_refused_by_its_own_lock(leases, view):
    """A subclass that is decorated as its base class is, and a view that calls another one, take the lock once."""

    async def ask():
        response = view(requests.post("/"), pk=7)
        return (await response if isawaitable(response) else response).status_code

    assert [await ask(), await ask()] == [200, 200]
    assert len(leases) == 2
    with lock(NAME):
        assert await ask() == 409


async def test_last_view_of_a_request_releases_its_lock():
    """One that calls two others at once with its request, under the lock of both, has the lock until both are done."""
    begun, over = ([asyncio.Event(), asyncio.Event()] for _ in range(2))

    @locked_view(lambda request, number: "order:7")
    async def view(request, number):
        begun[number].set()
        await over[number].wait()
        return HttpResponse()

    request = requests.post("/")
    first = asyncio.create_task(view(request, 0))
    await begun[0].wait()
    second = asyncio.create_task(view(request, 1))
    await begun[1].wait()
    over[0].set()
    await first

    assert not is_free(NAME)
    over[1].set()
    assert (await second).status_code == 200
    assert is_free(NAME)


@pytest.mark.parametrize("whole", [True, False], ids=["class", "method"])
def test_class_beside_a_locked_one_still_decides(whole):
    """In a view that inherits from several classes, the lock leaves out no dispatch() of another one."""

    class Pay(View):
        def post(self, request, pk):
            return HttpResponse()

        post = post if whole else locked_view("order:{pk}")(post)

    class Forbidden(View):
        def dispatch(self, request, *args, **kwargs):
            return HttpResponse(status=403)

    class Both(locked_view("order:{pk}")(Pay) if whole else Pay, Forbidden):
        pass

    assert Both.as_view()(requests.post("/"), pk=7).status_code == 403
    with lock(NAME):
        assert Both.as_view()(requests.post("/"), pk=7).status_code == 409


def test_lock_error_of_the_view_is_not_taken_for_its_own():
    """An error of a lock inside the view is left to the view, and is no 409; the lock is free afterwards."""

    @locked_view("order")
    def view(request):
        lock("other", wait=0).acquire()

    with lock("other"), pytest.raises(LockTakenError):
        view(requests.post("/"))
    assert is_free("view:order")


# Classes and coroutines


async def test_cancelled_request_releases():
    """A client that goes away while its view runs leaves no lock behind."""
    started = asyncio.Event()

    @locked_view("order")
    async def view(request):
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(view(requests.post("/")))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert is_free("view:order")


@pytest.mark.parametrize("error", [asyncio.CancelledError, TimeoutError])
async def test_work_that_goes_on_in_a_thread_keeps_the_lock(error):
    """
    A cancellation, or a timeout of the view, ends no thread: the lock waits for it, also when cancelled again.

    Until then it is that of the request, so the thread may call a view with the same key.
    """
    entered, over, cancelled, answers = threading.Event(), threading.Event(), asyncio.Event(), []

    def work(request):
        entered.set()
        over.wait(PATIENCE)
        answers.append(locked_view("order")(lambda request: "paid")(request))

    @locked_view("order")
    async def view(request):
        try:
            await sync_to_async(work)(request)
        except asyncio.CancelledError:
            cancelled.set()
            raise error from None

    async def turns():
        for _ in range(20):
            await asyncio.sleep(0)

    task = asyncio.create_task(view(requests.post("/")))
    await asyncio.to_thread(entered.wait, PATIENCE)
    task.cancel()
    await cancelled.wait()
    for _ in range(2):
        await turns()
        assert not is_free("view:order")
        task.cancel()
    over.set()
    with pytest.raises(asyncio.CancelledError):  # the last one
        await task

    assert answers == ["paid"]
    assert is_free("view:order")


async def pay_later(request):
    pytest.fail("ran")


def pay_in_steps(request):
    yield pytest.fail("ran")


@pytest.mark.parametrize(("pay", "what"), [(pay_later, "an awaitable"), (pay_in_steps, "a generator")])
def test_work_in_disguise_is_refused(pay, what):
    """A function that returns a coroutine or a generator would be unlocked before that runs: an error says so."""

    async def awaited(request):
        return pay(request)

    refused = pytest.raises(TypeError, match=f"returned {what}.* directly on the function or coroutine function")

    with refused:
        locked_view("order")(lambda request: pay(request))(requests.post("/"))
    with refused:
        async_to_sync(locked_view("order")(awaited))(requests.post("/"))
    assert is_free("view:order")


# Transactions


@TWO_DATABASES
def test_lock_is_released_after_the_commit_of_the_request(client, order, atomic_requests, seen_at_release):
    """Under ATOMIC_REQUESTS another connection sees the change, or the rollback, when the lock is free."""
    during(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        client.post("/pay/7/")
    assert set(seen_at_release) == {False}
    seen_at_release.clear()
    inside = []
    during(lambda: inside.append(paid_as_others_see()))

    assert client.post("/pay/7/").status_code == 200

    assert inside == [False]
    assert set(seen_at_release) == {True}
    with lock(NAME):
        assert client.post("/pay/7/").status_code == 409


@TWO_DATABASES
def test_lock_that_is_about_to_end_rolls_the_request_back(client, order, atomic_requests):
    """With less than a twentieth of the ttl left, which may not be enough for the commit, the view does not commit."""
    with Simulation(ttl=30) as simulation:
        during(lambda: simulation.pause(28.8))
        with pytest.raises(LockLostError) as lost:
            client.post("/pay/7/")
        assert is_free(NAME)

    assert (lost.value.reason, paid_as_others_see()) == ("margin", False)


class Both(View):
    @locked_view("order:{pk}")
    def post(self, request, pk):
        return save_as_paid(pk)


@TWO_DATABASES
@pytest.mark.parametrize("first", [True, False], ids=["outer", "inner"])
@pytest.mark.parametrize(
    "view",
    [locked_view("order:{pk}")(lambda request, pk: save_as_paid(pk)), Both.as_view()],
    ids=["function", "method"],
)
def test_loss_of_either_lock_of_a_request_rolls_it_back(order, settings, client, atomic_requests, leases, view, first):
    """The innermost lock opens the transaction; before the commit, all of the request must be held, of all aliases."""
    settings.REDLOCK = {**settings.REDLOCK, "other": {"NODES": ["memory://other"]}}
    settings.ROOT_URLCONF = (path("pay/<int:pk>/", locked_view("user_or_ip", using="other")(view)),)
    during(lambda: lose(leases[0 if first else 1]))

    with pytest.raises(LockLostError):
        client.post("/pay/7/")

    assert [lease.name for lease in leases[:2]] == ["view:ip:127.0.0.1", NAME]
    assert not paid_as_others_see()


def test_lost_lock_is_noticed_before_a_view_that_would_take_it_again(leases):
    """A view that another one calls with its request does not begin without the lock."""

    @locked_view("order:{pk}")
    def outer(request, pk):
        lose(leases[0])
        return locked_view("order:{pk}")(lambda request, pk: pytest.fail("ran"))(request, pk)

    with pytest.raises(LockLostError):
        outer(requests.post("/"), 7)


def again(view):
    """A decorator of the project: a second attempt after an error."""

    @wraps(view)
    def attempts(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        except ZeroDivisionError:
            return view(*args, **kwargs)

    return attempts


@TWO_DATABASES
def test_each_attempt_of_a_request_has_its_transaction(client, settings, order, atomic_requests):
    """A decorator above the lock may call the view again after an error; that attempt is rolled back, too."""
    settings.ROOT_URLCONF = (path("pay/<int:pk>/", again(pay)),)
    attempts = []

    def fail():
        attempts.append(connections["warehouse"].in_atomic_block)
        raise ZeroDivisionError

    during(fail)
    with pytest.raises(ZeroDivisionError):
        client.post("/pay/7/")

    assert (attempts, paid_as_others_see()) == ([True, True], False)


def losses(caplog):
    """Return the beginnings of the errors about locks of views that were lost."""
    found = [record for record in caplog.records if record.name == "django_redlock" and record.levelname == "ERROR"]
    assert {(record.event, record.lock) for record in found} <= {("view_lock_lost", NAME)}
    return [record.getMessage().partition(";")[0] for record in found]


@pytest.mark.django_db
@pytest.mark.parametrize("release", ["send", "wait"])
@pytest.mark.parametrize("path", ["/touch/7/", "/stream/7/", "/apay/7/"])
def test_loss_that_only_the_release_shows_is_one_error(client, settings, leases, caplog, path, release):
    """Somebody removed the lock while the view ran, and no extension has noticed it."""
    settings.REDLOCK = {"default": settings.REDLOCK["default"] | {"OPTIONS": {"release": release}}}

    def remove():
        locks["default"].release(leases[0].names, leases[0].secret)

    during(remove)
    answer = client.post(path)
    if answer.streaming:
        remove()
        b"".join(answer.streaming_content)

    view = f"tests.shop.views.{path.split('/')[1]}"
    assert losses(caplog) == [f"the lock of view {view} ended before the view did: {NAME} (forgotten)"]


# Streaming


@pytest.mark.parametrize("how", ["ends", "raises", "is left", "is closed twice"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asyncio"])
async def test_stream_holds_the_lock_until_it_is_over(caplog, asynchronous, how):
    """Until the response is closed or its iterator raises, after which ASGI does not close it. No loss is logged."""

    def parts():
        yield b"one"
        if how == "raises":
            raise ZeroDivisionError
        yield b"two"

    async def aparts():
        for part in parts():
            yield part

    @locked_view("order:7")
    async def aview(request):
        return StreamingHttpResponse(aparts())

    view = locked_view("order:7")(lambda request: StreamingHttpResponse(parts()))
    response = await aview(requests.post("/")) if asynchronous else view(requests.post("/"))
    content = response.streaming_content

    async def read():
        return await anext(content, None) if asynchronous else next(content, None)

    assert await read() == b"one"
    assert not is_free(NAME)
    if how == "raises":
        with pytest.raises(ZeroDivisionError):
            await read()
        assert is_free(NAME)
    while how == "ends" and await read():
        assert not is_free(NAME)
    for _ in range(1 + (how == "is closed twice")):
        await sync_to_async(response.close)()
    assert is_free(NAME)
    if asynchronous:
        await content.aclose()

    del response
    assert losses(caplog) == []


@pytest.mark.django_db
def test_async_stream_that_a_blocking_server_reads_releases(client):
    """WSGI runs an asynchronous view in one event loop, and reads its response in another."""
    response = client.post("/astream/7/")
    assert not is_free(NAME)

    with pytest.warns(Warning, match="must consume asynchronous iterators"):
        assert list(response) == [b"one", b"two"]
    assert is_free(NAME)


class OwnStream(HttpResponseBase):
    """A streaming response that is none of Django's."""

    streaming, is_async = True, False

    def __init__(self, parts):
        super().__init__()
        self.streaming_content = parts

    def __iter__(self):
        return iter(self.streaming_content)


class OwnContent(StreamingHttpResponse):
    """A streaming response with a content of its own."""

    @property
    def streaming_content(self):
        return iter(self._parts)

    @streaming_content.setter
    def streaming_content(self, parts):
        self._parts, self.is_async = parts, False


@pytest.mark.django_db
@pytest.mark.parametrize("keys", [("order:7", "another"), ("order:7", "order:7")], ids=["two locks", "twice"])
@pytest.mark.parametrize(
    "make",
    [lambda: FileResponse(BytesIO(b"one")), lambda: OwnStream([b"one"]), lambda: OwnContent([b"one"])],
    ids=["file", "another class", "content of its own"],
)
def test_stream_of_any_class_frees_all_its_locks_when_it_was_read(make, keys):
    """However many locked views it has passed, and however its class keeps its parts."""
    view = locked_view(keys[0])(locked_view(keys[1])(lambda request: make()))
    response = view(requests.post("/"))
    assert not any(is_free(f"view:{key}") for key in keys)

    assert list(response) == [b"one"]

    assert all(is_free(f"view:{key}") for key in keys)


@pytest.mark.django_db
def test_file_can_still_be_sent_by_the_server(tmp_path):
    """A server with a file wrapper sends the file itself, and closes the response at its end."""
    (tmp_path / "file").write_bytes(b"one")
    response = locked_view("order:7")(lambda request: FileResponse((tmp_path / "file").open("rb")))(requests.post("/"))

    assert response.file_to_stream.read() == b"one"
    assert not is_free(NAME)
    response.close()
    assert is_free(NAME)


# Responses


BROWSER, PROGRAM = "text/html,application/xhtml+xml,*/*;q=0.8", "text/html;q=0.5, application/json"


@pytest.mark.parametrize(
    ("on_busy", "accept", "down", "status", "title"),
    [
        *((409, accept, 0, 409, "Already in progress") for accept in (BROWSER, "", "*/*", "image/png")),
        *((409, accept, 0, 409, "Already in progress") for accept in (PROGRAM, "application/problem+json")),
        (409, "application/*", 0, 409, "Already in progress"),
        *((423, accept, 0, 423, "Locked") for accept in (BROWSER, PROGRAM)),
        *((429, accept, 0, 429, "One at a time") for accept in (BROWSER, PROGRAM)),
        (423, BROWSER, 2, 503, "Temporarily unavailable"),
        (lambda request, error: pytest.fail("not busy"), PROGRAM, 2, 503, "Temporarily unavailable"),
    ],
)
def test_answer_to_a_request_that_gets_no_lock(on_busy, accept, down, status, title):
    """A page for a browser, problem details (RFC 9457) for a program; without a quorum, it is 503 in any case."""
    view = locked_view("order:7", on_busy=on_busy)(lambda request: HttpResponse())
    with lock(NAME):
        for node in locks["default"].nodes[:down]:
            node.down = True
        answer = view(requests.post("/", headers={"accept": accept}))

    assert answer.status_code == status
    assert 1 <= int(answer["Retry-After"]) <= 10
    assert (answer["Cache-Control"], "Accept" in answer["Vary"]) == ("no-store", True)
    assert b"order:7" not in answer.content
    if "application/" in accept and accept != BROWSER:
        problem = json.loads(answer.content)
        assert answer["Content-Type"] == "application/problem+json"
        assert (problem.pop("status"), problem.pop("title"), set(problem)) == (status, title, {"detail"})
    else:
        assert answer["Content-Type"] == "text/html; charset=utf-8"
        assert f"<h1>{title}</h1>" in answer.content.decode()


async def answer_later(request, error):
    return HttpResponse()


class AnswerLater:
    async def __call__(self, request, error):
        return HttpResponse()


async def test_answer_may_be_the_projects_own():
    """``on_busy`` may be a function of the request and the error, for blocking and for asynchronous views."""

    async def later(request):
        return HttpResponse()

    decorate = locked_view("order", on_busy=lambda request, error: HttpResponse(f"{request.path} {error.name}"))
    async with lock("view:order"):
        answers = [decorate(lambda request: HttpResponse())(requests.post("/pay/"))]
        answers.append(await decorate(later)(requests.post("/pay/")))

    assert [each.content for each in answers] == [b"/pay/ view:order"] * 2


def test_page_may_be_the_projects_own(client, settings, tmp_path):
    """A template of the project takes precedence over ours; without templates the answer is plain text."""
    errors = [LockTakenError("order", retry_after=left) for left in (None, 0.0, 1.2, 9.5, 29.0)]
    assert [response_to(requests.post("/"), error)["Retry-After"] for error in errors] == ["1", "1", "2", "10", "10"]

    settings.DEBUG = True
    with lock(NAME, label="the other"):
        assert "view:order:7" in client.post("/touch/7/").content.decode()
        assert "the other" in client.post("/touch/7/", headers={"accept": "application/json"}).json()["debug"]
    settings.DEBUG = False
    folder = tmp_path / "django_redlock"
    folder.mkdir()
    (folder / "busy.html").write_text("{{ title }}|{{ status }}|{{ request.path }}|{{ detail }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    page = response_to(requests.post("/pay/"), LockTakenError("order"))
    assert page.content.startswith(b"Already in progress|409|/pay/|")
    assert b"Try again in 1 second." in page.content

    settings.TEMPLATES = []
    page = response_to(requests.post("/"), QuorumUnavailableError("order"))
    assert (page.status_code, page["Content-Type"]) == (503, "text/plain; charset=utf-8")


# Keys


def with_user(user, **meta):
    request = requests.post("/pay/?order=3", {"cart": "4"}, **meta)
    request.user = user
    request.session = SimpleNamespace(session_key="secret" if user.pk else None)
    return request


ALICE = User(pk=42)
NOBODY = AnonymousUser()


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("order:{pk}", "view:order:7"),
        ("{request.user.pk}:{pk}", "view:42:7"),
        ("user", "view:user:42"),
        ("user_or_ip", "view:user:42"),
        ("ip", "view:ip:127.0.0.1"),
        ("path", "view:path:/pay/"),
        ("get:order", "view:get:order:3"),
        ("post:cart", "view:post:cart:4"),
        ("kwarg:pk", "view:kwarg:pk:7"),
        (["checkout", "user", "{pk}"], "view:checkout:user:42:7"),
        (lambda request, pk: f"order:{pk}", "view:order:7"),
        (lambda request, pk: ["order", pk, "a:b"], "view:order:7:a%3Ab"),
        (["order", lambda request, pk: "a:b"], "view:order:a%3Ab"),
        ("reindex", "view:reindex"),
    ],
)
def test_key_is_resolved(key, name):
    """Templates, short names, callables and lists give the documented names."""
    assert name_of(key, with_user(ALICE), pk=7) == name


def test_values_of_a_key():
    """Values of a key are escaped, cut and hidden as far as a name that others see needs it."""
    assert name_of("user_or_ip", with_user(NOBODY)) == "view:ip:127.0.0.1"
    assert name_of("ip", requests.post("/", REMOTE_ADDR="::1")) == "view:ip:%3A%3A1"
    secrets = {"session": with_user(ALICE)}
    secrets["header:Authorization"] = requests.post("/", headers={"authorization": "secret"})
    names = [name_of(key, request) for key, request in secrets.items()]
    assert [name.rpartition(":")[0] for name in names] == ["view:session", "view:header:authorization"]
    assert "secret" not in str(names)

    values = ["a:b", "50%", date(2026, 1, 2), UUID(int=1)]
    texts = ["a%3Ab", "50%25", "2026-01-02", str(UUID(int=1))]
    assert [name_of("{value}", value=value) for value in values] == [f"view:{text}" for text in texts]
    names = {name_of("{value}", value="x" * 200 + last) for last in "ab"}
    assert len(names) == 2
    assert all(name.startswith("view:" + "x" * 120 + "%h") and len(name) < 170 for name in names)
    # Positional arguments and defaults count as in the view's signature.
    with lock("view:7:all"):
        view = locked_view("{pk}:{part}")(lambda request, pk, part="all": HttpResponse())
        assert view(requests.post("/"), 7).status_code == 409


@pytest.mark.parametrize(
    ("key", "signs"),
    [("{a}:{b}", "a:%"), ("{a}-{b}", "a-%"), ("{a}x_y{b}", "x_y"), ("{a}%:{b}", "5%:"), ("{a}.{b}:", "2.:E")],
)
def test_different_values_never_give_the_same_name(key, signs):
    """All pairs of texts of up to two characters, chosen to confuse, have different names."""
    texts = ["".join(text) for length in (1, 2) for text in product(signs, repeat=length)]

    names = {name_of(key, a=a, b=b) for a in texts for b in texts}

    assert len(names) == len(texts) ** 2


# Keys that cannot work


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("order:{oder_id}", "'{oder_id}' names no argument of the view (it has order_id, pk"),
        ("kwarg:kp", "'kwarg:kp' names no argument of the view"),
        ("order:{pk", "is not a template"),
        ("order:{}", "must be an argument of the view"),
        ("order:{pk[0]}", "no calls, indexes"),
        ("{request.__class__}", "begin with an underscore"),
        ("{pk}%{order_id}", "put a separator"),
        ("header:", "must say which, such as 'header:Idempotency-Key'"),
        ("checkout:user", "did you mean 'user'"),
        ("order:pk", "the same for every request; did you mean '{pk}'"),
        ("", "must not be empty"),
        (7, "must be a str, a callable or a list"),
        (["order", 7], "part 1 must be a str or a callable, not 7"),
        (answer_later, "must not be a coroutine function"),
    ],
)
def test_key_that_can_never_be_resolved_is_refused_at_once(key, message):
    """A mistake in the key is an error when the view is decorated, and names the view and the key."""
    with pytest.raises(ImproperlyConfigured) as refused:
        locked_view(key)(show)

    assert message in str(refused.value)
    assert f"@locked_view on tests.unit.test_views.show, key {key!r}" in str(refused.value)


def test_class_missing_argument_and_missing_middleware_are_named():
    with pytest.raises(ImproperlyConfigured, match=r"'{pk}' names no argument of the view \(it has none\)"):
        locked_view("{pk}")(lambda *args: None)
    with pytest.raises(ImproperlyConfigured, match=r"on a class, key 'order:\{pk': "):
        method_decorator(locked_view("order:{pk"), name="dispatch")(type("Pay", (View,), {}))
    with pytest.raises(ImproperlyConfigured, match=r"there is no 'pk', only slug\."):
        locked_view("{pk}")(type("Edit", (View,), {})).as_view()(requests.post("/"), slug="a")
    with pytest.raises(ImproperlyConfigured, match="add AuthenticationMiddleware"):
        locked_view("user")(show)(requests.post("/"), pk=7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"methods": "POST"}, TypeError, "methods must be a list"),
        ({"methods": lazystr("POST")}, TypeError, "methods must be a list"),
        ({"methods": []}, ValueError, "locks no request"),
        ({"wait": -1}, ValueError, "wait"),
        ({"on_busy": 500}, ValueError, "on_busy must be"),
        ({"on_busy": "409"}, TypeError, "on_busy must be"),
        ({"on_busy": answer_later}, TypeError, "on_busy must be"),
        ({"on_busy": AnswerLater()}, TypeError, "on_busy must be"),
        ({}, TypeError, r"the class Order has no dispatch\(\)"),
    ],
)
def test_option_that_cannot_work_is_refused_at_once(options, error, message):
    """So is a class that is no view. A str in place of a list, or an empty list, would leave the view unlocked."""
    with pytest.raises(error, match=message):
        locked_view("order", **options)(Order)


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("user", ImproperlyConfigured, "nobody is logged in; put @login_required above"),
        ("session", ImproperlyConfigured, "has not been saved yet"),
        ("ip", ImproperlyConfigured, "REMOTE_ADDR"),
        ("{order_id}", ImproperlyConfigured, "it is empty"),
        ("{pk.name}", ImproperlyConfigured, "has no attribute 'name'"),
        ("{request.user}", ImproperlyConfigured, "a AnonymousUser cannot be part of a lock's name"),
        (lambda request, pk: None, ImproperlyConfigured, "the callable has no value for this request"),
        (["order", lambda request, pk: [pk, None]], ImproperlyConfigured, "the callable has no value"),
        ("header:Idempotency-Key", BadRequest, "the client sent no header Idempotency-Key"),
        ("post:missing", BadRequest, "the client sent no missing"),
    ],
)
def test_missing_value_is_an_error_and_never_a_shared_lock(leases, key, error, message):
    """A request without a value raises, naming the view and the key, and locks nothing."""
    request = with_user(NOBODY, REMOTE_ADDR="")

    with pytest.raises(error) as missing:
        locked_view(key)(show)(request, pk=7)

    assert message in str(missing.value)
    assert "@locked_view on tests.unit.test_views.show, key " in str(missing.value)
    assert leases == []


@TWO_DATABASES
async def test_key_of_an_async_view_may_read_the_database(async_connections):
    """A key whose attributes are read from the database, like ``request.user``, works in an async view."""
    await User.objects.using("warehouse").acreate(pk=42)
    request = requests.post("/")
    request.user = LazyUser()

    @locked_view("{request.user.pk}")
    async def view(request):
        return HttpResponse(str(not is_free("view:42")))

    assert (await view(request)).content == b"True"


class LazyUser:
    @property
    def pk(self):
        return User.objects.using("warehouse").get().pk
