"""``locked_view`` and Django REST framework: the user is known under the lock, and errors are problem details."""

import json
from functools import partial, wraps
from types import SimpleNamespace

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.views import LogoutView
from django.core.checks import run_checks
from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.db import connections
from django.http import HttpResponse
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.generic import FormView

pytest.importorskip("rest_framework", reason="needs Django REST framework: pip install djangorestframework")

from rest_framework.decorators import action, api_view
from rest_framework.exceptions import PermissionDenied
from rest_framework.generics import UpdateAPIView
from rest_framework.renderers import JSONRenderer, StaticHTMLRenderer
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.test import APIClient, APIRequestFactory
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet, ViewSet

from django_redlock import StaleTokenError, lock, locked_view, locks
from django_redlock.contrib.rest_framework import exception_handler
from tests.shop.api import pay_inside
from tests.shop.helpers import during, is_free, paid_as_others_see
from tests.shop.models import Order
from tests.shop.views import save_as_paid

TWO_DATABASES = pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
HANDLER = "django_redlock.contrib.rest_framework.exception_handler"


@pytest.fixture(autouse=True)
def interface(shop, settings):
    settings.ROOT_URLCONF = "tests.shop.api"


@pytest.fixture
def names(leases):
    return lambda: [lease.name for lease in leases]


@pytest.fixture
def api():
    return APIClient()


# One at a time


@pytest.mark.parametrize("view", ["pay", "pay-above", "pay-dispatch"])
@pytest.mark.parametrize("accept", ["*/*", "text/html"])
def test_second_request_gets_problem_details(api, accept, view):
    """A program gets JSON, whatever it accepts, with Retry-After and without the name of the lock."""
    with lock("view:order:7"):
        assert api.get("/pay/7/").json() == {"form": True}
        assert api.delete("/pay/7/").status_code == 405
        answer = api.post(f"/{view}/7/", headers={"accept": accept})

    problem = answer.json()
    assert (answer.status_code, answer["Content-Type"]) == (409, "application/problem+json")
    assert (problem["status"], problem["title"]) == (409, "Already in progress")
    assert 1 <= int(answer["Retry-After"]) <= 10
    assert "order:7" not in str(problem)


@pytest.mark.django_db(databases=["default", "warehouse"])
def test_set_of_views_is_locked_with_its_actions(api, names):
    """A ViewSet locks all its actions that change something; ``on_busy`` applies there as well."""
    Order.objects.using("warehouse").create(pk=7)

    assert api.put("/orders/7/").json() == {"updated": "7"}
    assert api.post("/orders/7/pay/").json() == {"paid": "7"}
    with lock("view:order:7"):
        assert api.post("/orders/7/pay/").status_code == 423

    assert names()[:2] == ["view:order:7"] * 2


# The user and the key


def test_user_is_known_by_token(api, names):
    """The lock is taken after authentication and permissions, so ``user`` works, and strangers do not wait."""
    assert api.post("/mine/", headers={"x-token": "42"}).json() == {"user": 42}
    assert api.post("/mine/").status_code == 403
    assert api.post("/mine/", headers={"x-token": "x"}).status_code == 403

    assert names() == ["view:user:42"]


