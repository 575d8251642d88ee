"""``locked_view`` and Django REST framework: the user is known under the lock, and errors are problem details."""

import json
from functools import partial, wraps
from types import SimpleNamespace

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.views import LogoutView
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
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
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.test import APIClient, APIRequestFactory
from rest_framework.views import APIView
from rest_framework.viewsets import ModelViewSet, ViewSet

from django_redlock import StaleTokenError, lock, locked_view, locks
from django_redlock.contrib.rest_framework import exception_handler
from tests.shop.helpers import during, is_free, paid_as_others_see
from tests.shop.models import Order
from tests.shop.views import save_as_paid

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


class AsyncAPIView(APIView):
    """Asynchronous as in adrf, whose handlers may be coroutine functions, and whose dispatch() is none itself."""

    authentication_classes = permission_classes = ()

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


@locked_view(["order", "post:order"])
class AsyncPay(AsyncAPIView):
    async def post(self, request):
        return Response({"free": is_free("view:order:post:order:7")})


class AsyncPayByMethod(AsyncAPIView):
    @locked_view(["order", "post:order"])
    async def post(self, request):
        return Response({"free": is_free("view:order:post:order:7")})


@pytest.mark.parametrize("pay", [AsyncPay, AsyncPayByMethod])
async def test_asynchronous_class_is_locked(pay):
    """The lock is held while the coroutine runs; a request without a value for the key gets the framework's 400."""
    ask = partial(APIRequestFactory().post, "/", format="json")

    assert (await pay.as_view()(ask({"order": 7}))).data == {"free": False}
    async with lock("view:order:post:order:7"):
        taken = await pay.as_view()(ask({"order": 7}))
    assert (taken.status_code, taken["Content-Type"]) == (409, "application/problem+json")
    assert (await pay.as_view()(ask({}))).data == {"detail": "the client sent no order"}


# Transactions


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize(
    "path",
    [
        *("/pay/7/", "/orders/7/pay/", "/pay-above/7/", "/pay-below/7/"),
        *("/baskets/7/pay/", "/baskets/7/send/", "/pay-by-method/7/"),
    ],
)
def test_lock_is_released_after_the_commit_of_the_request(api, order, atomic_requests, seen_at_release, path):
    """Under ATOMIC_REQUESTS another connection sees the change, or the rollback, when the lock is free."""
    inside = []
    during(lambda: inside.append((paid_as_others_see(), connections["warehouse"].in_atomic_block)))

    if path in ("/pay/7/", "/pay-above/7/", "/baskets/7/send/"):
        assert api.put(path, headers={"x-token": "42"}).status_code == 400
        assert (inside.pop(), seen_at_release.pop()) == ((False, True), False)
    assert api.post(path, headers={"x-token": "42"}).status_code == 200

    assert (inside, seen_at_release) == ([(False, True)], [True])


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
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
        authentication_classes = permission_classes = ()

        def create(self, request, pk):
            return Response()

        create = create if whole else locked_view("order:{pk}")(create)

    class Forbidden(ViewSet):
        def initial(self, request, *args, **kwargs):
            raise PermissionDenied

    class Both(locked_view("order:{pk}")(Pay) if whole else Pay, Forbidden):
        pass

    assert Both.as_view({"post": "create"})(APIRequestFactory().post("/"), pk=7).status_code == 403


def test_lock_of_an_action_that_cannot_work_is_found_when_the_class_is_made():
    """A key that the action can never resolve, and a method that gets no request, are errors at import."""
    with pytest.raises((ImproperlyConfigured, RuntimeError)) as wrong:

        class Orders(ViewSet):
            @action(detail=True, methods=["post"])
            @locked_view("order:{kp}")
            def pay(self, request, pk): ...

    assert "Orders.pay, key 'order:{kp}': '{kp}' names no argument of the view" in messages(wrong.value)
    with pytest.raises((TypeError, RuntimeError)) as wrong:

        class Helpers(View):
            @locked_view("user")
            def helper(self, order): ...

    assert "Helpers.helper() handles no request. Decorate the class, or" in messages(wrong.value)
    with pytest.raises((TypeError, RuntimeError)) as wrong:

        class Mixin:
            @action(detail=True, methods=["post"])
            @locked_view("order:{pk}")
            def pay(self, request, pk): ...

    assert "Mixin.pay(): Mixin is not a view class. Let it inherit from one" in messages(wrong.value)


