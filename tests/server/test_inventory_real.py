"""Every state, and every kind of stale key, produced on real servers; and the operator's actions."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from html import unescape

import pytest
from django.core.management import call_command
from django.test import override_settings

from django_redlock import Lease, LockManager, LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.inventory import (
    PAGE,
    State,
    ask_to_stop,
    find_locks,
    force_release,
    held_locks,
)
from django_redlock.testing import Servers
from tests.held import LIST, client_of, findings, found, run
from tests.holder import holding, wait_until_held
from tests.managers import on_each
from tests.waiting import wait_until

OPTIONS = {"restart_guard": False, "node_timeout": 7.0, "ttl": 30.0, "max_ttl": 60.0}


@pytest.fixture
def five(nodes: Servers) -> Iterator[Servers]:
    """Five real servers under the default alias; they have just started, so the restart guard is off."""
    with override_settings(REDLOCK={"default": {"NODES": nodes.urls, "OPTIONS": OPTIONS}}):
        yield nodes


def taken(name: str = "orders:7", **how) -> Lease:
    return lock(name, renew=False, **how).acquire()


@pytest.fixture
def lively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process give a sign of life now, and again soon, that counts for a second."""
    for name, seconds in (("FIRST", 0.0), ("EVERY", 0.1), ("LIFE", 1.0)):
        monkeypatch.setattr(f"django_redlock.engine.presence.{name}", seconds)


# States


def test_processes_are_no_locks(five, lively):
    """A process's sign of life is no lock, and is repeated exactly as long as the process holds one."""
    lease, manager = lock("orders:7").acquire(), locks["default"]
    with five[0].client() as client:
        wait_until(lambda: client.zcard("redlock:index") == 2)
        assert [held.name for held in held_locks().locks] == ["orders:7"]
        manager.close()
        client.delete(*client.keys("redlock:*~p:h"))
        wait_until(lambda: client.keys("redlock:*~p:h"))
        lease.release()
        wait_until(lambda: manager.driver.heartbeat.due() == float("inf"))
        assert 0 < client.pttl(*client.keys("redlock:*~p:h")) < 62_000
        assert held_locks().locks == ()
    manager.close()

    assert not manager.driver.heartbeat.valid()


def test_all_signs_of_a_process_keep_one_key(five):
    """Blocking code, event loops and a recreated manager each give the one sign of life of their process."""

    async def sign() -> int:
        return await locks["default"].driver.loop_side().heartbeat.ado()

    heard = [locks["default"].driver.heartbeat.do(), asyncio.run(sign()), asyncio.run(sign())]
    locks.reset()
    heard += [locks["default"].driver.heartbeat.do(), asyncio.run(sign())]

    with five[0].client() as client:
        assert len(client.keys("redlock:*~p:h")) == 1
    assert heard == [3] * 5  # nobody waits for more than a quorum


def test_an_event_loop_gives_the_sign_of_life_of_its_process(five, lively):
    """A process that holds locks only in an event loop gives signs of life as well."""

    async def held() -> None:
        async with lock("orders:7", renew=False, ttl=30):
            with five[0].client() as client:
                await asyncio.to_thread(wait_until, lambda: client.keys("redlock:*~p:h"))
        await locks["default"].aclose()

    asyncio.run(asyncio.wait_for(held(), 60))


# The details of a lock


def test_a_lock_is_released_for_longer_than_its_holder_might_renew_it(five):
    """A lease that was made longer, which the inventory counts, is renewed late, and is still found lost then."""
    lease = taken()
    before = found().extensions
    assert lease.extend()
    assert lease.extend(60)
    assert (before, found().extensions) == (0, 2)
    assert found().since == pytest.approx(time.time(), abs=20)
    assert force_release("orders:7", found().fingerprint) == "released"

    with five[0].client() as client:
        assert client.pttl(f"redlock:x:{lease.secret}") > 30_000
    assert lease.extend() is False
    assert lease.reason == "revoked"


