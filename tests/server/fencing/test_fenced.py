"""fenced(): the outermost transaction, claimed first, committed only by the latest holder."""

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
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
    """A holder's transaction commits, again and again; its claim is the first statement, and stays in the fence."""
    counter, lease = CounterTable(counting), lease_of("counter", fencing_token=33)

    for _ in range(3):
        with fenced(lease, using=counting):
            counter.write(counter.read() + 1)
    seen = Statements()
    with connections[counting].execute_wrapper(seen):
        claim(lease, counting)

    fence = Fence.objects.using(counting).get()
    assert counter.read() == 3
    assert (fence.token, fence.owner, fence.name) == (33, lease.hold.owner(), "counter")
    assert lease.secret not in (fence.key, fence.owner)
    assert [sql.split()[0] for sql in seen if not sql.startswith("BEGIN")] == ["UPDATE"]
    assert "redlock_fence" in seen[-1]


def test_overtaken_holder_is_refused_and_told(counting):
    """After a later holder committed, the earlier one is refused before it reads, as is one with the same token."""
    counter, told = CounterTable(counting), []
    earlier, later = (lease_of("counter", fencing_token=token) for token in (33, 34))
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
    with pytest.raises(StaleTokenError), fenced(lease_of("counter", fencing_token=34), using=counting):
        pytest.fail("the body ran")
    claim(later, counting)
    assert counter.read() == 1


def test_missing_table_says_what_to_type(engine, django_db_blocker):
    """The error names a database without the table of fences, and the command that creates it."""
    with django_db_blocker.unblock(), engine.database() as name, django_database("bare", engine.settings(name)):
        with pytest.raises(ImproperlyConfigured, match=r"manage\.py migrate redlock --database bare"):
            claim(lease_of("counter"), "bare")
        with pytest.raises(CommandError, match=r"manage\.py migrate redlock --database bare") as caught:
            call_command("redlock_prune_fences", database="bare", skip_checks=True)
        assert caught.value.returncode == 2


def test_open_transaction_is_refused(counting):
    """Inside another transaction, which autocommit off may hide, fenced() raises before it touches the database."""
    lease, seen = lease_of("counter"), Statements()

    with transaction.atomic(using=counting), connections[counting].execute_wrapper(seen):
        with pytest.raises(RuntimeError, match=r"inside a transaction of database 'counting_.*dispatch.*nested=True"):
            fenced(lease, using=counting).__enter__()
    connections[counting].set_autocommit(False)
    with pytest.raises(RuntimeError, match="autocommit is off for database 'counting_"):
        fenced(lease, using=counting).__enter__()
    connections[counting].set_autocommit(True)

    assert seen == []
    with pytest.raises(ValueError, match="Take it exclusively to write"):
        fenced(lease_of("counter", shared=True), using=counting)


def test_lease_without_enough_time_commits_nothing(counting):
    """A body that raises, and a lease that ended or has less than the margin left, commit nothing."""
    counter, ended, short, late = CounterTable(counting), *(lease_of("counter", ttl=30) for _ in range(3))

    def write_and(then) -> None:
        counter.write(1)
        then()

    def pass_time(lease, seconds: float) -> None:
        lease.hold.deadline -= seconds

    with pytest.raises(ZeroDivisionError):
        fenced(ended, using=counting).run(write_and, lambda: 1 / 0)
    assert Fence.objects.using(counting).get().token == 0
    with pytest.raises(LockLostError, match="already released"):
        fenced(ended, using=counting).run(write_and, ended.release)
    with pytest.raises(LockLostError, match="less of its time was left") as caught:
        fenced(short, using=counting, margin=20).run(write_and, lambda: pass_time(short, 15))
    pass_time(late, 28.7)
    with pytest.raises(LockLostError, match="less of its time was left"):
        fenced(late, using=counting).run(pytest.fail, "the body ran")

    assert (caught.value.reason, short.valid()) == ("margin", True)
    assert counter.read() == 0


def test_lock_over_several_names_claims_all(counting):
    """
    A lease over a thousand names claims the fence of each in one transaction, and one overtaken name refuses it; names
    that differ only in case, a space, an accent or normalisation do not overtake each other.
    """
    names = ["Job", "job", "job ", "jób", "jo\u0301b", "job\0", " job"]
    for token, name in enumerate(names, 1):
        claim(lease_of(name, fencing_token=50 - token), counting)
    assert Fence.objects.using(counting).count() == len(names)

    many = lease_of([f"row:{number}" for number in range(1001)], fencing_token=33)
    claim(many, counting)
    claim(lease_of("row:7", fencing_token=34), counting)

    with pytest.raises(StaleTokenError), fenced(many, using=counting):
        pytest.fail("the body ran")

    assert Fence.objects.using(counting).filter(token=33).count() == 1000


def test_several_leases_are_claimed_in_one_transaction(counting):
    """Several leases, such as the permits of one lock, protect one transaction together; each has its own fence."""
    manager = lease_of("pool", limit=3).hold.keeper
    leases = [manager.lock("pool", limit=3, wait=0, renew=False).acquire() for _ in range(2)]
    leases.append(lease_of("pool #2", fencing_token=33))
    for _ in range(2):
        with fenced(leases, using=counting):
            pass
    assert Fence.objects.using(counting).count() == 3
    claim(lease_of("pool #2", fencing_token=34), counting)

    with pytest.raises(StaleTokenError, match="pool #2"), fenced(leases, using=counting):
        pytest.fail("the body ran")

    assert [lease.reason for lease in leases] == [None, None, "fenced"]


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
