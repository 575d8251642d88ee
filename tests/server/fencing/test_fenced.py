"""fenced(): the outermost transaction, claimed first, committed only by the latest holder."""

import threading

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction

from django_redlock import LockLostError, StaleTokenError, fenced
from django_redlock.models import Fence
from tests.services import django_database

from .counting import CounterTable, prepare
from .sources import claim, lease_of


class Statements(list):
    """Records the statements that a connection executes."""

    def __call__(self, execute, sql, params, many, context):
        self.append(sql)
        return execute(sql, params, many, context)


def test_holder_reads_writes_and_commits(counting):
    """A holder's transaction commits, again and again, and leaves its pair in the fence."""
    counter, lease = CounterTable(counting), lease_of("counter", fencing_token=33)

    for _ in range(3):
        with fenced(lease, using=counting):
            counter.write(counter.read() + 1)

    fence = Fence.objects.using(counting).get()
    assert counter.read() == 3
    assert (fence.token, fence.owner, fence.name) == (33, lease.hold.owner(), "counter")
    assert lease.secret not in (fence.key, fence.owner)


def test_overtaken_holder_is_refused_and_told(counting):
    """After a later holder committed, the earlier one is refused before it reads, and its lease is lost."""
    counter, earlier, later = (
        CounterTable(counting),
        lease_of("counter", fencing_token=33),
        lease_of("counter", fencing_token=34),
    )
    told = []
    earlier.on_lost(told.append)
    with fenced(later, using=counting):
        counter.write(1)

    with pytest.raises(StaleTokenError, match="fencing token 33 has been overtaken") as caught:
        with fenced(earlier, using=counting):
            pytest.fail("the body ran")

    assert (caught.value.name, caught.value.fencing_token) == ("counter", 33)
    assert earlier.lost.is_set()
    assert (earlier.valid(), earlier.reason, told) == (False, "fenced", [earlier])
    with pytest.raises(LockLostError, match="a database has seen a later holder"):
        earlier.ensure()
    assert counter.read() == 1


def test_equal_token_of_another_owner_is_refused(counting):
    """Of two holders with one token, the first to commit continues and the other is refused."""
    one, other = lease_of("counter", fencing_token=33), lease_of("counter", fencing_token=33)

    claim(one, counting)

    with pytest.raises(StaleTokenError), fenced(other, using=counting):
        pytest.fail("the body ran")
    claim(one, counting)


def test_claim_is_the_first_statement_of_the_transaction(counting):
    """Between BEGIN and the claim no statement is sent, and with an existing fence only the claim is added."""
    lease, seen = lease_of("counter"), Statements()
    claim(lease, counting)

    with connections[counting].execute_wrapper(seen), fenced(lease, using=counting):
        pass

    assert [sql.split()[0] for sql in seen if not sql.startswith("BEGIN")] == ["UPDATE"]
    assert "redlock_fence" in seen[-1]


def test_open_transaction_is_refused(counting):
    """Inside another transaction, fenced() raises before it touches the database."""
    lease, seen = lease_of("counter"), Statements()

    with transaction.atomic(using=counting), connections[counting].execute_wrapper(seen):
        with pytest.raises(RuntimeError, match=r"inside a transaction of database 'counting_.*nested=True"):
            with fenced(lease, using=counting):
                pytest.fail("the body ran")

    assert seen == []


def test_connection_without_autocommit_is_refused(counting):
    """With autocommit off, a transaction may be open that Django does not know, so fenced() raises."""
    connections[counting].set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match="autocommit is off for database 'counting_"):
            with fenced(lease_of("counter"), using=counting):
                pytest.fail("the body ran")
    finally:
        connections[counting].set_autocommit(True)


