"""More servers and another database than ``tox run -e chaos`` has, and a check that its judge notices violations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.lab.chaos.__main__ import one
from tests.lab.chaos.arena import Arena, Result
from tests.lab.chaos.clock import compiler
from tests.lab.chaos.history import History, Hold
from tests.lab.chaos.nemesis import PROFILES, Profile
from tests.managers import wait_until
from tests.services import PostgreSQL

# The counters are in a database of their own, which is not one of Django's test databases.
pytestmark = [pytest.mark.django_db(databases=[]), pytest.mark.usefixtures("unblocked")]

SECONDS = 10.0


def test_five_servers_and_postgresql(postgresql: PostgreSQL):
    """A short run with five servers, and with a database that lets a holder wait inside its transaction."""
    result = one(postgresql, ready(PROFILES["everything"]), SECONDS, nodes=5)

    assert not result.failures
    assert result.counted["fenced"][1]


def test_clock_of_a_server_can_be_set(tmp_path: Path):
    """The clock profile changes the time of the server, and a server outside the profile keeps its time."""
    with Arena(tmp_path, ready(Profile("clocks", clocks=True)), {}, nodes=2) as arena:
        stepped, other = (server.client() for server in arena.servers)
        arena.clocks[0].set(-3600.0)

        assert 3500 < other.time()[0] - stepped.time()[0] < 3700
        arena.clocks[0].set(0.0)
        wait_until(lambda: abs(other.time()[0] - stepped.time()[0]) < 60)  # a server may keep the time for a moment

        stepped.close()
        other.close()


def ready(profile: Profile) -> Profile:
    needs("a C compiler", compiler(), "apt-get install gcc libc6-dev")
    return profile


def hold(token: int, since: float, until: float) -> Hold:
    return Hold(worker=token, token=token, began=since - 0.1, since=since, deadline=until)


@pytest.mark.parametrize(
    ("holds", "overlaps", "wrong"),
    [
        ([hold(1, 1.0, 2.0), hold(2, 2.1, 3.0)], 0, 0),
        ([hold(1, 1.0, 2.0), hold(2, 1.9, 3.0)], 1, 0),
        ([hold(1, 1.0, 9.0), hold(2, 2.0, 3.0), hold(3, 4.0, 5.0)], 2, 0),
        ([hold(2, 1.0, 2.0), hold(1, 2.2, 3.0)], 0, 1),
        ([hold(1, 1.0, 2.0), hold(1, 2.2, 3.0)], 0, 2),
    ],
    ids=["in order", "overlap", "one over two", "older token later", "same token twice"],
)
def test_history_is_judged(holds: list[Hold], overlaps: int, wrong: int):
    """The judge finds intervals that overlap, and tokens that are not unique or out of order."""
    history = History(holds)

    assert len(history.overlaps()) == overlaps
    assert len(history.wrong_tokens()) == wrong


def test_time_until_the_next_holder_is_known(tmp_path: Path):
    """The time counts from the deadline of a worker that was killed with the lock, not of one that released it."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    first.write_text('["held", 7, 1.0, 1.1, 3.0]\n["ends", 2.0]\n')
    second.write_text('["held", 8, 2.0, 2.1, 4.0]\n')
    third.write_text('["held", 9, 3.0, 5.5, 7.5]\n')
    history = History()
    for number, (diary, killed) in enumerate([(first, 2.5), (second, 3.0), (third, float("inf"))]):
        history.read(number, diary, killed)

    assert history.freed() == [1.5]


@pytest.mark.parametrize(("since", "failures"), [(30.0, 0), (36.0, 1)])
def test_lock_of_a_dead_holder_must_be_free_in_time(since: float, failures: int):
    """One ttl and one election after the deadline, over a replicated store."""
    profile = Profile("p", store="etcd", ttl=3.0)
    dead, later = replace(hold(1, 0.0, 2.0), killed=1.0), hold(2, since, since + 3.0)
    counted = {"plain": (0, 0), "fenced": (0, 0)}

    result = Result(profile, 1, 60.0, History([dead, later]), 0, counted)

    assert len(result.failures) == failures


def test_diary_of_a_worker_that_was_killed_is_read(tmp_path: Path):
    """A killed worker's hold ends with the worker, not with a deadline that it did not live to see."""
    diary = tmp_path / "diary"
    events = [["held", 7, 1.0, 1.1, 3.0], ["done", "fenced"], ["longer", 5.0]]
    diary.write_text("".join(json.dumps(event) + "\n" for event in events))
    history = History()

    history.read(0, diary, killed=4.0)

    assert [each.end for each in history.holds] == [4.0]
    assert history.done["fenced"] == 1