@pytest.mark.parametrize(("order", "name"), [(0, "0"), ("a:b", "a%3Ab")])
def test_key_may_be_in_the_body(api, names, order, name):
    """``post:order`` reads what the framework parsed, JSON as well as forms; an id of 0 is a value."""
    assert api.post("/posted/", {"order": order}, format="json").status_code == 200
    assert api.post("/posted/", {"order": order}, format="multipart").status_code == 200

    assert names() == [f"view:order:post:order:{name}"] * 2


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("[1, 2]", "the client sent no order"),
        ("{}", "the client sent no order"),
        ('{"order": ""}', "the client sent no order"),
        ('{"order": [1, 2]}', "must be a text or a whole number, not a list"),
        ('{"order": {"id": 1}}', "must be a text or a whole number, not an object"),
        ('{"order": 1.5}', "must be a text or a whole number, not a fraction"),
        (r'{"order": "\ud800"}', "UTF-8 cannot encode"),
        (r'{"order": "%s\ud800"}' % ("x" * 200), "UTF-8 cannot encode"),
    ],
)
def test_value_that_no_key_can_have_is_the_clients_mistake(api, names, body, why):
    """JSON may have anything, or nothing, in place of a text; the answer is 400 and says so, and nothing is locked."""
    answer = api.post("/posted/", body, content_type="application/json")

    assert (answer.status_code, why in answer.json()["detail"]) == (400, True)
    for value in ("x" * 9000, "\ud800"):  # the result of a callable is the whole key, so it is not cut
        assert api.post("/called/", json.dumps({"order": value}), content_type="application/json").status_code == 400
    assert names() == []


@pytest.mark.parametrize(
    ("raised", "detail"), [(ValueError("dsn=secret"), None), (BadRequest("dsn=secret"), "Malformed request.")]
)
@pytest.mark.parametrize("place", [lambda key: key, lambda key: ["order", key]], ids=["alone", "in a list"])
def test_error_of_the_function_in_a_key_is_not_shown_to_the_client(settings, names, raised, detail, place):
    """It is the project's own, so it remains what it is; the client of a ``BadRequest`` gets no text of it."""

    def key(request):
        raise raised from ValueError("dsn=secret")

    settings.ROOT_URLCONF = (path("api/", locked_view(place(key))(type("Api", (APIView,), {"post": fail})).as_view()),)

    answer = APIClient(raise_request_exception=False).post("/api/")

    assert (answer.status_code, b"secret" in answer.content) == (400 if detail else 500, False)
    assert detail is None or answer.json() == {"detail": detail}
    assert names() == []


class AsyncAPIView(APIView):
    """Asynchronous as in adrf, whose handlers may be coroutine functions, and whose dispatch() is none itself."""

    def dispatch(self, request, *args, **kwargs):
        return self.adispatch(request, *args, **kwargs)

    async def adispatch(self, request, *args, **kwargs):
        self.args, self.kwargs, self.headers = args, kwargs, self.default_response_headers
        self.request = request = self.initialize_request(request, *args, **kwargs)
        try:
            await sync_to_async(self.initial)(request, *args, **kwargs)
            response = await getattr(self, request.method.lower())(request, *args, **kwargs)
        except Exception as error:
            response = self.handle_exception(error)
        return self.finalize_response(request, response, *args, **kwargs)


@pytest.mark.parametrize("whole", [True, False], ids=["class", "method"])
async def test_asynchronous_class_is_locked(whole):
    """The lock is held while the coroutine runs; a request without a value for the key gets the framework's 400."""
    locked = locked_view(["order", "post:order"])

    class Pay(AsyncAPIView):
        async def post(self, request):
            return Response({"free": is_free("view:order:post:order:7")})

        post = post if whole else locked(post)

    ask, pay = partial(APIRequestFactory().post, "/", format="json"), (locked(Pay) if whole else Pay).as_view()

    assert (await pay(ask({"order": 7}))).data == {"free": False}
    async with lock("view:order:post:order:7"):
        taken = await pay(ask({"order": 7}))
    assert (taken.status_code, taken["Content-Type"]) == (409, "application/problem+json")
    assert (await pay(ask({}))).data == {"detail": "the client sent no order"}


# Transactions


@TWO_DATABASES
@pytest.mark.parametrize("path", ["/pay/7/", "/pay-above/7/", "/baskets/7/send/"])
def test_lock_is_released_after_the_commit_of_the_request(api, order, atomic_requests, seen_at_release, path):
    """Under ATOMIC_REQUESTS another connection sees the change, or the rollback, when the lock is free."""
    inside = []
    during(lambda: inside.append((paid_as_others_see(), connections["warehouse"].in_atomic_block)))

    statuses = [getattr(api, method)(path, headers={"x-token": "42"}).status_code for method in ("put", "post")]

    assert (statuses, inside, seen_at_release) == ([400, 200], [(False, True)] * 2, [False, True])


