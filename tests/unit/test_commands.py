"""``redlock_list`` and ``redlock_clear``: their output, what they delete, and their exit codes."""

import builtins
import csv
import json
import re
import sys
from io import StringIO

import pytest
from django.core.management import call_command

from django_redlock import lock, locks
from django_redlock.inventory import MAX_NAMES, find_lock, held_locks
from django_redlock.management.commands import redlock_run
from tests.held import B, Terminal, findings, put, run, value
from tests.managers import stop_time

# redlock_list


def test_list_shows_a_table(five):
    """A line for each lock, with state, time left, votes, holder and token; standard error has what is down."""
    stop_time(locks["default"])
    put("orders:7", left=20)
    put("lonely", B, count=2)

    out, err, code = run("redlock_list")

    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["LOCK", "STATE", "HELD", "FOR", "WAITING", "REMAINING", "VOTES", "HOLDER", "SINCE", "TOKEN"]
    assert lines[1][:2] + lines[1][4:5] + lines[1][6:8] == ["orders:7", "held", "-", "s", "5/5"]
    assert float(lines[1][5]) == 19.7
    assert lines[2][:2] + lines[2][4:7] == ["lonely", "partial", "-", "-", "2/5"]
    assert "task shop.import id-1 on web-1:77" in out
    assert (err, code) == ("", 0)
    five[1].down = True
    out, err, code = run("redlock_list")
    assert ("4/5" in out, "4 of 5 nodes answer" in err, "n1 (" in err, code) == (True, True, True, 0)


def test_list_chooses(five):
    """Locks are chosen by name and state, sorted by any column, and cut to a number."""
    for number in range(3):
        put(f"orders:{number}", left=10 + number)
    put("lonely", B, count=2)

    def listed(*args: str) -> list[str]:
        return [entry["name"] for entry in json.loads(run("redlock_list", "--format=json", *args)[0])["locks"]]

    assert listed("--match=orders:[12]") == ["orders:1", "orders:2"]
    assert listed("--state=partial", "--state=split") == ["lonely"]
    assert listed("--sort=remaining")[:2] == ["orders:0", "orders:1"]
    assert listed("--sort=name") == ["lonely", "orders:0", "orders:1", "orders:2"]
    assert listed("--sort=votes")[0] == "lonely"
    assert listed("--limit=1") == ["orders:0"]
    for limit in ("0", "1.5"):
        assert "must be a whole number of at least 1" in run("redlock_list", f"--limit={limit}")[1]


def test_list_as_json(five):
    """The JSON has a version, the quorum, the nodes and the locks with the view of each node, and not the secret."""
    with lock("orders:7", ttl=30, label="nightly") as lease:
        out, _err, _code = run("redlock_list", "--format=json")

    data = json.loads(out)
    found = data["locks"][0]
    assert (data["version"], data["using"], data["complete"]) == (1, "default", True)
    assert data["quorum"] == {"nodes": 5, "answering": 5, "needed": 3, "met": True}
    assert (found["name"], found["state"], found["votes"], found["nodes"]) == ("orders:7", "held", 5, 5)
    assert (found["fencing_token"], found["ttl"]) == (lease.fencing_token, 30.0)
    assert found["holder"]["label"] == "nightly"
    assert lease.secret[:8] not in out
    for node in five[:3]:
        node.down = True
    data = json.loads(run("redlock_list", "--format=json")[0])
    # A program that reads no more than "complete" does not take an unknown list for an empty one.
    assert (data["complete"], data["locks"], data["quorum"]["met"]) == (False, [], False)


@pytest.mark.parametrize("command", ["redlock_list", "redlock_top --once", "redlock_clear"])
def test_commands_without_a_quorum(five, command):
    """With too few nodes a command shows no lock, does not say that there are more, deletes none and exits with 3."""
    for number in range(MAX_NAMES + 5):
        put(f"held:{number}", left=None)
    for node in five[:3]:
        node.down = True

    out, err, code = run(*command.split())

    assert "oo few nodes answer" in out + err
    assert [text for text in ("held:", "end first", "unknown or more") if text in out + err] == []
    assert code == 3


