# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""
Code that users write, and code that must be an error: a line with ``type: ignore`` has an error, or mypy and pyright
report the comment.
"""

from collections.abc import Sequence
from typing import Any, assert_type

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand
from django.db import models
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.tasks import TaskContext
from django.views import View

from django_redlock import (
    Lease,
    Lock,
    LockableQuerySet,
    LockManager,
    current_lease,
    fenced,
    lock,
    lock_for_update,
    locked_command,
    locked_view,
    locks,
)
from django_redlock import (
    tasks as of_django,
)
from django_redlock.celery import Return, Singleton, SingletonOptions, SingletonTask, override_singleton, singleton_task
from django_redlock.engine.manager import owner_here
from django_redlock.middleware import locked_paths
from django_redlock.testing import Simulation, memory_nodes
from tests.shop.models import Order, Pallet


def blocks() -> None:
    with lock("a", ttl=10, wait=None) as lease:
        assert_type(lease, Lease)
        assert_type(lease.fencing_token, int)
        assert_type(lease.release() == "released", bool)
    lease.release().upper()
    with lock(["a", "b"], on_commit=True) as lease, fenced(lease, using=["default"]):
        pass
    with lock("a", hold_for=60, hold_on_error=False):
        assert_type(current_lease("a"), Lease)
    found = lock("a").try_acquire()
    assert_type(found, Lease | None)
    if found is not None:
        with found as same:
            assert_type(same, Lease)
    assert_type(locks["default"], LockManager)
    assert_type(locks["default"].lock("a"), Lock)

    lock(7)  # type: ignore[call-overload]
    lock("a", timeout=5)  # type: ignore[call-overload]
    lock("a", wait="5")  # type: ignore[call-overload]
    lock("a", if_taken="ignore")  # type: ignore[call-overload]
    lock("a", release="later")  # type: ignore[call-overload]
    locks["default"].lock("a", if_taken="ignore")  # type: ignore[call-overload]
    owner_here("cron")  # type: ignore[arg-type]
    lock("a").release()  # type: ignore[attr-defined]
    found.release()  # type: ignore[union-attr]
    fenced(lock("a"))  # type: ignore[call-overload]
    fenced(lease, nested=True, margin=1)
    fenced(lease, retries=3, nested=True)  # type: ignore[call-overload]
    lock("a", if_taken="skip", on_commit=True)  # type: ignore[call-overload]
    locks["default"].lock("a", if_taken="skip", cancel_on_lost=True)  # type: ignore[call-overload]


async def tasks() -> None:
    async with lock("a", cancel_on_lost=True) as lease:
        assert_type(lease, Lease)
        assert_type(await lease.arelease() == "released", bool)
    if (found := await lock("a").atry_acquire()) is not None:
        async with found as same:
            assert_type(same, Lease)
    lock("a").aacquire().release()  # type: ignore[attr-defined]


@lock("report", wait=0, using="default", if_taken="skip")
def report(number: int) -> str:
    return str(number)


@locks["default"].lock("count", if_taken="skip")
async def count(number: int) -> int:
    return number


@lock("report")
async def areport(number: int) -> str:
    return str(number)


def decorated() -> None:
    assert_type(report(7), str | None)
    report("7")  # type: ignore[arg-type]
    areport("7")  # type: ignore[arg-type, unused-coroutine]
    areport(7)  # type: ignore[unused-coroutine]


async def acounted() -> None:
    assert_type(await count(7), int | None)
    assert_type(await areport(7), str)


def rows(user: User, users: QuerySet[User]) -> None:
    with lock_for_update(user, wait=5) as one:
        assert_type(one, User)
    with lock_for_update(users, skip_locked=True) as many:
        assert_type(many, list[User])
    lock_for_update(user, skip_locked=True)  # type: ignore[call-overload]
    lock_for_update(users, no_wait=True)  # type: ignore[call-overload]
    lock_for_update(users, nowait="yes")  # type: ignore[call-overload]
    lock_for_update("user")  # type: ignore[type-var]
    lock_for_update(user, nowait=bool(users), of=["groups"])
    lock_for_update(users, nowait=False, skip_locked=False, wait=None)
    lock_for_update(user, nowait=True, wait=3)  # type: ignore[call-overload]
    lock_for_update(users, skip_locked=True, wait=3)  # type: ignore[call-overload]
    lock_for_update([user], nowait=True, skip_locked=True)  # type: ignore[call-overload]


class ParcelQuerySet(LockableQuerySet["Parcel"]):
    def heavy(self) -> "ParcelQuerySet":
        return self.filter(pk__gt=7)


class Parcel(models.Model):  # noqa: DJ008
    objects = ParcelQuerySet.as_manager()


def querysets(lease: Lease) -> None:
    assert_type(Pallet.objects.get(weight=7), Pallet)
    assert_type(Pallet.objects.filter(weight=7).fenced_update(lease, weight=8), int)
    Pallet.objects.fenced_update(lock("a"), weight=8)  # type: ignore[arg-type]
    with Order.objects.redlock_for_update(wait=5) as orders:
        assert_type(orders, list[Order])
    with Order.objects.filter(pk=7).order_by("pk").redlock_for_update(skip_locked=True) as orders:
        assert_type(orders, list[Order])
    with ParcelQuerySet(Parcel).heavy().redlock_for_update() as parcels:
        assert_type(parcels, list[Parcel])
    Order.objects.redlock_for_update(nowait=True, wait=3)  # type: ignore[call-overload]
    Parcel.objects.filter(pk=7).redlock_for_update(skip_locked=True, wait=3)  # type: ignore[call-overload]


@locked_view("order:{pk}", wait=1)
def pay(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse(str(pk))


@locked_view("user", methods=["POST", "PUT"], on_busy=429)
class Pay(View):
    def post(self, request: HttpRequest) -> HttpResponse:
        return pay(request, pk="7")  # type: ignore[arg-type]


@locked_view  # type: ignore[arg-type]
def unfinished(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@locked_view(
    ["ship", lambda request, pk: f"order:{request.user.pk}:{pk}", lambda request, **kwargs: "all"],
    on_busy=lambda request, error: HttpResponse(str(error)),
)
def ship(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse(str(pk))


def of_order(request: HttpRequest, *, pk: int) -> Sequence[str]:
    return ["order", str(pk)]


def views() -> None:
    locked_paths(["/checkout/"], lambda request: request.user.pk)
    locked_paths(["/checkout/"], lambda request: 7)  # type: ignore[arg-type, return-value]
    locked_view(of_order)
    locked_view(lambda request, pk: {pk})  # type: ignore[arg-type]
    locked_view("user", on_busy=404)  # type: ignore[arg-type]
    locked_view("user", methods=["PSOT"])  # type: ignore[list-item]
    locked_view("user", waits=5)  # type: ignore[call-arg]


@locked_command
class Bare(BaseCommand):
    lease: Lease  # what the decorator sets; a decorator cannot tell mypy of an attribute

    def handle(self, *args: Any, **options: Any) -> None:
        self.lease.ensure()


class ByMethod(BaseCommand):
    lease: Lease
    catalogues = 5

    @locked_command
    def handle(self, *args: Any, **options: Any) -> None:
        self.lease.ensure()


@locked_command(["import", lambda **options: str(options["supplier"])], wait=5)
class ByFunctions(ByMethod):
    pass


def commands() -> None:
    locked_command(lambda **options: 7)  # type: ignore[arg-type]
    assert_type(ByFunctions().catalogues, int)
    ByFunctions().handle(supplier=7)


@singleton_task
def import_catalogue(supplier: int) -> str:
    return str(supplier)


@singleton_task(bind=True, lease=30)
def bound(self: SingletonTask[..., Any], supplier: int) -> str:
    assert_type(self.singleton, Singleton[...])
    self.singleton.release()
    self.singleton.check()
    self.singelton.check()  # type: ignore[attr-defined]
    return str(supplier)


def calls() -> None:
    assert_type(import_catalogue(7), str)
    import_catalogue.apply_async_on_commit(args=(7,))
    bound.delay_on_commit(7)
    assert_type(import_catalogue.singleton.is_locked(7), bool)
    assert_type(import_catalogue.singleton.key(supplier=7), str)
    bound.singleton.cancel(7)
    bound.singleton.release(7, force=True)
    bound.singleton.release()
    import_catalogue.singleton.is_locked("7")  # type: ignore[arg-type]
    import_catalogue.singleton.key()  # type: ignore[call-arg]
    import_catalogue.singleton.holder(suplier=7)  # type: ignore[call-arg]
    import_catalogue.singleton.explain(7, 8)  # type: ignore[call-arg]
    bound.singleton.release(7, force=7)  # type: ignore[call-overload]
    import_catalogue("7")  # type: ignore[arg-type]
    import_catalogue.delay_on_comit(7)  # type: ignore[attr-defined]


@singleton_task(
    key=("shop", "since"),
    scope="until_and_while_executing",
    on_duplicate="rerun",
    on_overlap=Return({"skipped": True}),
    on_unavailable={"enqueue": "raise", "run": "fail"},
    hold_for=1.5,
    wait_for=None,
    lease=30,
    queue_ttl=3600.0,
    using="default",
    group="shops",
    version=2,
    redelivery="drop",
    lock_direct_calls=True,
    acks_late=True,
)
def every_option(shop: int, since: int = 0) -> None: ...


@singleton_task(key=lambda call: str(call.arguments["shop"]), on_duplicate="join", on_overlap="wait")
def other_values(shop: int) -> None: ...


def wrong_options() -> None:
    singleton_task(key=7)  # type: ignore[call-overload]
    singleton_task(scope="lifetime")  # type: ignore[call-overload]
    singleton_task(on_duplicate="enqueue")  # type: ignore[call-overload]
    singleton_task(on_overlap="skip")  # type: ignore[call-overload]
    singleton_task(on_unavailable={"run": "publish"})  # type: ignore[call-overload]
    singleton_task(lease=None)  # type: ignore[call-overload]
    singleton_task(bind=True, lock_direct_calls="yes")  # type: ignore[call-overload]
    SingletonOptions(challenge=True)  # type: ignore[call-arg]


@override_singleton(enabled=False)
def without_slots(number: int) -> int:
    return number


def options_of_a_class() -> None:
    assert_type(without_slots(7), int)
    without_slots("7")  # type: ignore[arg-type]
    SingletonOptions(on_duplicate="raise", on_overlap=Return())


@of_django.singleton_task
def refresh(shop: int, deep: bool = False) -> str:
    refresh.singleton.check()
    return f"{shop} {deep}"


@of_django.singleton_task(takes_context=True, key=("shop",), scope="while_executing", queue_name="slow", priority=5)
def refresh_context(context: TaskContext[Any, Any], shop: int) -> int:
    return context.attempt


@of_django.singleton_task(on_duplicate="skip", on_unavailable={"enqueue": "raise", "run": "fail"}, backend="b")
async def refresh_later(shop: int) -> None: ...


def testing() -> None:
    node = memory_nodes("default")[0]
    node.down = node.silent = node.deaf = True
    node.store.skew = 5
    simulated = Simulation().nodes[0]
    simulated.down = simulated.silent = simulated.deaf = True
    simulated.step_clock(3600)


async def enqueueing() -> None:
    result = refresh.enqueue(7)
    assert_type(result.return_value, str)
    assert_type(result.duplicate, bool)
    assert_type(result.holder_id, str | None)
    assert_type((await refresh.aenqueue(shop=7, deep=True)).return_value, str)
    assert_type(refresh_context.enqueue(7).return_value, int)
    await refresh_later.aenqueue(7)
    refresh.using(on_duplicate="raise", priority=3).enqueue(7)
    assert_type(refresh.singleton.cancel(shop=7), str | None)
    refresh.enqueue("7")  # type: ignore[arg-type]
    refresh_context.enqueue(7, 8)  # type: ignore[call-arg]
    refresh.using(on_duplicate="rerun")  # type: ignore[arg-type]
    refresh.singleton.holder("7")  # type: ignore[arg-type]
    of_django.singleton_task(on_duplicate="replace")  # type: ignore[call-overload]
