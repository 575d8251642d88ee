"""Held locks in any state, written straight into nodes in memory: what the tests of lists, pages and commands share."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.test import Client, override_settings

from django_redlock import Lease, Lock, locks
from django_redlock.core.names import HolderKind, Owner, counted, encode, fingerprint, slug
from django_redlock.core.round import Round
from django_redlock.engine.driver import Driver
from django_redlock.engine.manager import owner_here
from django_redlock.inventory import LockReport, find_lock, find_locks
from django_redlock.inventory.doctor import diagnose
from django_redlock.models import key_of
from django_redlock.nodes.inspection import Finding
from django_redlock.nodes.memory import MemoryNode, forget_nodes

A, B = "a" * 32, "b" * 32  # secrets
FIVE = [f"memory://n{place}" for place in range(5)]
LIST = "/admin/redlock/heldlock/"
LIVE, DETAIL, NODES = f"{LIST}live/", f"{LIST}lock/", f"{LIST}nodes/"


@contextmanager
def nodes_in_memory(urls: Sequence[str] = FIVE, **options: Any) -> Iterator[list[MemoryNode]]:
    """Make nodes in memory those of the default alias."""
    with override_settings(REDLOCK={"default": {"NODES": list(urls), "OPTIONS": {"node_timeout": 2.0, **options}}}):
        yield [node for node in locks["default"].nodes if isinstance(node, MemoryNode)]
    forget_nodes()


def value(secret: str = A, *, age: float = 1.0, **about: Any) -> str:
    """Return what a holder of that *age* would have written."""
    known = {"host": "web-1", "pid": 77, "kind": "task", "label": "shop.import", "ref": "id-1", "ttl": 30.0, **about}
    written = encode(secret, Owner(since=time.time() - age, **known))
    return counted(written, about["extensions"]) if "extensions" in about else written


def put(
    name: str,
    secret: str = A,
    left: float | None = 200,
    *,
    count: int | None = None,
    nodes: Iterable[MemoryNode] | None = None,
    text: str | None = None,
    **about: Any,
) -> str:
    """Write a lock, or the *text* of another program, to the first *count* nodes; return its key in the admin."""
    written = value(secret, **about) if text is None else text
    for node in list(locks["default"].nodes if nodes is None else nodes)[:count]:
        node.store.put(slug(name), written, left)  # type: ignore[attr-defined]
    return key_of(fingerprint(written), "default", slug(name))


def put_each(nodes: Iterable[MemoryNode], text: str, *lefts: float | None, name: str = "orders:7") -> None:
    """Write *text* to as many nodes as there are *lefts*, with a time for each."""
    for node, left in zip(nodes, lefts, strict=False):
        node.store.put(slug(name), text, left)


def held_by(name: str, kind: HolderKind = "task", label: str = "", ref: str = "", **how: Any) -> Lock:
    """Return a lock whose holder is described in this way; nobody renews it, unless *how* says so."""
    return locks["default"].on_behalf(name, owner_here(kind, label, ref), **{"renew": False, **how})


def note_rounds(patch: pytest.MonkeyPatch, after: Callable[[], object] = lambda: None) -> list[Round]:
    """Return a list of the rounds that are asked from now on; *after* is called after each."""
    asked, ask = [], Driver.ask

    def noted(driver: Driver, round: Round) -> None:
        asked.append(round)
        ask(driver, round)
        after()

    patch.setattr(Driver, "ask", noted)
    return asked


def only_together(patch: pytest.MonkeyPatch, count: int, owner: type = Driver, method: str = "ask") -> None:
    """From now on, a method returns only while *count* threads call it at once; by default, the one that asks nodes."""
    together, call = threading.Barrier(count, timeout=20), getattr(owner, method)

    def called(*args: Any) -> Any:
        together.wait()
        return call(*args)

    patch.setattr(owner, method, called)


def findings(kind: str) -> list[Finding]:
    """Return what the doctor finds of this kind."""
    return [finding for finding in diagnose().findings if finding.id == kind]


def shown(found: Lease | str) -> str:
    """Return the fingerprint of a lease, or of a secret."""
    return fingerprint(found if isinstance(found, str) else found.secret)


def look(name: str, using: str = "default") -> LockReport | None:
    """Return a lock, without looking for the thousand places that one of its name may have."""
    return next(iter(find_locks([slug(name)], using).locks), None)


def found(name: str = "orders:7") -> LockReport:
    """Return the lock of that name, which must exist."""
    held = find_lock(name)
    assert held is not None
    return held


def row_key(name: str, using: str = "default") -> str:
    """Return the key of a held lock's row in the admin."""
    held = look(name, using)
    assert held is not None
    return key_of(held.fingerprint, using, held.slug)


def client_of(*permissions: str) -> Client:
    """Return a client whose user is staff and has *permissions*."""
    user = User.objects.create_user("staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def act(client: Client, action: str, *keys: str, confirmed: bool = True, follow: bool = True, **more: str) -> Any:
    """Post an action, as the confirmation page does or as the list and the page of a lock do."""
    step = {"confirmed": "yes"} if confirmed else {"index": "0"}
    return client.post(LIST, {"action": action, "_selected_action": list(keys), **step, **more}, follow=follow)


class Terminal(StringIO):
    """A standard input or output that is a terminal."""

    def isatty(self) -> bool:
        return True


def run(command: str, *args: str, **options: object) -> tuple[str, str, int]:
    """Run a command; return what it writes, what it complains of, and its exit code."""
    out, err = StringIO(), StringIO()
    try:
        call_command(command, *args, stdout=out, stderr=err, no_color=True, **options)
    except CommandError as error:
        return out.getvalue(), f"{err.getvalue()}{error}", error.returncode
    return out.getvalue(), err.getvalue(), 0
