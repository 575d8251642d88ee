"""The shop's interface for programs: views of Django REST framework under locks."""

from typing import Any

from django.contrib.auth.models import User
from django.db import connections
from django.urls import include, path
from django.utils.decorators import method_decorator
from rest_framework.authentication import BaseAuthentication
from rest_framework.decorators import action, api_view, authentication_classes
from rest_framework.exceptions import AuthenticationFailed, ValidationError
from rest_framework.permissions import IsAuthenticated
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from django_redlock import lock, locked_view

from .views import save_as_paid


class ByToken(BaseAuthentication):
    """Knows the user only inside the framework: the token is the user's primary key."""

    def authenticate(self, request: Any) -> Any:
        token = request.headers.get("X-Token")
        if token is None:
            return None
        if not token.isdigit():
            raise AuthenticationFailed
        return User(pk=int(token)), None


@locked_view("order:{pk}")
class Pay(APIView):
    def get(self, request: Any, pk: int) -> Response:
        return Response({"form": True})

    def post(self, request: Any, pk: int) -> Response:
        save_as_paid(pk)
        return Response({"paid": True})

    def put(self, request: Any, pk: int) -> Response:
        save_as_paid(pk)
        raise ValidationError("no")


@method_decorator(locked_view("order:{pk}"), name="dispatch")
class PayByDispatch(APIView):
    def post(self, request: Any, pk: int) -> Response:
        return Response()


@locked_view("user")
class Mine(APIView):
    authentication_classes = (ByToken,)
    permission_classes = (IsAuthenticated,)

    def post(self, request: Any) -> Response:
        return Response({"user": request.user.pk})


@locked_view(["order", "post:order"])
class Posted(APIView):
    def post(self, request: Any) -> Response:
        return Response()


@locked_view(lambda request: request.data["order"])
class Called(APIView):
    def post(self, request: Any) -> Response:
        return Response()


@locked_view("order:{pk}", on_busy=423)
class Orders(ViewSet):
    def update(self, request: Any, pk: str) -> Response:
        return Response({"updated": pk})

    @action(detail=True, methods=["post"])
    def pay(self, request: Any, pk: str) -> Response:
        save_as_paid(int(pk))
        return Response({"paid": pk})


class Baskets(ViewSet):
    """Two actions with a lock each; the others have none, and "{pk}" is no argument of some."""

    authentication_classes = (ByToken,)

    def list(self, request: Any) -> Response:
        return Response({"inside": connections["warehouse"].in_atomic_block})

    def create(self, request: Any) -> Response:
        return Response({"inside": connections["warehouse"].in_atomic_block})

    @action(detail=True, methods=["post"])
    @locked_view("order:{pk}")
    def pay(self, request: Any, pk: str) -> Response:
        save_as_paid(int(pk))
        return Response({"paid": pk})

    @locked_view("{request.user.pk}:{pk}", on_busy=423)
    @action(detail=True, methods=["post", "put"])
    def send(self, request: Any, pk: str) -> Response:
        save_as_paid(int(pk))
        if request.method == "PUT":
            raise ValidationError("no")
        return Response({"sent": pk})


class PayByMethod(APIView):
    def delete(self, request: Any, pk: int) -> Response:
        return Response()

    @locked_view("order:{pk}")
    def post(self, request: Any, pk: int) -> Response:
        save_as_paid(pk)
        return Response({"paid": True})


@api_view(["POST"])
@authentication_classes([ByToken])
@locked_view("{request.user.pk}:{pk}")
def pay_below(request: Any, pk: int) -> Response:
    save_as_paid(pk)
    return Response({"paid": True})


@locked_view("order:{pk}")
@api_view(["POST", "PUT"])
def pay_above(request: Any, pk: int) -> Response:
    save_as_paid(pk)
    if request.method == "PUT":
        raise ValidationError("no")
    return Response({"paid": True})


@api_view(["POST"])
def pay_inside(request: Any) -> Response:
    with lock("inside", wait=0):
        return Response({"paid": True})


router = SimpleRouter()
router.register("orders", Orders, basename="order")
router.register("baskets", Baskets, basename="basket")

urlpatterns = [
    path("", include(router.urls)),
    path("pay/<int:pk>/", Pay.as_view()),
    path("pay-dispatch/<int:pk>/", PayByDispatch.as_view()),
    path("pay-by-method/<int:pk>/", PayByMethod.as_view()),
    path("mine/", Mine.as_view()),
    path("posted/", Posted.as_view()),
    path("called/", Called.as_view()),
    path("pay-below/<int:pk>/", pay_below),
    path("pay-above/<int:pk>/", pay_above),
    path("pay-inside/", pay_inside),
]