@TWO_DATABASES
def test_other_actions_have_no_lock_and_keep_their_transaction(api, order, atomic_requests, leases):
    """A lock on one action changes nothing for the others, although its key has no value there."""
    with lock(["view:order:7", "view:42:7"], wait=0):
        assert api.get("/baskets/").json() == {"inside": True}
        assert api.post("/baskets/").json() == {"inside": True}
        assert api.delete("/pay-by-method/7/").status_code == 200
        assert api.post("/pay-by-method/7/").status_code == 409
        assert api.post("/baskets/7/pay/").status_code == 409
        assert api.post("/baskets/7/send/", headers={"x-token": "42"}).status_code == 423
        assert api.post("/pay-below/7/", headers={"x-token": "42"}).status_code == 409

    assert len(leases) == 1


@pytest.mark.parametrize("whole", [True, False], ids=["class", "action"])
def test_class_beside_a_locked_one_still_checks_permissions(whole):
    """In a ViewSet that inherits from several classes, the lock leaves out no initial() of another one."""

    class Pay(ViewSet):
        def create(self, request, pk):
            return Response()

        create = create if whole else locked_view("order:{pk}")(create)

    class Forbidden(ViewSet):
        def initial(self, request, *args, **kwargs):
            raise PermissionDenied

    class Both(locked_view("order:{pk}")(Pay) if whole else Pay, Forbidden):
        pass

    assert Both.as_view({"post": "create"})(APIRequestFactory().post("/"), pk=7).status_code == 403


def handler(name):
    """Return a method of that name."""

    def method(self, request, pk=None):
        return Response()

    method.__name__ = name
    return method


an_action = action(detail=True, methods=["post"])


@pytest.mark.parametrize(
    ("base", "name", "decorate", "message"),
    [
        (ViewSet, "pay", lambda pay: an_action(locked_view("order:{kp}")(pay)), "key 'order:{kp}': '{kp}' names no"),
        (object, "pay", lambda pay: an_action(locked_view("a")(pay)), "Pay.pay(): Pay is not a view class. Let"),
        (View, "get", locked_view("a", methods=["POST"]), "methods=['POST'] leaves out GET, so get() is not locked"),
        *(
            (base, name, locked_view("orders"), f"Pay.{name}() handles no request. Decorate the class, or")
            for base in (View, APIView, UpdateAPIView)
            for name in ("dispatch", "initial", "perform_update", "get_queryset")[:: 3 if base is View else 1]
        ),
    ],
)
def test_lock_of_a_method_that_cannot_work_is_found_when_the_class_is_made(base, name, decorate, message):
    """A key that can never be resolved, or a method that handles no request, is an error at import."""
    with pytest.raises((ImproperlyConfigured, RuntimeError, TypeError, ValueError)) as wrong:
        type("Pay", (base,), {name: decorate(handler(name))})

    assert message in f"{wrong.value} {wrong.value.__cause__}"  # of which Python 3.11 makes its cause


def keeping(view):
    """A decorator of the project, which hides the lock below it from the class."""

    @wraps(view)
    def wrapper(*args, **kwargs):
        return view(*args, **kwargs)

    return wrapper


orders = locked_view("orders")


