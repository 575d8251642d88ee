"""The files that the user of the journey writes."""

JOBS = """\
from django_redlock import lock


@lock("nightly", if_taken="skip")
def nightly():
    return "done"
"""

VIEWS = """\
from django.http import HttpResponse

from django_redlock import lock, lock_for_update, locked_view


def inside(request):  # under ATOMIC_REQUESTS: the lock would end before the commit
    with lock("inside"):
        return HttpResponse("inside")


def kept(request):
    with lock("kept", on_commit=True):
        return HttpResponse("kept")


@locked_view("path", methods=["GET"])
def around(request):
    return HttpResponse("around")


def rows(request):
    from django.contrib.auth.models import User

    with lock_for_update(User.objects.all()):
        return HttpResponse("rows")
"""

URLS = """\
from django.db import transaction
from django.urls import path
from shop import views

urlpatterns = [
    path("inside/", views.inside),
    path("kept/", views.kept),
    path("around/", views.around),
    path("rows/", transaction.non_atomic_requests(views.rows)),
]
"""

TEST_SETTINGS = """\
from .settings import *

REDLOCK = {"default": {"NODES": ["memory://a", "memory://b", "memory://c"], "OPTIONS": {"wait": 5}}}
"""

PYTEST = """\
[pytest]
DJANGO_SETTINGS_MODULE = mysite.test_settings
python_files = tests.py
addopts = -p no:cacheprovider
"""

TESTS = """\
import asyncio
import logging
import os
import pickle
from unittest import mock

from django.contrib.auth.models import User
from django.core.exceptions import SynchronousOnlyOperation
from django.db import transaction
from django.http import HttpRequest
from django.test import TestCase, TransactionTestCase

from django_redlock import LockTakenError, fenced, lock, lock_for_update, locked_view, signals
from django_redlock.testing import ResetLocksMixin, Simulation
from shop import jobs

kept = []


class EverydayTests(ResetLocksMixin, TestCase):
    def test_one_leaves_a_lock(self):
        kept.append(lock("leak", wait=0).acquire())

    def test_two_does_not_meet_it(self):
        kept.append(lock("leak", wait=0).acquire())

    def test_taken_is_skipped(self):
        with lock("nightly").acquire():
            self.assertIsNone(jobs.nightly())
            self.assertIsNone(lock("nightly").try_acquire())
        self.assertEqual(jobs.nightly(), "done")
        with lock("nightly").try_acquire() as lease:
            self.assertTrue(lease.valid())

    async def test_taken_is_skipped_in_an_event_loop(self):
        async with await lock("nightly").atry_acquire() as lease:
            self.assertTrue(lease.valid())
            self.assertIsNone(await lock("nightly").atry_acquire())

    def test_waiting_for_itself_is_refused(self):
        with lock("self"), self.assertRaisesRegex(RuntimeError, "tests.py"):
            lock("self").acquire()

    def test_waiting_for_a_lease_of_its_own_is_logged_after_one_ttl(self):
        with Simulation(ttl=10, check=False):  # in virtual time
            lease = lock("handed").acquire()
            with self.assertLogs("django_redlock") as logs, self.assertRaises(LockTakenError):
                lock("handed", wait=25).acquire()
            lease.release()
        self.assertIn("both wait for ever", logs.output[0])
        self.assertEqual(logs.output[0].count("tests.py:"), 2)

    def test_blocking_an_event_loop_is_refused(self):
        async def view():
            with lock("loop"):
                pass

        with self.assertRaises(SynchronousOnlyOperation):
            asyncio.run(view())

        async def rows():
            with lock_for_update(User.objects.all()):
                pass

        with self.assertRaises(SynchronousOnlyOperation):
            asyncio.run(rows())

        with mock.patch.dict(os.environ, DJANGO_ALLOW_ASYNC_UNSAFE="true"):
            asyncio.run(view())
            asyncio.run(rows())

    def test_words_of_redis_py_are_explained(self):
        with self.assertRaisesRegex(TypeError, "write ttl=5"):
            lock("a", timeout=5)
        with self.assertRaisesRegex(TypeError, "write wait=5"):
            lock("a", blocking_timeout=5)
        with self.assertRaisesRegex(TypeError, r"write lock\\(name, wait=0\\).acquire"):
            lock("a").acquire(blocking=False)
        with self.assertRaisesRegex(AttributeError, "find_lock"):
            lock("a").locked()
        with self.assertRaisesRegex(TypeError, "as lease"):
            fenced(lock("a"))
        with self.assertRaisesRegex(TypeError, "its name"):
            pickle.dumps(lock("a"))

    def test_mistakes_are_explained(self):
        with self.assertRaisesRegex(TypeError, "Shop cannot be decorated.*Decorate its methods"):

            @lock("shop")
            class Shop: ...

        with self.assertRaisesRegex(TypeError, "label must be a str, not int"):
            lock("a", label=5)

        @locked_view
        def bare(request): ...

        with self.assertRaisesRegex(TypeError, "@locked_view needs a key"):
            bare(HttpRequest())

    def test_failing_receiver_is_logged_once(self):
        def fail(**kwargs):
            raise ZeroDivisionError

        signals.lock_acquired.connect(fail)
        self.addCleanup(signals.lock_acquired.disconnect, fail)
        with self.assertLogs(level=logging.ERROR) as logs, lock("signal"):
            pass
        self.assertEqual(len(logs.records), 1)

    def test_project_has_a_wait(self):
        kept.append(lock("wait").acquire())
        self.assertEqual(lock("wait").description().wanted.wait, 5)
        with self.assertRaises(LockTakenError):
            lock("wait", wait=0).acquire()


class TransactionTests(ResetLocksMixin, TransactionTestCase):
    def test_lock_in_a_view_is_warned_about(self):
        with self.assertWarnsRegex(RuntimeWarning, "on_commit=True"):
            self.assertEqual(self.client.get("/inside/").content, b"inside")

    def test_lock_for_the_commit_is_released(self):
        self.assertEqual(self.client.get("/kept/").content, b"kept")
        self.assertEqual(lock("kept", wait=0).acquire().release(), "released")

    def test_lock_around_the_view(self):
        self.assertEqual(self.client.get("/around/").content, b"around")

    def test_rows(self):
        self.assertEqual(self.client.get("/rows/").content, b"rows")
        with transaction.atomic(), self.assertRaisesRegex(RuntimeError, "atomic = False"):
            lock_for_update(User.objects.all()).__enter__()
"""

