"""An SQLite file that is a node and to which the project's own transaction writes."""

from collections.abc import Iterator
from contextlib import closing

import pytest
from django.core import checks
from django.db import connections, transaction
from django.test import override_settings

from django_redlock import LockManager, QuorumUnavailableError, lock_for_update, locks
from django_redlock.fencing import fenced
from django_redlock.inventory import held_locks
from django_redlock.nodes.database.table import TABLE
from tests.managers import Tables, connect, held_by, patient_manager, real_manager
from tests.shop.models import Order

pytestmark = [pytest.mark.usefixtures("unblocked"), pytest.mark.parametrize("tables", ["sqlite"], indirect=True)]


@pytest.fixture
def one(tables: Tables) -> Iterator[LockManager]:
    """A manager whose only node is an SQLite file."""
    with closing(patient_manager(tables.urls[:1])) as manager:
        connect(manager)
        yield manager


def test_lock_inside_a_transaction_of_its_own_file_fails_at_once(one: LockManager, tables: Tables):
    """The lock would wait for the transaction, and the transaction for the lock; the error lists the ways out."""
    with transaction.atomic(using=tables.aliases[0]):
        with pytest.raises(QuorumUnavailableError) as caught:
            one.lock("a").acquire()

    assert caught.value.misconfigured
    assert caught.value.waited < 10  # the node timeout
    assert "this thread's own transaction" in str(caught.value)
    assert "before atomic()" in str(caught.value)
    assert "a database file of their own or a database server" in str(caught.value)
    assert one.lock("a", wait=30).acquire().release() == "released"


def test_release_inside_a_transaction_of_its_own_file_is_redelivered(tables: Tables):
    """The node gets the release when the transaction has ended."""
    with closing(real_manager(tables.urls[:1], ttl=60.0, node_timeout=0.2)) as one:
        connect(one)
        lease = one.lock("a").acquire()
        with transaction.atomic(using=tables.aliases[0]):
            tables.query(f"DELETE FROM {TABLE} WHERE digest = 'none'")
            assert lease.release() == "unknown"

        assert held_by(one, "{a}")


def test_other_nodes_decide_when_one_file_is_locked(tables: Tables):
    """A transaction costs only its own file the vote."""
    with closing(patient_manager(tables.urls[:3])) as manager:
        connect(manager)
        with transaction.atomic(using=tables.aliases[0]):
            lease = manager.lock("a", wait=0).acquire()
        with fenced(lease, using=tables.aliases[0]):
            assert lease.extend()
        assert lease.release() == "released"


def test_fence_in_the_only_nodes_file_is_refused(one: LockManager, tables: Tables):
    """The transaction would keep the lease from being renewed, so that a body longer than the ttl loses it."""
    with one.lock("a") as lease:
        with pytest.raises(RuntimeError, match=r"database file of their own"), fenced(lease, using=tables.aliases[0]):
            pytest.fail("entered")
    with one.lock("a", renew=False) as lease, fenced(lease, using=tables.aliases[0]):
        assert lease.valid()


def test_row_in_the_only_nodes_file_is_refused(tables: Tables):
    """The transaction of lock_for_update() would keep its lock from being renewed, too."""
    alias = tables.aliases[0]
    row = Order(pk=7)
    row._state.db, row._state.adding = alias, False
    options = {"ttl": 60.0, "node_timeout": 10.0}
    with override_settings(REDLOCK={"default": {"NODES": tables.urls[:1], "OPTIONS": options}}):
        connect(locks["default"])
        with pytest.raises(RuntimeError, match=r"database file of their own"), lock_for_update(row, wait=30):
            pytest.fail("entered")
        assert not held_locks().locks
        locks.reset()


def test_file_of_requests_in_transactions_is_reported_as_a_node(tables: Tables):
    """With ATOMIC_REQUESTS, no view could take a lock from a node in the same file."""
    entry = connections.settings[tables.aliases[0]]
    with override_settings(REDLOCK={"default": {"NODES": tables.urls[:1]}}):
        assert "redlock.W011" not in found()
        entry["ATOMIC_REQUESTS"] = True
        try:
            assert "redlock.W011" in found()
        finally:
            entry["ATOMIC_REQUESTS"] = False


def found() -> list[str | None]:
    return [message.id for message in checks.run_checks(tags=["redlock"], databases=[])]