@pytest.mark.parametrize("name", ["initial", "perform_update", "check_permissions", "initialize_request"])
@pytest.mark.parametrize(
    "make",
    [
        lambda name: type("Pay", (UpdateAPIView,), {name: keeping(orders(handler(name)))}),
        lambda name: type("Pay", (UpdateAPIView,), {name: method_decorator(never_cache)(orders(handler(name)))}),
        lambda name: method_decorator(orders, name=name)(type("Pay", (UpdateAPIView,), {name: handler(name)})),
    ],
    ids=["decorator of the method", "method_decorator", "decorator of the class"],
)
def test_method_that_handles_no_request_is_found_by_a_check(settings, make, name):
    """The class did not see the lock, so nothing was refused when it was made."""
    settings.ROOT_URLCONF = (path("<int:pk>/", make(name).as_view()),)

    [found] = run_checks(tags=["urls"])
    assert (found.id, f"Pay.{name}() handles no request. Decorate the class" in found.msg) == ("redlock.E014", True)


# Every way to a locked method

locked = locked_view("order:{pk}")


def pay(self, request, pk):
    return save_as_paid(pk)


def fail(self, *args, **kwargs):
    save_as_paid(7)
    raise ZeroDivisionError


class Changes:
    def get_serializer(self, *args, **kwargs):
        return SimpleNamespace(data={}, is_valid=lambda raise_exception: True)

    def get_object(self):
        return SimpleNamespace()

    def perform_update(self, serializer):
        save_as_paid(7)


class ByFramework(Changes, ModelViewSet):
    @locked
    def update(self, request, *args, **kwargs):
        return super().update(request, *args, **kwargs)


class ByProject(ByFramework):
    def partial_update(self, request, *args, **kwargs):
        return super().partial_update(request, *args, **kwargs)

    def update(self, request, *args, **kwargs):
        return super().update(request, *args, **kwargs)

    def pay(self, request, pk):
        return self.update(request, pk=pk)


class ByView(Changes, UpdateAPIView):
    @method_decorator(never_cache)
    @locked
    def update(self, request, *args, **kwargs):
        return super().update(request, *args, **kwargs)


class ByForm(FormView):
    @locked
    def post(self, request, pk):
        return save_as_paid(pk)


class ByOneFunction(APIView):
    post = put = locked(pay)


class ByTwoDecorators(APIView):
    post = locked_view("shop")(locked(pay))


@locked_view("shop")
class ByClassAndMethod(View):
    post = method_decorator(never_cache)(locked(pay))


class OneLockTwice(ViewSet):
    create = locked(pay)

    @locked
    def update(self, request, pk):
        return self.create(request, pk=pk)


class Finds(View):
    http_method_names = ["propfind"]
    propfind = locked(pay)


class FindsBelow(View):
    http_method_names = ["propfind"]
    propfind = method_decorator(never_cache)(locked(pay))


class Reads(ViewSet):
    export = action(detail=True)(locked(pay))


class Plain(ViewSet):
    create = pay


@locked
class ByProperty(View):
    @property
    def post(self):
        return partial(pay, self)


WAYS = {
    "framework": (ByFramework.as_view({"put": "update", "patch": "partial_update"}), ["PUT", "PATCH"]),
    "project": (ByProject.as_view({"put": "update", "patch": "partial_update"}), ["PUT", "PATCH"]),
    "view": (ByView.as_view(), ["PUT", "PATCH"]),
    "form": (ByForm.as_view(), ["POST", "PUT"]),
    "two names": (ByOneFunction.as_view(), ["POST", "PUT"]),
    "property": (ByProperty.as_view(), ["POST"]),  # in the class it is no function
    "two locks": (ByTwoDecorators.as_view(), ["POST"]),
    "class and method": (ByClassAndMethod.as_view(), ["POST"]),
    "partial": (partial(locked(partial(pay, None))), ["POST"]),
    "one lock twice": (OneLockTwice.as_view({"post": "update"}), ["POST"]),
    "method of WebDAV": (Finds.as_view(), ["PROPFIND"]),
    "method of WebDAV below a decorator": (FindsBelow.as_view(), ["PROPFIND"]),
    "action that only reads": (Reads.as_view({"get": "export"}), ["GET"]),  # nothing else could be meant
    "URL of a set of views": (locked(Plain.as_view({"post": "create"})), ["POST"]),  # it names a method that it wraps
}