def test_body_that_raises_commits_nothing(counting):
    """The body's exception comes out unchanged, and neither its writes nor its claim are committed."""
    counter, lease = CounterTable(counting), lease_of("counter", fencing_token=33)

    def fail() -> None:
        counter.write(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fenced(lease, using=counting).run(fail)

    assert counter.read() == 0
    assert Fence.objects.using(counting).get().token == 0


def test_lease_that_ends_in_the_body_rolls_back(counting):
    """A lease that ended before the commit commits nothing."""
    counter, lease = CounterTable(counting), lease_of("counter")

    def write_and_release() -> None:
        counter.write(1)
        lease.release()

    with pytest.raises(LockLostError, match="already released"):
        fenced(lease, using=counting).run(write_and_release)

    assert counter.read() == 0


def test_too_little_time_at_the_commit_rolls_back(counting):
    """With less than the margin left at the commit, nothing is committed, though the lock is still held."""
    counter, lease = CounterTable(counting), lease_of("counter", ttl=30)

    def write_for_fifteen_seconds() -> None:
        counter.write(1)
        lease.hold.deadline -= 15

    with pytest.raises(LockLostError, match="less of its time was left") as caught:
        fenced(lease, using=counting, margin=20).run(write_for_fifteen_seconds)

    assert caught.value.reason == "margin"
    assert counter.read() == 0
    assert lease.valid()


def test_too_little_time_at_the_start_begins_nothing(counting):
    """With less than the margin left, no transaction is begun; the default margin is a twentieth of the ttl."""
    lease = lease_of("counter", ttl=30)
    lease.hold.deadline -= 28.7

    with pytest.raises(LockLostError, match="less of its time was left"), fenced(lease, using=counting):
        pytest.fail("the body ran")


def test_names_that_look_alike_have_different_fences(counting):
    """Names that differ only in case, a trailing space, an accent or normalisation do not overtake each other."""
    names = ["Job", "job", "job ", "jób", "jo\u0301b", "job\0", " job"]
    leases = [lease_of(name, fencing_token=50 - number) for number, name in enumerate(names)]

    for lease in leases:
        claim(lease, counting)

    assert Fence.objects.using(counting).count() == len(names)


def test_lock_over_several_names_claims_all(counting):
    """A lease over a thousand names claims the fence of each name in one transaction; one overtaken name refuses it."""
    many = lease_of([f"row:{number}" for number in range(1001)], fencing_token=33)
    claim(many, counting)
    claim(lease_of("row:7", fencing_token=34), counting)

    with pytest.raises(StaleTokenError), fenced(many, using=counting):
        pytest.fail("the body ran")

    assert Fence.objects.using(counting).filter(token=33).count() == 1000


def test_places_of_a_lock_have_fences_of_their_own(counting):
    """With limit=3, three holders do not overtake each other, and none overtakes a lock that is named like a permit."""
    manager = lease_of("pool", limit=3).hold.keeper
    leases = [manager.lock("pool", limit=3, wait=0, renew=False).acquire() for _ in range(2)]
    leases.append(lease_of("pool #2", fencing_token=1))

    for lease in [*leases, *leases]:
        claim(lease, counting)

    assert Fence.objects.using(counting).count() == 3


def test_several_leases_are_claimed_in_one_transaction(counting):
    """Several leases, such as those of rows that were locked one by one, protect one transaction together."""
    leases = [lease_of(f"row:{number}", fencing_token=33) for number in range(3)]
    claim(lease_of("row:1", fencing_token=34), counting)

    with pytest.raises(StaleTokenError, match="row:1"), fenced(leases, using=counting):
        pytest.fail("the body ran")

    assert [lease.reason for lease in leases] == [None, "fenced", None]
    assert Fence.objects.using(counting).filter(token=33).count() == 0


def test_next_acquisition_goes_above_what_the_database_has_seen(counting):
    """A holder whose nodes lost their records is refused once; its process then proposes a greater token."""
    ahead = 4_000_000_000_000_000
    claim(lease_of("counter", fencing_token=ahead), counting)
    behind = lease_of("counter")

    with pytest.raises(StaleTokenError), fenced(behind, using=counting):
        pytest.fail("the body ran")
    behind.release()
    again = behind.hold.keeper.lock("counter", wait=0, renew=False).acquire()

    assert again.fencing_token > ahead
    claim(again, counting)


def test_shared_lease_is_refused(counting):
    """A shared lease does not determine who may write."""
    with pytest.raises(ValueError, match="Take it exclusively to write"):
        fenced(lease_of("counter", shared=True), using=counting)


def test_several_databases_are_claimed_before_the_body(engine, django_db_blocker):
    """Each database has its own fence; all are claimed before the body, and an overtaken fence refuses all of them."""
    with django_db_blocker.unblock(), engine.database() as one, engine.database() as other:
        with django_database("b", engine.settings(one)), django_database("a", engine.settings(other)):
            prepare("a")
            prepare("b")
            lease = lease_of("counter", fencing_token=33)
            with fenced(lease, using=["b", "a"]):
                CounterTable("a").write(1)
                CounterTable("b").write(1)
                assert [Fence.objects.using(alias).get().token for alias in "ab"] == [33, 33]
            claim(lease_of("counter", fencing_token=34), "b")

            with pytest.raises(StaleTokenError), fenced(lease, using=["a", "b"]):
                pytest.fail("the body ran")

            assert [CounterTable(alias).read() for alias in "ab"] == [1, 1]


def test_missing_table_says_what_to_type(engine, django_db_blocker):
    """The error names a database without the table of fences, and the command that creates it."""
    with django_db_blocker.unblock(), engine.database() as name, django_database("bare", engine.settings(name)):
        with pytest.raises(ImproperlyConfigured, match=r"manage\.py migrate redlock --database bare"):
            with fenced(lease_of("counter"), using="bare"):
                pytest.fail("the body ran")


def test_holder_inside_its_transaction_keeps_its_successor_waiting(counting):
    """While a holder is inside its transaction, its successor waits at the claim, and then reads what it wrote."""
    counter, earlier, later = (
        CounterTable(counting),
        lease_of("counter", fencing_token=33),
        lease_of("counter", fencing_token=34),
    )
    inside, read = threading.Event(), []

    def succeed() -> None:
        inside.wait(30)
        try:
            with fenced(later, using=counting):
                read.append(counter.read())
        finally:
            connections.close_all()

    claim(earlier, counting)  # so that the successor finds a fence
    successor = threading.Thread(target=succeed)
    successor.start()
    with fenced(earlier, using=counting):
        inside.set()
        successor.join(0.3)
        assert read == []
        counter.write(1)
    successor.join(30)

    assert read == [1]
