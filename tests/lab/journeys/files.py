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
from django.contrib.auth.models import User
from django.db import transaction
from django.test import TestCase, TransactionTestCase

from django_redlock import LockTakenError, lock, lock_for_update
from django_redlock.testing import ResetLocksMixin
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

    def test_project_has_a_wait(self):
        kept.append(lock("wait").acquire())
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

APPS = """\
from django.apps import AppConfig

from . import jobs


class ShopConfig(AppConfig):
    name = "shop"
    jobs = jobs
"""
