"""No number and no size that a node sends is taken on trust: each is bounded where it is read."""

import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_redlock import LockTakenError, QuorumUnavailableError
from django_redlock.core.attempt import HighestToken
from django_redlock.core.protocol import HIGHEST, Failure, Kind, Repair
from django_redlock.inventory import Staleness, find_locks, held_locks, remove_stale, stale_keys
from django_redlock.inventory.doctor import diagnose
from django_redlock.inventory.survey import tell_nodes
from django_redlock.testing import Servers
from tests.managers import Flavour, Tables, on_each, real_manager

ABSURD = str(2**63 - 1)
NAME, SLUG = "a", "{a}"


def poison(nodes: Servers, value: str, *places: int) -> None:
    on_each([nodes[place] for place in places], "SET", f"t:{SLUG}:f", value)


def fences(nodes: Servers) -> list[str | None]:
    found = []
    for node in nodes:
        with node.client() as client:
            found.append(client.get(f"t:{SLUG}:f"))
    return found


@pytest.mark.parametrize("value", [ABSURD, "9" * 23, str(HIGHEST - 1), "1e300", "soon"])
async def test_absurd_token_on_one_node_does_not_spread(nodes: Servers, flavour: Flavour, value: str):
    """An absurd token costs its node the vote; the others decide, and are not raised to it."""
    poison(nodes, value, 0)
    manager = real_manager(nodes.urls[:3])

    lease = await flavour.acquire(manager.lock(NAME, wait=0))

    assert lease.fencing_token < HIGHEST / 2
    assert [fence for fence in fences(nodes)[1:3] if fence != str(lease.fencing_token)] == []
    assert fences(nodes)[0] == value
    assert await flavour.extend(lease)
    assert await flavour.release(lease) == "released"
    again = await flavour.acquire(manager.lock(NAME, wait=0))
    assert again.fencing_token > lease.fencing_token
    await flavour.release(again)


async def test_absurd_token_does_not_raise_the_others(nodes: Servers, flavour: Flavour):
    """A second round raises the nodes to the highest token of those that vote, and to no absurd one."""
    poison(nodes, ABSURD, 0)
    ahead = int((time.time() + 5) * 1e6)  # another client has had the lock, and its clock is ahead
    poison(nodes, str(ahead), 1, 2)
    manager = real_manager(nodes.urls[:3])

    lease = await flavour.acquire(manager.lock(NAME, wait=0))

    assert ahead < lease.fencing_token < HIGHEST / 2
    assert fences(nodes)[1:3] == [str(lease.fencing_token)] * 2
    await flavour.release(lease)


async def test_absurd_token_on_too_many_nodes_is_named(nodes: Servers, flavour: Flavour):
    """No caller waits for a fault that only an operator can repair; the error names it, and no lock is left behind."""
    poison(nodes, ABSURD, 0, 1)
    manager = real_manager(nodes.urls[:3])

    with pytest.raises(QuorumUnavailableError) as caught:
        await flavour.acquire(manager.lock(NAME, wait=60))

    assert list(caught.value.nodes.values()).count(Failure.ABSURD_TOKEN.value) == 2
    assert (caught.value.misconfigured, caught.value.attempts) == (True, 1)
    poison(nodes, "5", 0, 1)
    await flavour.release(await flavour.acquire(manager.lock(NAME, wait=30)))


async def test_holder_keeps_the_lock_when_a_token_becomes_absurd(nodes: Servers, flavour: Flavour):
    """Nodes with an absurd token still extend the lease; without the lock, they neither vote nor refuse."""
    manager = real_manager(nodes.urls[:3])
    lease = await flavour.acquire(manager.lock(NAME, wait=0))
    poison(nodes, ABSURD, 0, 1)
    assert await flavour.extend(lease)
    on_each(nodes[:2], "DEL", f"t:{SLUG}:h")

    longer = await flavour.extend(lease)

    assert not longer
    assert lease.valid()
    assert lease.reason is None
    await flavour.release(lease)


async def test_taken_lock_with_an_absurd_token_is_taken(nodes: Servers, flavour: Flavour):
    """The holder of a lock is known even if the lock's token is absurd."""
    holder, other = real_manager(nodes.urls[:3]), real_manager(nodes.urls[:3])
    lease = await flavour.acquire(holder.lock(NAME, wait=0))
    poison(nodes, ABSURD, 0, 1, 2)

    with pytest.raises(LockTakenError):
        await flavour.acquire(other.lock(NAME, wait=0))

    assert other.acquirer._highest.of([SLUG]) < HIGHEST
    await flavour.release(lease)