def findings():
    return [each for each in run_checks(tags=["urls"]) if each.id == "redlock.E013"]


@TWO_DATABASES
@pytest.mark.parametrize("name", WAYS)
def test_method_is_locked_on_every_way_to_it(settings, api, order, atomic_requests, seen_at_release, name):
    """The frameworks' own methods call a locked one, and so do methods that override one: the lock is around them."""
    view, methods = WAYS[name]
    settings.ROOT_URLCONF = (path("<int:pk>/", view),)
    inside = []
    during(lambda: inside.append((paid_as_others_see(), connections["warehouse"].in_atomic_block)))
    assert findings() == []

    for method in methods:
        order.paid = False
        order.save()
        assert api.generic(method, "/7/").status_code == 200
    with lock("view:order:7"):
        assert [api.generic(method, "/7/").status_code for method in methods] == [409] * len(methods)

    assert inside == [(False, True)] * len(methods)
    assert set(seen_at_release[: len(methods)]) == {True}


class HiddenFromItsClass(Changes, ModelViewSet):
    @method_decorator(never_cache)
    @locked
    def update(self, request, *args, **kwargs):
        return Response()

    def partial_update(self, request, *args, **kwargs):
        save_as_paid(7)
        return super().partial_update(request, *args, **kwargs)


class HiddenForm(FormView):
    @method_decorator(csrf_exempt)
    @locked
    def post(self, request, pk):
        return HttpResponse()

    def put(self, request, *args, **kwargs):
        save_as_paid(7)
        return super().put(request, *args, **kwargs)


class Dispatches:
    def dispatch(self, request, *args, **kwargs):
        save_as_paid(7)
        return super().dispatch(request, *args, **kwargs)


class DispatchesForm(Dispatches, HiddenForm): ...


class DispatchesTwice(Dispatches, ByView): ...


class DispatchesOneFunction(Dispatches, ByOneFunction): ...


class HiddenPost(View):
    post = method_decorator(never_cache)(locked(pay))


@locked
class WholeClass(View):
    post = pay


class HiddenByDispatch(WholeClass):
    def dispatch(self, request, *args, **kwargs):
        return super().dispatch(request, *args, **kwargs)


class HiddenByName(HiddenPost):
    def post(self, request, pk):
        return HiddenPost.post(self, request, pk)


class HiddenByCall(ByFramework):
    def partial_update(self, request, pk):
        return self.update(request, pk=pk)


class HiddenAction(ViewSet):
    pay = an_action(locked(handler("pay")))

    def create(self, request, pk):
        return self.pay(request, pk=pk)


@TWO_DATABASES
@pytest.mark.parametrize(
    ("view", "method", "hider"),
    [
        (HiddenFromItsClass.as_view({"patch": "partial_update"}), "PATCH", "HiddenFromItsClass.partial_update()"),
        (HiddenForm.as_view(), "PUT", "HiddenForm.put()"),
        (DispatchesForm.as_view(), "POST", "DispatchesForm.dispatch()"),
        (DispatchesTwice.as_view(), "PUT", "DispatchesTwice.dispatch()"),
        (DispatchesOneFunction.as_view(), "PUT", "DispatchesOneFunction.dispatch()"),
        (HiddenByDispatch.as_view(), "POST", "HiddenByDispatch.dispatch()"),
        (HiddenByName.as_view(), "POST", "HiddenByName.post()"),
        (HiddenByCall.as_view({"post": "partial_update"}), "POST", "HiddenByCall.partial_update()"),
        (HiddenAction.as_view({"post": "create"}), "POST", "HiddenAction.create()"),
        (ByProject.as_view({"post": "pay"}), "POST", None),  # the check does not know every call
    ],
)
def test_method_that_hides_the_lock_is_refused_under_atomic_requests(
    settings, api, order, monkeypatch, view, method, hider
):
    """What it changed is rolled back, and a check says where to put the lock; else nothing is wrong."""
    settings.ROOT_URLCONF = (path("<int:pk>/", view),)
    assert api.generic(method, "/7/").status_code == 200
    assert findings() == []
    with lock("view:order:7"):
        assert api.generic(method, "/7/").status_code == 409
    order.save()
    monkeypatch.setitem(connections.settings["warehouse"], "ATOMIC_REQUESTS", True)

    with pytest.raises(RuntimeError, match=r"is inside a transaction.* put @locked_view on what the URL leads to"):
        api.generic(method, "/7/")

    assert not paid_as_others_see()
    found = [each for each in findings() if f".{hider} hides the @locked_view" in each.msg]
    owner, _, name = str(hider).partition(".")
    where = f"the class {owner}" if name == "dispatch()" else hider
    assert [f"{where} as well" in each.hint for each in found] == ([] if hider is None else [True])