PYTEST_TESTS = """

import pytest


@pytest.mark.parametrize("turn", [1, 2])
def test_plugin_resets_the_locks(turn):
    kept.append(lock("leak", wait=0).acquire())


class TestShared:
    @pytest.fixture(autouse=True)
    def redlock_reset(self): ...

    @pytest.mark.parametrize("turn", [1, 2])
    def test_locks_are_kept(self, turn):
        lease = lock("shared").try_acquire()
        kept.append(lease)
        assert (lease is None) is (turn == 2)
"""

FIRST_LOCKS = """\
import time
from django.contrib.auth.models import User
from django.test import Client
from django_redlock import lock_for_update
from shop import jobs

print("nightly:", jobs.nightly())

browser = Client(SERVER_NAME="localhost")
for page in ("kept", "around", "inside"):
    response = browser.get(f"/{page}/")
    print(f"{page}:", response.status_code, response.content.decode())

user = User.objects.create(username="anna")
with lock_for_update(user, ttl=5) as user:
    user.first_name = "Anna"
    user.save()
    time.sleep(6)
print("rows:", User.objects.get().first_name)
"""

OWN_FILE = """\
import time
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django_redlock import QuorumUnavailableError, lock, lock_for_update

user = User.objects.get()
began = time.monotonic()
try:
    Client(SERVER_NAME="localhost").get("/kept/")
    print("entered")
except QuorumUnavailableError as error:
    print("refused:", error)
try:
    with transaction.atomic():
        user.save()
        with lock("inside", on_commit=True, wait=None):
            print("entered")
except QuorumUnavailableError as error:
    print("refused:", error)
try:
    with lock_for_update(user, ttl=10):
        print("entered")
except RuntimeError as error:
    print("refused:", error)
print("at once" if time.monotonic() - began < 30 else "late")
"""

IN_TRANSACTION = """\
from django.test import Client

try:
    Client(SERVER_NAME="localhost").get("/inside/")
    print("entered")
except RuntimeError as error:
    print("refused:", error)
"""

APPS = """\
from django.apps import AppConfig

from . import jobs


class ShopConfig(AppConfig):
    name = "shop"
    jobs = jobs
"""

MISTAKEN_TASKS = """\
from django_redlock.celery import singleton_task


@singleton_task(lease=300)
def import_catalogue(supplier): ...


@singleton_task(using="nope")
def import_prices(supplier): ...


@singleton_task(acks_late=True)
def import_stock(supplier): ...


@singleton_task(on_overlap="follow")
def import_pictures(supplier): ...
"""

TASKS = """\
from django_redlock.celery import singleton_task


@singleton_task(lease=30)
def import_catalogue(supplier: int) -> None: ...
"""

COMMAND = """\
from typing import Any

from django.core.management.base import BaseCommand
from shop.tasks import import_catalogue

from django_redlock import Lease, locked_command


@locked_command
class Command(BaseCommand):
    lease: Lease  # what the decorator sets

    def handle(self, *args: Any, **options: Any) -> None:
        self.lease.ensure()
        import_catalogue.delay_on_commit(7)
"""

MYPY = """\
[mypy]
plugins = mypy_django_plugin.main
disallow_untyped_decorators = True

[mypy-mysite.settings]
ignore_errors = True

[mypy.plugins.django-stubs]
django_settings_module = "mysite.settings"
"""