def test_database_node_agrees(sqlite_tables: Tables, unblocked: None):
    """A token in a row of a database is bounded, and repaired, like a token under a key."""
    sqlite_tables.empty()
    manager = real_manager(sqlite_tables.urls[:1])
    manager.lock(NAME, wait=30).acquire().release()
    [(state,)] = [row for row in sqlite_tables.query("SELECT state FROM redlock_noderecord") if "slug" in row[0]]
    for value in (2**63 - 1, 10**30, -1, 1.5, "soon", None, float("inf")):
        record = json.loads(state) | {"fence": [value, None]}
        text = json.dumps(record).replace("'", "''")
        sqlite_tables.query(f"UPDATE redlock_noderecord SET version = 1, state = '{text}' WHERE state LIKE '%slug%'")

        with pytest.raises(QuorumUnavailableError, match="absurd fencing token") as caught:
            manager.lock(NAME, wait=0).acquire()

        assert caught.value.misconfigured, value
        assert tell_nodes(manager, Repair(SLUG, 0, None)).replies[0].kind is Kind.RELEASED
        assert manager.survey(slugs=(SLUG,))[0].rows[0].fence == 0


def test_floor_does_not_rise_above_what_can_be_proposed():
    """A token that no node could exceed is ignored, whether a database or a node reported it."""
    highest = HighestToken()
    highest.lift(["a"], 2**63 - 1)
    highest.lift(["a"], HIGHEST)
    assert highest.of(["a"]) == 0
    highest.lift(["a"], HIGHEST - 1)

    assert highest.of(["a"]) == HIGHEST - 1


# Operators


@contextmanager
def settings_of(nodes: Servers) -> Iterator[None]:
    options = {"restart_guard": False, "node_timeout": 2.0}
    alias = {"NODES": nodes.urls[:3], "KEY_PREFIX": "t", "OPTIONS": options}
    with override_settings(REDLOCK={"default": alias}):
        yield


@pytest.mark.parametrize(("value", "held"), [(str(2**63 - 1), False), ("9" * 23, True)], ids=["free", "held"])
def test_clear_repairs_an_absurd_token(nodes: Servers, value: str, held: bool):
    """A node whose token was absurd has the highest token of the others, whether or not the lock is held."""
    names = None if held else [NAME]
    with settings_of(nodes):
        manager = real_manager(nodes.urls[:3])
        lease = manager.lock(NAME, wait=0).acquire()
        if not held:
            lease.release()
        poison(nodes, value, 0)
        found = [finding for finding in diagnose(timeout=5.0).findings if finding.id == "absurd-token"]
        dry, wet = io.StringIO(), io.StringIO()
        call_command("redlock_clear", names=names, dry_run=True, stdout=dry)
        before = fences(nodes)[0]

        call_command("redlock_clear", names=names, interactive=False, stdout=wet)

        assert [(finding.level, NAME in finding.text, "redlock_clear" in finding.remedy) for finding in found] == (
            [("error", True, True)] if held else []
        )
        assert "its fencing token is absurd" in dry.getvalue()
        assert before == value
        assert "Dry run: 1 token would be replaced." in dry.getvalue()
        assert wet.getvalue().endswith("\nReplaced 1 token.\n")
        assert fences(nodes)[:3] == [str(lease.fencing_token)] * 3
        assert not [finding for finding in diagnose(timeout=5.0).findings if finding.id == "absurd-token"]
        if held:
            lease.release()
        lock = manager.lock(NAME, wait=0).acquire()
        assert lock.fencing_token > lease.fencing_token
        lock.release()


def test_token_that_changed_meanwhile_is_left_alone(nodes: Servers):
    """A token that somebody has repaired by the time of the action is not replaced."""
    with settings_of(nodes):
        poison(nodes, ABSURD, 0)
        (key,) = [key for key in stale_keys(find_locks([f"{{{NAME}}}"])) if key.reason is Staleness.ABSURD]
        poison(nodes, "7", 0)

        outcome = remove_stale(key)

        assert outcome == "changed"
        assert fences(nodes)[0] == "7"


def test_absurd_token_is_no_token_of_a_listing(nodes: Servers):
    """Pages and commands show the token of the holder."""
    with settings_of(nodes):
        lease = real_manager(nodes.urls[:3]).lock(NAME, wait=0).acquire()
        poison(nodes, ABSURD, 0, 1)

        (lock,) = held_locks().locks

        assert {view.fence for view in lock.views} == {0, lease.fencing_token}
        assert find_locks([SLUG]).absurd[SLUG] == tuple(url.removeprefix("redis://")[:-2] for url in nodes.urls[:2])
        lease.release()