@locked
class LockedDjangoView(View):
    post = fail


class WithoutTheLock(LockedDjangoView):
    dispatch = View.dispatch


class BesideTheLock(APIView, LockedDjangoView): ...


class LockedPage(LogoutView):
    get = method_decorator(locked)(handler("get"))
    get_success_url = fail


class OwnPost(HiddenPost):
    post = fail


class OwnDispatch(LockedDjangoView):
    dispatch = fail


class OwnDispatchOfAMethod(HiddenPost):
    dispatch = fail


class OwnAction(HiddenFromItsClass):
    update = fail
    partial_update = ModelViewSet.partial_update


@TWO_DATABASES
@pytest.mark.parametrize(
    "view", [WithoutTheLock, BesideTheLock, LockedPage, OwnPost, OwnDispatch, OwnDispatchOfAMethod, OwnAction]
)
def test_view_that_does_not_reach_a_lock_keeps_its_transaction(settings, api, order, atomic_requests, leases, view):
    """Another ``dispatch()`` or handler comes first, and only names, inherits or replaces the locked one."""
    actions = ({"post": "update"},) if view is OwnAction else ()
    settings.ROOT_URLCONF = (path("<int:pk>/", view.as_view(*actions)),)

    with pytest.raises(ZeroDivisionError):
        api.post("/7/")

    assert (leases, paid_as_others_see(), findings()) == ([], False, [])


class OneAction(ViewSet):
    pay = an_action(locked(handler("pay")))

    def list(self, request): ...


class OneMethod(ViewSet):
    update = locked(handler("update"))

    def create(self, request): ...


@locked_view("user")
class WholeSet(ViewSet):
    update = handler("update")

    @action(detail=False)
    def me(self, request): ...


@locked_view("user")
class Base(ViewSet): ...


class ReadsOfBase(Base):
    def list(self, request): ...


class WritesOfBase(Base):
    def create(self, request): ...


@locked
class ByNumber(ViewSet):
    update = handler("update")

    def list(self, request): ...

    def create(self, request): ...


@locked_view(["user", "kwarg:pk"])
class ByName(ViewSet):
    lookup_field = "name"

    def update(self, request, name): ...

    def partial_update(self, request, name): ...