def test_waiters_are_listed_in_the_order_of_their_turns(five):
    """Waiters are listed in order, with their process ids; a killed one disappears from the list after a while."""
    lease = taken(ttl=60)
    with holding(five.urls, "orders:7") as first:
        wait_until(lambda: len(found().waiters) == 1)
        with holding(five.urls, "orders:7") as second:
            wait_until(lambda: len(found().waiters) == 2)
            assert [(waiter.pid, waiter.nodes) for waiter in found().waiters] == [(first.pid, 5), (second.pid, 5)]
            first.kill()
            for server in five:
                with server.client() as client:
                    ends = dict(client.zrange("redlock:{orders:7}:s", 0, -1, withscores=True))
                    (gone,) = [who for who in ends if f":{first.pid}." in who]
                    assert ends[gone] < 1000 * time.time() + 60_000
                    client.zadd("redlock:{orders:7}:s", {gone: 1})  # as when that has ended

            assert found().waiters[0].pid == second.pid
            lease.release()
            wait_until_held(second)


def test_a_waiter_shows_its_label(five):
    """A waiter is shown with its label, whatever is in it, and with the time at which the first one began to wait."""
    label, lease = "nightly | import 7: \u4e00\n" + "\U0001f512" * 200, taken(ttl=60)
    started = time.time()
    threads = [
        threading.Thread(target=lambda how=how: lock("orders:7", wait=60, **how).acquire().release())
        for how in ({"label": label}, {})
    ]
    for number, thread in enumerate(threads, 1):
        thread.start()
        wait_until(lambda number=number: len(found().waiters) == number)
    first, second = found().waiters
    said, listed = run("redlock_inspect", "orders:7")[0], held_locks().locks[0]
    document = json.loads(run("redlock_inspect", "orders:7", "--format=json")[0])
    lease.release()
    for thread in threads:
        thread.join()

    assert first.label.startswith("nightly | import 7: \u4e00 \U0001f512\U0001f512")
    assert (second.label, str(second)) == ("", f"{second.host}:{os.getpid()} #{second.number}")
    assert "  1. nightly | import 7: \u4e00 " in said
    assert [waiter["label"] for waiter in document["lock"]["waiters"]] == [first.label, ""]
    assert listed.waiting_since == pytest.approx(started, abs=20)


def wait_for(five: Servers, number: int, *names: str) -> None:
    """Queue the given number of waiters, as each node stores them; every third of them is gone."""
    ends = time.time() * 1000 + 60_000
    for name in names:
        line = {f"web:{place}.x|1": place for place in range(number)}
        alive = {who: 1 if place % 3 == 0 else ends for who, place in line.items()}
        for key, members in (("q", line), ("s", alive)):
            pairs = [part for who, score in members.items() for part in (score, who)]
            on_each(five, "ZADD", f"redlock:{{{name}}}:{key}", *pairs)


def test_of_many_waiters_a_node_names_few_and_counts_all(five, capsys):
    """A list needs only the number of a thousand waiters; the page of one lock names the first hundred."""
    names = ["orders:7", "orders:8"]
    for name in names:
        taken(name)
    wait_for(five, 600, *names)
    slugs = [f"{{{name}}}" for name in names]

    one = found("orders:7")
    both = find_locks(slugs).locks
    counted = find_locks(slugs, waiters=0).locks
    call_command("redlock_inspect", "orders:7")
    said = capsys.readouterr().out

    assert (one.waiting, len(one.waiters)) == (400, 100)
    assert "Waiting: 400\n  1. web:1 #1\n" in said
    assert "  and 300 more" in said
    assert [waiter.pid for waiter in one.waiters][:4] == [1, 2, 4, 5]
    assert sorted((held.waiting, len(held.waiters)) for held in both) == [(400, 0), (400, 100)]
    assert [(held.waiting, held.waiters) for held in counted] == [(400, ())] * 2


def test_no_lock_is_missed_while_others_are_extended(five, monkeypatch):
    """A complete listing has all locks, though each extension moves one to the end of the index."""
    leases = [taken(f"n{number}", ttl=30) for number in range(3 * PAGE)]
    survey, pages = LockManager.survey, []

    def extended_meanwhile(manager: LockManager, **how):
        replies = survey(manager, **how)
        if how["count"]:
            pages.append(how)
            manager.extend(leases[len(pages) * PAGE - 50 :][:50])
        return replies

    monkeypatch.setattr(LockManager, "survey", extended_meanwhile)

    snapshot = held_locks(limit=10_000, seconds=60)

    assert len(pages) >= 3
    assert snapshot.complete
    assert {held.name for held in snapshot.locks} == {f"n{number}" for number in range(3 * PAGE)}