@pytest.mark.parametrize("command", ["redlock_list", "redlock_clear", "redlock_inspect orders:7"])
def test_commands_with_an_unknown_alias(five, command):
    """An alias that does not exist is an error that names the nearest, not a traceback."""
    _out, err, code = run(*command.split(), "--using=defautl")

    assert "did you mean 'default'" in err
    assert code == 2  # and 1, of redlock_inspect, means only "it is free"


# redlock_clear


def test_clear_is_dry_without_a_terminal(five, monkeypatch):
    """With --dry-run, or without a terminal and without --no-input, nothing is deleted; each key is explained."""
    put("orders:7", left=None, age=100)

    assert run("redlock_clear", "--dry-run", "--no-input")[0].endswith("Dry run: 1 key would be deleted.\n")
    out, _err, code = run("redlock_clear", stdin=StringIO())

    assert "orders:7 on n0, n1, n2, n3, n4: it has no expiry" in out
    assert "Holder: task shop.import id-1 on web-1:77." in out
    assert "Dry run: 1 key would be deleted. Nobody is there to ask" in out
    assert code == 0
    monkeypatch.setattr(sys, "stdin", None)  # as of a process that was started with its standard input closed
    monkeypatch.setattr(sys, "stdout", None)
    assert "Nobody is there to ask" in run("redlock_clear")[0]
    call_command("redlock_clear")  # writes nothing, as its standard output is closed, too
    assert find_lock("orders:7") is not None


def test_clear_deletes_what_is_stale(five):
    """With --no-input, or as Django spells it, stale keys are deleted, also of an age; what a quorum holds stays."""
    for name, age in (("young", 70), ("old", 500)):
        put(name, left=None, age=age)
    put("another", left=None, text="hello")
    assert run("redlock_clear", "--no-input", "--older-than=100")[0].endswith("Deleted 1 key.\n")
    assert [bool(find_lock(name)) for name in ("young", "old", "another")] == [True, False, True]

    put("endless", left=None, age=100)
    put("too long", left=1000, age=100)
    put("residue", left=10, age=100, count=2)
    put("foreign", left=50, count=1, text="hello")
    put("attempt", left=10, count=2)
    with lock("alive"):
        out, _err, code = run("redlock_clear", "--noinput")

        kept = [name for name in ("endless", "too long", "residue", "foreign", "attempt", "alive") if find_lock(name)]

    assert kept == ["attempt", "alive"]
    assert out.endswith("Deleted 6 keys.\n")
    assert code == 0


def test_clear_asks_at_a_terminal(five, monkeypatch):
    """At a terminal the command asks, and deletes after a yes what has not changed meanwhile; else nothing."""
    put("orders:7", left=None, age=100)
    asked = []
    monkeypatch.setattr(builtins, "input", lambda question: asked.append(question) or "y")
    refused = run("redlock_clear", stdin=Terminal())[1:]
    kept = find_lock("orders:7")
    monkeypatch.setattr(builtins, "input", lambda question: "yes")

    out, _err, _code = run("redlock_clear", stdin=Terminal())

    assert (refused, bool(kept)) == (("Nothing was deleted.", 1), True)
    assert asked == ["\nDelete 1 key?\n\n    Type 'yes' to continue, or 'no' to cancel: "]
    assert out.endswith("Deleted 1 key.\n")
    assert find_lock("orders:7") is None
    put("orders:7", left=10, age=100, count=2)
    monkeypatch.setattr(builtins, "input", lambda question: put("orders:7", B, 30) and "yes")
    out, _err, code = run("redlock_clear", stdin=Terminal())
    assert ("orders:7: left alone, because it changed meanwhile." in out, code) == (True, 0)
    assert find_lock("orders:7") is not None


def test_clear_by_name(five):
    """A key that no index has is found and deleted by its name; a name that no lock can have is refused."""
    put("orders:7", left=None, age=100)
    for node in five:
        node.store.records.index.clear()

    assert run("redlock_clear", "--no-input") == ("Nothing is stale.\n", "", 0)
    assert run("redlock_clear", "--no-input", "--name=orders:7")[0].endswith("Deleted 1 key.\n")
    assert find_lock("orders:7") is None
    assert run("redlock_clear", "--name", "x" * 10_000)[2] == 2


ODD, QUOTED = 'Ada\'s list\tof "ü"', r'"redlock:{Ada\x27s list\x09of \x22\xc3\xbc\x22}:h"'