def messages(error):
    """Return what an error says, and what Python 3.11 makes its cause."""
    return f"{error} {error.__cause__}"


def of_api_view(name):
    class Pay(APIView):
        vars()[name] = locked_view("orders")(lambda self, request: Response())


def of_generic_view(name):
    class Pay(UpdateAPIView):
        vars()[name] = locked_view("orders")(lambda self, request: Response())


@pytest.mark.parametrize("of", [of_api_view, of_generic_view])
@pytest.mark.parametrize("name", ["dispatch", "initial", "perform_update", "get_queryset"])
def test_method_that_handles_no_request_is_refused(of, name):
    """The framework calls such a method for another purpose, so that a lock of it would not be that of the request."""
    with pytest.raises((TypeError, RuntimeError)) as wrong:
        of(name)

    assert f"Pay.{name}() handles no request. Decorate the class" in messages(wrong.value)


def keeping(view):
    """A decorator of the project, which hides the lock below it from the class."""

    @wraps(view)
    def wrapper(*args, **kwargs):
        return view(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("name", ["initial", "perform_update", "check_permissions", "initialize_request"])
@pytest.mark.parametrize("by", ["decorator of the method", "method_decorator", "decorator of the class"])
def test_method_that_handles_no_request_is_found_by_a_check(settings, name, by):
    """The class did not see the lock, so nothing was refused when it was made."""

    class Pay(UpdateAPIView):
        method = locked_view("orders")(lambda self, request: Response())
        if by != "decorator of the class":
            vars()[name] = {"method_decorator": method_decorator(never_cache)}.get(by, keeping)(method)
        del method

    if by == "decorator of the class":
        Pay = method_decorator(locked_view("orders"), name=name)(Pay)
    settings.ROOT_URLCONF = (path("<int:pk>/", Pay.as_view()),)

    [found] = run_checks(tags=["urls"])
    assert (found.id, f"Pay.{name}() handles no request. Decorate the class" in found.msg) == ("redlock.E014", True)


# Every way to a locked method


class Changes:
    authentication_classes = permission_classes = ()

    def get_serializer(self, *args, **kwargs):
        return SimpleNamespace(data={}, is_valid=lambda raise_exception: True)

    def get_object(self):
        return SimpleNamespace()

    def perform_update(self, serializer):
        save_as_paid(7)


class ByFramework(Changes, ModelViewSet):
    @locked_view("order:{pk}")
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
    @locked_view("order:{pk}")
    def update(self, request, *args, **kwargs):
        return super().update(request, *args, **kwargs)


class ByForm(FormView):
    @locked_view("order:{pk}")
    def post(self, request, pk):
        return save_as_paid(pk)


class ByOneFunction(APIView):
    authentication_classes = permission_classes = ()

    @locked_view("order:{pk}")
    def post(self, request, pk):
        save_as_paid(pk)
        return Response()

    put = post


class ByTwoDecorators(APIView):
    authentication_classes = permission_classes = ()

    @locked_view("shop")
    @locked_view("order:{pk}")
    def post(self, request, pk):
        save_as_paid(pk)
        return Response()


WAYS = {
    "framework": (ByFramework.as_view({"put": "update", "patch": "partial_update"}), ["PUT", "PATCH"]),
    "project": (ByProject.as_view({"put": "update", "patch": "partial_update"}), ["PUT", "PATCH"]),
    "view": (ByView.as_view(), ["PUT", "PATCH"]),
    "form": (csrf_exempt(ByForm.as_view()), ["POST", "PUT"]),
    "two names": (ByOneFunction.as_view(), ["POST", "PUT"]),
    "two locks": (ByTwoDecorators.as_view(), ["POST"]),
}


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize("name", WAYS)
def test_method_is_locked_on_every_way_to_it(settings, api, order, atomic_requests, seen_at_release, leases, name):
    """The frameworks' own methods call a locked one, and so do methods that override one: the lock is around them."""
    view, methods = WAYS[name]
    settings.ROOT_URLCONF = (path("<int:pk>/", view),)
    inside = []
    during(lambda: inside.append((paid_as_others_see(), connections["warehouse"].in_atomic_block)))

    for method in methods:
        order.paid = False
        order.save()
        assert api.generic(method, "/7/").status_code == 200
    with lock("view:order:7"):
        assert [api.generic(method, "/7/").status_code for method in methods] == [409] * len(methods)

    assert inside == [(False, True)] * len(methods)
    assert set(seen_at_release[: len(methods)]) == {True}


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
def test_method_of_the_project_that_calls_a_locked_one(settings, api, order, monkeypatch):
    """It is not locked itself: the lock is taken when the locked method is called, which must be in no transaction."""
    settings.ROOT_URLCONF = (path("<int:pk>/", ByProject.as_view({"post": "pay"})),)

    assert api.post("/7/").status_code == 200
    with lock("view:order:7"):
        assert api.post("/7/").status_code == 409
    monkeypatch.setitem(connections.settings["warehouse"], "ATOMIC_REQUESTS", True)
    with pytest.raises(RuntimeError, match=r"ByFramework\.update is inside a transaction"):
        api.post("/7/")


class HiddenFromItsClass(Changes, ModelViewSet):
    @method_decorator(never_cache)
    @locked_view("order:{pk}")
    def update(self, request, *args, **kwargs):
        raise ZeroDivisionError

    def partial_update(self, request, *args, **kwargs):
        save_as_paid(7)
        return super().partial_update(request, *args, **kwargs)


class HiddenForm(FormView):
    @method_decorator(csrf_exempt)
    @locked_view("order:{pk}")
    def post(self, request, pk):
        raise ZeroDivisionError

    def put(self, request, *args, **kwargs):
        save_as_paid(7)
        return super().put(request, *args, **kwargs)


class Dispatches:
    def dispatch(self, request, *args, **kwargs):
        save_as_paid(7)
        return super().dispatch(request, *args, **kwargs)


class DispatchesForm(Dispatches, HiddenForm): ...


class DispatchesTwice(Dispatches, ByView):
    perform_update = Changes.get_object


class DispatchesOneFunction(Dispatches, ByOneFunction): ...


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize(
    ("view", "method", "hider"),
    [
        (HiddenFromItsClass.as_view({"patch": "partial_update"}), "PATCH", "HiddenFromItsClass.partial_update()"),
        (csrf_exempt(HiddenForm.as_view()), "PUT", "HiddenForm.put()"),
        (csrf_exempt(DispatchesForm.as_view()), "POST", "DispatchesForm.dispatch()"),
        (DispatchesTwice.as_view(), "PUT", "DispatchesTwice.dispatch()"),
        (DispatchesOneFunction.as_view(), "PUT", "DispatchesOneFunction.dispatch()"),
    ],
)
def test_what_a_method_changes_before_a_hidden_lock_is_rolled_back(
    settings, api, order, atomic_requests, view, method, hider
):
    """The transaction is not left to a lock that comes later: the lock refuses it, and a check says where to put it."""
    settings.ROOT_URLCONF = (path("<int:pk>/", view),)

    with pytest.raises(RuntimeError, match="is inside a transaction"):
        api.generic(method, "/7/")

    assert not paid_as_others_see()
    found = run_checks(tags=["urls"])
    assert {each.id for each in found} == {"redlock.E013"}
    assert any(f".{hider} hides the @locked_view" in each.msg for each in found)


@locked_view("order:{pk}")
class LockedDjangoView(View):
    def post(self, request, pk):
        save_as_paid(pk)
        raise ZeroDivisionError


class WithoutTheLock(LockedDjangoView):
    dispatch = View.dispatch


class BesideTheLock(APIView, LockedDjangoView):
    authentication_classes = permission_classes = ()


class LockedPage(LogoutView):
    @method_decorator(locked_view("order:{pk}"))
    def get(self, request, pk): ...

    def get_success_url(self):
        save_as_paid(7)
        raise ZeroDivisionError


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize("view", [WithoutTheLock, BesideTheLock, LockedPage])
def test_view_that_does_not_reach_a_lock_keeps_its_transaction(settings, api, order, atomic_requests, leases, view):
    """Another ``dispatch()`` or handler of the framework comes first, and only names or inherits the locked one."""
    settings.ROOT_URLCONF = (path("<int:pk>/", view.as_view()),)

    with pytest.raises(ZeroDivisionError):
        api.post("/7/")

    assert (leases, paid_as_others_see()) == ([], False)


class HiddenPost(View):
    @method_decorator(never_cache)
    @locked_view("order:{pk}")
    def post(self, request, pk):
        return HttpResponse()


class OwnPost(HiddenPost):
    def post(self, request, pk):
        return HttpResponse("own")


class OwnDispatch(LockedDjangoView):
    def dispatch(self, request, pk):
        return HttpResponse("own")


class OwnDispatchOfAMethod(HiddenPost):
    dispatch = OwnDispatch.dispatch


class OwnAction(HiddenFromItsClass):
    def update(self, request, *args, **kwargs):
        return Response("own")

    partial_update = ModelViewSet.partial_update


class OneLockTwice(HiddenFromItsClass):
    @locked_view("order:{pk}")
    def partial_update(self, request, pk):
        return self.update(request, pk=pk)

    def update(self, request, pk):
        return Response(Order.objects.filter(pk=pk).update(paid=True))

    update = locked_view("order:{pk}")(update)


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize(
    "view",
    [
        *(OwnPost.as_view(), OwnDispatch.as_view(), OwnDispatchOfAMethod.as_view()),
        *(OwnAction.as_view({"post": "update"}), OneLockTwice.as_view({"post": "partial_update"})),
    ],
)
def test_method_that_does_not_call_the_locked_one_is_no_finding(settings, api, order, atomic_requests, view):
    """What replaces a locked method hides nothing, and neither does one with the same lock: its requests succeed."""
    settings.ROOT_URLCONF = (path("<int:pk>/", view),)

    assert api.post("/7/").status_code == 200
    assert [each.msg for each in run_checks(tags=["urls"]) if each.id == "redlock.E013"] == []


class HiddenByName(HiddenPost):
    def post(self, request, pk):
        return HiddenPost.post(self, request, pk)


class HiddenByCall(ByFramework):
    def partial_update(self, request, pk):
        return self.update(request, pk=pk)


class HiddenAction(ViewSet):
    authentication_classes = permission_classes = ()

    def create(self, request, pk):
        return self.pay(request, pk=pk)

    @action(detail=True, methods=["post"])
    @locked_view("order:{pk}")
    def pay(self, request, pk):
        return Response()


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize(
    ("view", "hider"),
    [
        (HiddenByName.as_view(), "HiddenByName.post()"),
        (HiddenByCall.as_view({"post": "partial_update"}), "HiddenByCall.partial_update()"),
        (HiddenAction.as_view({"post": "create"}), "HiddenAction.create()"),
    ],
)
def test_method_that_calls_the_locked_one_is_found_by_a_check(settings, api, order, monkeypatch, view, hider):
    """By its name, or as another method: under ATOMIC_REQUESTS each request fails; otherwise nothing is wrong."""
    settings.ROOT_URLCONF = (path("<int:pk>/", view),)
    assert api.post("/7/").status_code == 200
    assert run_checks(tags=["urls"]) == []

    monkeypatch.setitem(connections.settings["warehouse"], "ATOMIC_REQUESTS", True)

    with pytest.raises(RuntimeError, match="is inside a transaction"):
        api.post("/7/")
    [found] = run_checks(tags=["urls"])
    assert (found.id, f".{hider} hides the @locked_view" in found.msg) == ("redlock.E013", True)


def find(self, request, pk):
    return save_as_paid(pk)


class Finds(View):
    http_method_names = ["propfind"]
    propfind = locked_view("order:{pk}")(find)


class FindsBelow(View):
    http_method_names = ["propfind"]
    propfind = method_decorator(never_cache)(locked_view("order:{pk}")(find))


@pytest.mark.django_db(transaction=True, databases=["default", "warehouse"])
@pytest.mark.parametrize("view", [Finds, FindsBelow])
def test_method_that_a_class_adds_to_the_usual_ones_is_locked(
    settings, client, order, atomic_requests, seen_at_release, view
):
    """A class may list more HTTP methods, as WebDAV has them; the lock and the transaction are those of any other."""
    settings.ROOT_URLCONF = (path("<int:pk>/", view.as_view()),)
    assert run_checks(tags=["urls"]) == []

    assert client.generic("PROPFIND", "/7/").status_code == 200
    with lock("view:order:7"):
        assert client.generic("PROPFIND", "/7/").status_code == 409
    assert seen_at_release[:1] == [True]


def test_handler_may_be_a_property(settings, client):
    """The check looks at the class, where a property is no function."""

    @locked_view("order:{pk}")
    class Pay(View):
        @property
        def post(self):
            return lambda request, pk: HttpResponse()

    settings.ROOT_URLCONF = (path("<int:pk>/", Pay.as_view()),)

    assert run_checks(tags=["urls"]) == []
    assert client.post("/7/").status_code == 200


def test_action_that_only_reads_is_locked_as_well(api):
    """A decorated method is locked for all requests that it handles, as nothing else could be meant."""

    class Reports(ViewSet):
        authentication_classes = permission_classes = ()

        @action(detail=True)
        @locked_view("report:{pk}")
        def export(self, request, pk):
            return Response()

    ask = partial(Reports.as_view({"get": "export"}), APIRequestFactory().get("/"), pk=7)
    assert ask().status_code == 200
    with lock("view:report:7"):
        assert ask().status_code == 409
    with pytest.raises(ValueError, match=r"methods=\['POST'\] leaves out GET, so get\(\) is not locked"):

        class Never(View):
            @locked_view("order", methods=["POST"])
            def get(self, request): ...


def test_class_whose_lock_no_request_takes_is_found_by_a_check(settings):
    """By default GET takes no lock, so a class that handles nothing else is never locked."""

    @locked_view("order")
    class Reads(APIView):
        def get(self, request): ...

    @locked_view("order")
    class Writes(APIView):
        def post(self, request): ...

    reads = locked_view("order")(api_view(["GET"])(lambda request: Response()))
    settings.ROOT_URLCONF = (path("a/", Reads.as_view()), path("b/", Writes.as_view()), path("c/", reads))

    found = [each.msg for each in run_checks(tags=["urls"]) if each.id == "redlock.W014"]

    assert ["Reads never locks" in each for each in found] == [True, False]


class OneAction(ViewSet):
    def list(self, request): ...

    @action(detail=True, methods=["post"])
    @locked_view("order:{pk}")
    def pay(self, request, pk): ...


class OneMethod(ViewSet):
    def create(self, request): ...

    @locked_view("order:{pk}")
    def update(self, request, pk): ...


@locked_view("user")
class WholeSet(ViewSet):
    def update(self, request, pk): ...

    @action(detail=False)
    def me(self, request): ...


@locked_view("user")
class Base(ViewSet): ...


class Reads(Base):
    def list(self, request): ...


class Writes(Base):
    def create(self, request): ...


@pytest.mark.parametrize("views", [[OneAction], [OneMethod], [WholeSet], [Reads, Writes]])
def test_lock_that_requests_to_another_url_take_is_no_finding(settings, views):
    """A ViewSet has several URLs, and its subclasses have more: a lock is of use if a request to one takes it."""
    router = SimpleRouter()
    for number, view in enumerate(views):
        router.register(f"orders-{number}", view, basename=f"order-{number}")
    settings.ROOT_URLCONF = tuple(router.urls)

    assert [each.msg for each in run_checks(tags=["urls"])] == []


@locked_view("order:{pk}")
class ByNumber(ViewSet):
    def list(self, request): ...

    def create(self, request): ...

    def update(self, request, pk): ...


@locked_view(["user", "kwarg:pk"])
class ByName(ViewSet):
    lookup_field = "name"

    def update(self, request, name): ...

    def partial_update(self, request, name): ...


@pytest.mark.parametrize(
    ("prefix", "view", "found"),
    [
        ("orders", ByNumber, [("'^orders/$'", "POST")]),
        ("orders", ByName, [("'^orders/(?P<name>[^/.]+)/$'", "PUT")]),
        (r"shops/(?P<pk>\d+)/orders", ByName, []),
        ("orders", OneMethod, []),
        ("orders", WholeSet, []),
    ],
)
def test_url_without_an_argument_of_the_key_is_found_by_a_check(settings, prefix, view, found):
    """Its requests would fail, as those of create() do if the key has the primary key; one warning is enough."""
    router = SimpleRouter()
    router.register(prefix, view, basename="order")
    settings.ROOT_URLCONF = (path("", include(router.urls)),)

    messages = [each.msg for each in run_checks(tags=["urls"]) if each.id == "redlock.W015"]

    assert len(messages) == len(found)
    for message, (pattern, method) in zip(messages, found, strict=True):
        assert f"{method} to the URL pattern {pattern} fails" in message
        assert f"{view.__name__} needs the argument 'pk'" in message


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
        authentication_classes = permission_classes = ()

        @locked_view
        def post(self, request): ...

    class Orders(ViewSet):
        @locked_view
        def update(self, request, pk): ...

    settings.ROOT_URLCONF = (path("pay/", Pay.as_view()), path("orders/", Orders.as_view({"put": "update"})))
    assert [each.id for each in run_checks(tags=["urls"])] == ["redlock.E012", "redlock.E012"]
    with pytest.raises(TypeError, match="needs a key in parentheses"):
        Pay.as_view()(APIRequestFactory().post("/"))


def test_lock_at_the_url_of_a_set_of_views(api, settings):
    """What ``as_view()`` returns is a view, though that of a ViewSet names a method that it wraps."""

    class Orders(ViewSet):
        authentication_classes = permission_classes = ()

        def create(self, request, pk):
            return Response()

    view = locked_view("order:{pk}")(Orders.as_view({"post": "create"}))
    settings.ROOT_URLCONF = (path("<int:pk>/", view),)

    assert api.post("/7/").status_code == 200
    with lock("view:order:7"):
        assert api.post("/7/").status_code == 409


# Errors


def test_error_of_a_lock_inside_is_answered_by_the_handler(api, settings):
    """Our exception handler answers errors of a lock inside the view, and leaves others to the framework."""
    assert exception_handler(StaleTokenError("order:7", 3), {}).status_code == 409
    assert exception_handler(ZeroDivisionError(), {}) is None
    settings.REST_FRAMEWORK = {"EXCEPTION_HANDLER": HANDLER}

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