def test_foreign_values_are_neither_sent_nor_block_a_listing(five):
    """Of megabytes of a foreign value a node sends the beginning only, and none of a foreign index entry."""
    taken("orders:7", ttl=60)
    on_each(five, "SET", "redlock:{big}:h", "x" * 3_000_000)
    on_each(five, "ZADD", "redlock:index", time.time() * 1000 + 1000, "{big}", 9e15, "{" + "y" * 1_000_000 + "}")

    row = next(row for row in locks["default"].survey(count=PAGE)[0].rows if row.slug == "{big}")
    snapshot = held_locks()
    for number in range(PAGE):
        on_each(five, "ZADD", "redlock:index", 1, "{" + f"{number}".rjust(11_000, "y") + "}")
    hidden = held_locks()

    assert row.value == "x" * 16_384
    assert ([held.name for held in snapshot.locks], snapshot.complete) == (["orders:7", "big"], True)
    assert (hidden.locks, hidden.complete) == ((), False)


# Stale keys


def test_values_of_another_program_are_compared_whole(five):
    """Two values with the same beginning are two holders; who saw one does not release the other."""
    first, second = ("locked by the nightly export on host " + host for host in ("web-1", "web-10"))
    on_each(five, "SET", "redlock:{orders:7}:h", first, "PX", 60_000)
    seen = found().fingerprint
    with pytest.raises(LockTakenError) as refused:
        lock("orders:7", wait=0).acquire()
    on_each(five, "SET", "redlock:{orders:7}:h", second, "PX", 60_000)
    changed = force_release("orders:7", seen)
    on_each(five[:2], "SET", "redlock:{orders:7}:h", first, "PX", 60_000)
    views = found().views

    assert (changed, refused.value.holder) == ("changed", {})
    assert len({view.fingerprint for view in views}) == 2
    assert force_release("orders:7", views[4].fingerprint) == "released"
    assert found().state is State.PARTIAL


# Actions of an operator


def test_shared_holders_that_were_listed_are_released_together(five):
    """Shared holders that were listed are released together, and none that joined after the listing."""
    first = taken(shared=True)
    seen = found().fingerprint
    first.release()
    second = taken(shared=True)
    outcomes = [force_release("orders:7", seen), ask_to_stop("orders:7", seen)]
    assert ask_to_stop("orders:7", found().fingerprint) == "shared"
    seen = found().fingerprint
    third, fourth = taken(shared=True), taken(shared=True)
    outcomes.append(force_release("orders:7", seen))
    kept = [second.extend(), third.extend()]
    seen = found().fingerprint
    third.release()

    assert outcomes == ["changed"] * 3
    assert kept == [True, True]
    assert force_release("orders:7", seen) == "released"
    assert [second.extend(), fourth.extend()] == [False, False]
    assert [second.reason, fourth.reason] == ["revoked", "revoked"]


def test_only_the_holder_that_was_seen_is_asked(five):
    """A request about a holder that is gone affects nobody; if too few nodes answer, its outcome is unknown."""
    old = taken()
    seen = found().fingerprint
    old.release()
    lease = taken()
    outcomes = [ask_to_stop("orders:7", seen)]
    assert lease.extend()
    lease.release()
    outcomes.append(ask_to_stop("orders:7", seen))
    for server in five[:3]:
        server.freeze()
    with override_settings(REDLOCK={"default": {"NODES": five.urls, "OPTIONS": OPTIONS | {"node_timeout": 0.2}}}):
        outcomes += [force_release("orders:7", seen), ask_to_stop("orders:7", seen)]

    assert outcomes == ["changed", "gone", "unknown", "unknown"]