def test_keys_of_other_programs_on_real_servers(five_servers, caplog):
    """Such keys are recognised and deleted; one of another type stays, and commands and log say so and how to do it."""
    with lock("orders:7"):
        held_locks()  # connects
    for server in five_servers:
        with server.client() as client:
            client.set("redlock:{persisted}:h", value(age=100))
            client.rpush("redlock:{list}:h", "x")
            client.rpush(f"redlock:{{{ODD}}}:h", "x")
            client.set("redlock:{bytes}:h", b"\x80\x04\x95")  # a pickle
            client.zadd("redlock:index", {"{persisted}": "inf", "{list}": "inf", f"{{{ODD}}}": "inf", "{bytes}": "inf"})
    with five_servers[0].client() as client:
        client.set("redlock:{foreign}:h", "hello", px=50_000)
        client.zadd("redlock:index", {"{foreign}": "inf"})

    out, err, code = run("redlock_clear", "--no-input")
    inspected = run("redlock_inspect", ODD)
    released = run("redlock_release", "list", "--no-input", "--polite", "1")
    remedies = [finding.remedy for finding in findings("wrong-type")]

    for name, why in (
        ("persisted", "it has no expiry"),
        ("list", "it is empty or not a string"),
        ("bytes", "it is empty or not a string"),
        ("foreign", "its value"),
    ):
        assert re.search(rf"^{name} on .*: {why}", out, re.MULTILINE)
    assert out.endswith("Deleted 2 keys.\n")
    for name in ("list", "bytes"):
        assert f"{name}: a node that has it did not delete it. Delete it there: DEL redlock:{{{name}}}:h" in err
    assert code == 1
    assert "not a string" in inspected[0]
    assert f"DEL {QUOTED} (" in inspected[1]
    assert [remedy.partition(" on this node")[0] for remedy in remedies].count(f"DEL {QUOTED}") == 5
    for told in (err, run("redlock_release", ODD, "--no-input")[0]):
        assert f"Delete it there: DEL {QUOTED}\n" in told
    assert "list: another program holds it; it cannot be asked." in released[0]
    assert "list: not released: its key is not a string, so another program wrote it." in released[0]
    assert "Delete it there: DEL redlock:{list}:h" in released[0]
    assert (released[1].splitlines()[-1], released[2]) == ("Not all were released.", 1)
    assert "lock not released by force: list (wrong_type)" in caplog.text
    assert "Delete it there: DEL redlock:{bytes}:h" in run("redlock_release", "bytes", "--no-input")[0]


CELLS = {
    "a,b": "a,b",
    **{f"{sign}1+1": f"'{sign}1+1" for sign in ("=", "-", "\N{FULLWIDTH EQUALS SIGN}")},
    " =1+1": " '=1+1",
    "\t=1+1": "\\t=1+1",
    "a;=1+1": "a;'=1+1",
    'a; "=1+1': "a; \"'=1+1",
    "a=1;b": "a=1;b",
}


def test_list_as_csv(five):
    """A name that begins as a formula does, or has such a part after a semicolon, is marked as text."""
    for name in CELLS:
        put(name)

    titles, *lines = csv.reader(StringIO(run("redlock_list", "--format=csv")[0]))

    assert titles[:3] == ["name", "state", "remaining"]
    assert {line[0] for line in lines} == set(CELLS.values())
    assert {line[-1] for line in lines} == {"task shop.import id-1 on web-1:77"}


# redlock_run; with real programs: tests/server/live/test_run.py


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("n -- printf a -- b -- c", "printf a -- b -- c"),
        ("n -- git checkout -- f", "git checkout -- f"),
        ("n --ttl 30 -- kubectl exec pod -- ls --wait 3", "kubectl exec pod -- ls --wait 3"),
        ("--ttl 30 n -- env -- ls -l", "env -- ls -l"),
        ("-- n sh -- b", "sh -- b"),
        ("n git checkout -- f", "git checkout -- f"),
        ("n ls --ttl 5 -l", "ls --ttl 5 -l"),
    ],
)
def test_run_leaves_its_program_every_argument(monkeypatch, line, program):
    """Only the two dashes in front of the program belong to ``redlock_run``, and only options before the program."""
    monkeypatch.setattr(redlock_run, "_run", lambda found, *_: found_by.append(found) or 0)
    found_by = []

    call_command("redlock_run", *line.split())

    assert found_by == [program.split()]