@pytest.mark.parametrize(
    ("prefix", "views", "found"),
    [
        ("orders", [OneAction], []),
        ("orders", [OneMethod], []),
        ("orders", [WholeSet], []),
        ("orders", [ReadsOfBase, WritesOfBase], []),
        ("orders", [ReadsOfBase], [("W014", "ReadsOfBase never locks")]),
        (
            "orders",
            [ByNumber],
            [("W015", "POST to the URL pattern '^orders/$' fails", "ByNumber needs the argument 'pk'")],
        ),
        ("orders", [ByName], [("W015", "PUT to the URL pattern '^orders/(?P<name>[^/.]+)/$' fails", "ByName needs")]),
        (r"shops/(?P<pk>\d+)/orders", [ByName], []),
    ],
)
def test_lock_that_no_request_takes_or_can_take_is_found_by_a_check(settings, prefix, views, found):
    """A lock is of use if requests to any URL of a set, or of a subclass, take it; some URLs lack its argument."""
    router = SimpleRouter()
    for view in views:
        router.register(prefix, view, basename=view.__name__)
    settings.ROOT_URLCONF = (path("", include(router.urls)),)

    messages = run_checks(tags=["urls"])

    assert [each.id for each in messages] == [f"redlock.{code}" for code, *_ in found]
    for each, (_, *parts) in zip(messages, found, strict=True):
        assert [part for part in parts if part not in each.msg] == []


def test_function_whose_lock_no_request_takes_is_found_by_a_check(settings):
    settings.ROOT_URLCONF = (path("", locked_view("order")(api_view(["GET"])(lambda request: Response()))),)

    assert [each.id for each in run_checks(tags=["urls"])] == ["redlock.W014"]


def test_argument_of_a_key_may_come_from_anywhere_in_the_urls(settings):
    """An enclosing pattern, the pattern's own arguments, the default of a parameter, or a group without a name."""

    @locked_view("shop:{shop}:{pk}")
    class Pay(APIView):
        def post(self, request, shop, pk): ...

    class Send(APIView):
        @locked_view("order:{pk}:{kind}")
        def post(self, request, pk, kind="letter"): ...

    inner = include([path("pay/", Pay.as_view(), {"pk": 7})])
    settings.ROOT_URLCONF = (
        path("<int:shop>/", inner),
        path("send/<int:pk>/", Send.as_view()),
        re_path(r"^send/old/(\d+)/$", Send.as_view()),
    )

    assert run_checks(tags=["urls"]) == []


def test_forgotten_key_is_found_whatever_is_around_the_decorator(settings):
    """The decorators of the framework fail with the remedy; a method is found by the check and by the first request."""
    for around in (api_view(["POST"]), action(detail=True, methods=["post"])):
        with pytest.raises(AttributeError, match="@locked_view needs a key in parentheses"):
            around(locked_view(lambda request, pk: Response()))

    class Pay(APIView):
        @locked_view
        def post(self, request): ...

    class Orders(ViewSet):
        @locked_view
        def update(self, request, pk): ...

    settings.ROOT_URLCONF = (path("pay/", Pay.as_view()), path("orders/", Orders.as_view({"put": "update"})))
    assert [each.id for each in run_checks(tags=["urls"])] == ["redlock.E012", "redlock.E012"]
    with pytest.raises(TypeError, match="needs a key in parentheses"):
        Pay.as_view()(APIRequestFactory().post("/"))


# Errors


@pytest.mark.parametrize("renderer", [JSONRenderer, StaticHTMLRenderer])
def test_error_of_a_lock_inside_is_answered_by_the_handler(api, settings, monkeypatch, renderer):
    """Our handler answers errors of a lock inside a view, in JSON whatever else the view writes; others it leaves."""
    assert exception_handler(StaleTokenError("order:7", 3), {}).status_code == 409
    assert exception_handler(ZeroDivisionError(), {}) is None
    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": HANDLER}
    monkeypatch.setattr(pay_inside.cls, "renderer_classes", [renderer])

    with lock("inside"):
        taken = api.post("/pay-inside/")
    for node in locks["default"].nodes[:2]:
        node.down = True
    unknown = api.post("/pay-inside/")

    assert (taken.status_code, taken["Content-Type"]) == (409, "application/problem+json")
    assert taken.json()["title"] == "Already in progress"
    assert int(taken["Retry-After"]) >= 1
    assert taken["Cache-Control"] == "no-store"
    assert (unknown.status_code, unknown["Retry-After"]) == (503, "5")