def test_one_foreign_key_does_not_hide_the_others(five):
    """A key of another type beside a lock, or a fence that is not a number, costs that lock a detail, and no other."""
    taken()
    odd = ["abc", "", "1e30", "nan", "0x10", "9" * 5000, "-1", "\u0663"]
    for place, text in enumerate(odd):
        taken(f"odd:{place}")
        on_each(five, "SET", f"redlock:{{odd:{place}}}:f", text)
    for name in "qsf":
        taken(name)
        on_each(five, "ZADD", f"redlock:{{{name}}}:s", 9e15, "web-1:7.ab|1")
        on_each(five, "DEL", f"redlock:{{{name}}}:{name}")
        on_each(five, "HSET", f"redlock:{{{name}}}:{name}", "a", "b")
    with five[0].client() as client:  # a name that is missing in one index is requested by name
        client.delete("redlock:{odd:0}:h")
        client.zrem("redlock:index", "{odd:0}")

    snapshot = held_locks()

    assert (snapshot.trouble, [node.detail for node in snapshot.nodes]) == ("", [""] * 5)
    assert {held.name for held in snapshot.locks} == {"orders:7", *"qsf", *(f"odd:{place}" for place in range(8))}
    assert found("orders:7").fencing_token > 0
    assert {found(f"odd:{place}").fencing_token for place in range(8)} <= {0, 3}
    assert (found("odd:0").state, found("odd:1").fencing_token, found("q").waiters) == (State.DEGRADED, 0, ())


@pytest.mark.parametrize("kind", ["h", "f", "q", "s", "r"])
def test_keys_of_another_type_are_named(five, db, kind):
    """While the lock is listed, list, page and doctor name the lock, the node and the key, until it is gone."""
    key, how = f"redlock:{{orders:7}}:{kind}", {"shared": True} if kind == "r" else {}
    lease = taken(**how)
    with five[0].client() as client:
        client.delete(key)
        client.rpush(key, "x")
    # A waiter joins the queue, which needs most of these keys; it gets the lock if the other nodes grant it.
    with suppress(LockTakenError):
        taken(wait=0.5, **how).release()

    listed = run("redlock_list")
    found_wrong = findings("wrong-type")

    place = held_locks().nodes[0].name
    assert f"DEL {key} ({place})" in listed[1]
    assert json.loads(run("redlock_list", "--format=json")[0])["wrong_type"] == [
        {"name": "orders:7", "node": place, "key": key}
    ]
    assert f"DEL {key} ({place})" in run("redlock_inspect", "orders:7")[1]
    assert f"DEL {key} ({place})" in unescape(client_of("view_heldlock").get(LIST).content.decode())
    assert [(finding.node, finding.level) for finding in found_wrong] == [(place, "error")]
    assert ("'orders:7'" in found_wrong[0].text, f"DEL {key}" in found_wrong[0].remedy) == (True, True)
    with five[0].client() as client:
        client.delete(key)
    assert ("DEL" in run("redlock_list")[1], held_locks().wrong_type) == (False, ())
    lease.release()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("CONFIG", "SET", "maxmemory", "1"), "OOM"),
        (("CONFIG", "SET", "min-replicas-to-write", "1"), "NOREPLICAS"),
        (("ACL", "SETUSER", "default", "-zadd"), "NOPERM"),
    ],
)
def test_nodes_that_answer_and_would_take_no_lock(five, command, why):
    """A node that is full, or lost its replicas or a right, answers and gives no vote; a listing reports it."""
    held = taken()
    on_each(five[:3], *command)
    try:
        with pytest.raises(QuorumUnavailableError):
            lock("orders:8", wait=0).acquire()
        snapshot = held_locks()
        names = [node.name for node in snapshot.nodes if not node.votes]
        details = {node.detail for node in snapshot.nodes if not node.votes}
    finally:
        on_each(five[:3], "CONFIG", "SET", "maxmemory", "0")
        on_each(five[:3], "CONFIG", "SET", "min-replicas-to-write", "0")
        on_each(five[:3], "ACL", "SETUSER", "default", "+@all")

    assert (names, details) == ([node.name for node in snapshot.nodes[:3]], {why})
    assert "no lock can be taken" in snapshot.quorum
    assert snapshot.has_quorum
    assert [lock.name for lock in snapshot.locks] == [held.name]
    assert held_locks().trouble == ""


def test_any_number_of_names_can_be_asked_for_at_once(five):
    """One request to a node for thousands of names gets an answer for each."""
    lease = taken("n7")
    names = tuple(f"{{n{number}}}" for number in range(9000))

    replies = locks["default"].survey(slugs=names)

    for reply in replies.values():
        assert len(reply.rows) == 9000
        assert [row.slug for row in reply.rows if row.value] == ["{n7}"]
    assert lease.valid()
