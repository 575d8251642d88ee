"""The admin page *Held locks*: what it shows, who may release, and what crafted requests do (nothing)."""

import json
import os
import re
import shlex
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from html import unescape
from io import StringIO
from urllib.parse import unquote, urlencode

import pytest
from celery import Celery, _state
from django import urls
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.core.management import call_command
from django.test import Client, override_settings
from django.utils import translation
from django.utils.timezone import now

from django_redlock import lock, locks
from django_redlock.admin import HeldLockAdmin
from django_redlock.core.names import SHOWN, slug
from django_redlock.inventory import MAX_NAMES, ask_to_stop
from django_redlock.models import HeldLock, key_of
from django_redlock.nodes.memory import MemoryNode
from tests.held import (
    DETAIL,
    FIVE,
    LIST,
    LIVE,
    NODES,
    A,
    B,
    act,
    client_of,
    look,
    note_rounds,
    only_together,
    put,
    row_key,
    run,
    shown,
    value,
)
from tests.managers import stop_time

pytestmark = pytest.mark.django_db

NAME = re.compile(r'class="redlock-name" data-lock="\w+/%7B([^"]*)%7D"')


def names(response) -> list[str]:
    return [unquote(name) for name in NAME.findall(response.content.decode())]


def text_of(client: Client, path: str, **query: str) -> str:
    return client.get(path, query).content.decode()


def said(response) -> list[str]:
    return [str(message) for message in response.context["messages"]]


def tiles(client: Client) -> dict[str, str]:
    """Return the values of the tiles above the list, by their labels."""
    return {tile.label: tile.value for tile in client.get(LIST).context["cl"].tiles}


@contextmanager
def down(nodes, count: int = 3):
    """Let some nodes be down for a while."""
    for node in nodes[:count]:
        node.down = True
    yield
    for node in nodes[:count]:
        node.down = False


@contextmanager
def waited_for(name: str):
    """Let somebody wait for a lock that is held."""
    waiting = threading.Thread(target=lambda: lock(name, wait=30).acquire().release())
    waiting.start()
    while not look(name).waiters:
        pass
    yield
    waiting.join(30)


# What is shown


def test_a_held_lock_is_shown(five, viewer):
    """The list shows name, holder, remaining time and votes in words, and names a node that is down, in a banner."""
    with lock("orders:7", ttl=30, label="nightly import") as lease:
        page = text_of(viewer, LIST)
        with translation.override("de"):
            assert "Gehaltene Sperren" in viewer.get(LIST, headers={"accept-language": "de"}).content.decode()
        five[2].down = True
        degraded = text_of(viewer, LIST)
        assert lease.valid()

    assert "<title>Held locks" in page
    assert "orders:7" in page
    assert "nightly import" in page
    assert re.search(r'data-left="(2\d)\.\d"><time datetime="PT\1S">0:\1<', page)
    assert "5 of 5 nodes</span>" in page
    assert "5 of 5 nodes answer; 3 needed. 2 more may fail." in page
    assert "4 of 5 nodes answer; 3 needed. 1 more may fail." in degraded
    assert "without n2" in degraded
    assert "redlock-degraded" in degraded


@pytest.mark.parametrize("aware", [True, False])
def test_lock_of_which_the_work_is_over_is_shown_as_held_until(five, viewer, monkeypatch, aware):
    """Nobody renews it, so the pages do not show a lease; operators see when it ends, whatever USE_TZ says."""
    monkeypatch.setattr(settings, "USE_TZ", aware)  # not override_settings, which uses connections of other tests
    key = put("nightly", left=3600, state="held", kind="command", label="backup", ttl=3000.0)

    for page in (text_of(viewer, LIST), text_of(viewer, DETAIL, key=key)):
        assert re.search(r">held until (\d{4}-\d\d-\d\d \d\d:\d\d|\d\d:\d\d:\d\d)<", page)
        assert "backup (held)" in page
    assert "<dt>Lease</dt><dd>\N{EN DASH}</dd>" in text_of(viewer, DETAIL, key=key)


def test_without_a_quorum_nothing_is_said_of_the_locks(five, viewer):
    """While too few nodes answer, each page says that it does not know, and not that nothing is held, or as of when."""
    put("orders:7")
    with down(five):
        queries: tuple[dict[str, str], ...] = ({}, {"q": "orders"}, {"state": "held"})
        found = [text_of(viewer, LIST, **query) for query in queries]
        live, page = viewer.get(LIVE).json(), text_of(viewer, DETAIL, key=key_of(shown(A), "default", "{orders:7}"))

        assert names(viewer.get(LIST)) == []
    for each in found:
        assert "Too few to say which locks are held" in each
        assert "Too few nodes answer to say which locks are held." in each
        assert re.findall("No lock is held.|No lock matches.|0 held locks|As of", each) == []
    assert live["unknown"] == ["default"]
    assert "Trouble:</strong> n0 (refused), n1 (refused), n2 (refused)." in page
    assert ("Asked at" in page, "As of" in page) == (True, False)
    assert viewer.get(LIVE).json()["unknown"] == []


def test_tiles_say_how_much_is_wrong_and_lead_to_it(five, viewer):
    """Each state in trouble has a tile, with the number of its locks; without a quorum the number is unknown."""
    put("healthy", age=3720)
    put("endless", left=None)
    put("degraded", count=4)

    values = tiles(viewer)
    assert (values["All"], values["No expiry"], values["Degraded"], values["Waited for"]) == ("3", "1", "1", "0")
    assert values["Longest hold"].startswith("1 h")
    assert "never ends" in text_of(viewer, LIST)
    assert values["Nodes, 2 spare"] == "5/5"
    [tile] = [tile for tile in viewer.get(LIST).context["cl"].tiles if tile.label == "Degraded"]
    assert names(viewer.get(LIST + tile.url)) == ["degraded"]

    with down(five):
        values = tiles(viewer)
    assert (values["All"], values["No expiry"], values["Nodes, 0 spare"]) == ("?", "?", "2/5")


def test_a_list_that_is_cut_short_says_so(five, viewer, settings):
    """Counts are lower bounds, a state that no listed lock has is unknown, and a whole name finds a lock beyond it."""
    settings.USE_THOUSAND_SEPARATOR = True  # would make 10,00+ of 1000+
    stop_time(locks["default"])
    for number in range(MAX_NAMES + 5):
        put(f"held:{number}", left=10)
    put("late", left=25)

    page, values = text_of(viewer, LIST), tiles(viewer)
    matching = text_of(viewer, LIST, q="lat")

    counted = {*re.findall(r"(\S*\d\S*)\s+held locks", page)}
    assert counted == {f'data-counted="{values["All"]}', values["All"]}
    assert "The list may lack locks" in page
    assert values["All"].endswith("+")
    assert [values[label] for label in ("No expiry", "Orphaned", "Degraded")] == ["?", "?", "?"]
    assert names(viewer.get(LIST, {"q": "late"})) == ["late"]
    assert "None of the locks that this page has asked for matches." in matching
    assert "No lock matches." not in matching


@pytest.mark.parametrize("page", [LIST, NODES])
def test_settings_that_cannot_be_used_are_shown(viewer, page):
    """A wrong setting, or a wrong alias, is a message on the page, with what to write instead."""
    for setting in (None, {"default": {"NODES": []}}):
        with override_settings(REDLOCK=setting):
            assert "REDLOCK" in text_of(viewer, page)


def test_the_secret_is_on_no_page(five, operator):
    """The lock's secret is neither on the list, nor in its JSON, nor on the confirmation, nor in the log."""
    key = put("orders:7")

    found = [operator.get(LIST), operator.get(LIVE), operator.get(DETAIL, {"key": key})]
    found += [act(operator, "release", key, confirmed=False), act(operator, "release", key)]

    assert shown(A) in found[3].content.decode()
    assert [page for page in found if A[:8] in page.content.decode()] == []
    assert A[:8] not in LogEntry.objects.get().change_message


HOSTILE = "x\x1b[2J\nERROR y\u202e\u2028\x9b31m\x00\r\t=z<script>"  # what others may write into a name or a label


def test_what_others_wrote_is_text_on_every_page(five, operator):
    """Markup and control characters in names, labels, hosts and an operator's reason are escaped on every page."""
    key = put(HOSTILE, kind=f"task{HOSTILE}", label=HOSTILE, ref=HOSTILE, host=f"web{HOSTILE}")

    found = {"list": text_of(operator, LIST), "lock": text_of(operator, DETAIL, key=key)}
    found |= {f"live {part}": str(text) for part, text in json.loads(text_of(operator, LIVE)).items()}
    for action, step in (("stop", False), ("release", False), ("stop", True), ("release", True)):
        page = act(operator, action, key, confirmed=step, reason=HOSTILE).content.decode()
        found |= {f"{action} {step}": page, f"after {action} {step}": text_of(operator, DETAIL, key=key)}

    for what, page in found.items():
        assert (what, {letter for letter in page if not letter.isprintable()} - {"\n"}) == (what, set())
        assert (what, re.findall(r"(?m)^ERROR|=z<script>", page)) == (what, [])
    assert "&lt;script&gt;" in found["lock"]
    assert "ERROR y" in found["release True"]


def test_several_aliases_are_shown_together(five, operator):
    """Each alias has a column, a filter and a banner; one without a quorum hides nothing of the other."""
    aliases = {"default": {"NODES": FIVE}, "other": {"NODES": ["memory://b0", "memory://b1"], "KEY_PREFIX": "other"}}
    with override_settings(REDLOCK=aliases), lock("a"), lock("b", using="other"):
        both, one = operator.get(LIST), operator.get(LIST, {"using": "other"})
        asked = act(operator, "release", row_key("a"), confirmed=False).content.decode()
        with down(locks["other"].nodes, 1):
            data, values = operator.get(LIVE).json(), tiles(operator)

    assert sorted(names(both)) == ["a", "b"]
    assert names(one) == ["b"]
    assert "column-alias_name" in both.content.decode()
    assert ">Alias</span> other</td>" in both.content.decode()  # where a row is a card, no header says what the word is
    assert "<dt>Alias</dt><dd>default</dd>" in asked
    assert data["unknown"] == ["other"]
    assert NAME.findall(data["rows"]) == ["a"]
    assert "Too few nodes answer to say which locks of other are held." in data["nodes"]
    assert (values["All"], values["Orphaned"], values["Longest hold"][-1]) == ("1+", "?", "+")


@pytest.mark.parametrize("length", [300, 700])
def test_no_address_is_longer_than_servers_take(five, viewer, length):
    """A name that another program wrote may be too long for an address (Gunicorn takes 4,094 bytes): it has no link."""
    for node in five:
        node.store.put("{" + "é" * length + "}", "other", 200)

    page = text_of(viewer, LIST)

    assert max(map(len, re.findall(r'href="([^"]*)"', page))) <= 4000
    assert ('<a class="redlock-name"' in page) is (length == 300)
    assert 'class="redlock-name"' in page


# What a page costs


def test_each_page_asks_each_node_once(five, operator, monkeypatch, django_assert_num_queries):
    """One request to each node brings all that a page shows; the database is asked for operator and log alone."""
    for number in range(30):
        key = put(f"orders:{number}")
    queries = [(LIST, {}), (LIST, {"q": "orders", "waiting": "yes"}), (LIST, {"state": "held", "o": "-0"}), (LIVE, {})]
    shows = [partial(operator.get, *each) for each in [*queries, (DETAIL, {"key": key}), (NODES, {})]]
    shows.append(partial(act, operator, "release", key, confirmed=False))
    asked = note_rounds(monkeypatch)

    for show in shows:
        asked.clear()
        show()
        assert sorted(node for round in asked for node in round.requests) == [0, 1, 2, 3, 4]
    with django_assert_num_queries(5):
        operator.get(LIST)


@pytest.mark.parametrize("page", [LIST, NODES])
def test_a_page_asks_all_aliases_at_once(viewer, monkeypatch, page):
    """Silent nodes of several aliases are waited for only once."""
    names = ["default", "other", "third"]
    only_together(monkeypatch, len(names))
    only_together(monkeypatch, len(names), MemoryNode, "connect")
    with override_settings(REDLOCK={name: {"NODES": ["memory://a"], "KEY_PREFIX": name} for name in names}):
        text = text_of(viewer, page)

    assert text.count("1 of 1 nodes answer") == len(names)


# Filters, search, order, pages


def test_filter_search_sort_and_pages(five, viewer):
    """The list can be filtered, by a node's votes as well, searched by name and holder, sorted and leafed through."""
    stop_time(locks["default"])
    for number in range(59):
        put(f"orders:{number:02}", left=200 + number / 10)
    put("orders:59", left=9.9, age=100)
    put("lonely", count=2, kind="view", left=5)
    put("orders:00", B, nodes=five[4:])

    assert names(viewer.get(LIST))[:3] == ["orders:00", "lonely", "orders:59"]  # the worst, then the longest hold
    assert len(names(viewer.get(LIST))) == 50
    assert len(names(viewer.get(LIST, {"p": "2"}))) == 11
    assert names(viewer.get(LIST, {"state": "partial"})) == ["lonely"]
    assert names(viewer.get(LIST, {"kind": "view"})) == ["lonely"]
    assert names(viewer.get(LIST, {"left": "soon"})) == ["orders:59"]
    assert len(names(viewer.get(LIST, {"node": "n1", "all": ""}))) == 61
    assert {"orders:00", "lonely"} & set(names(viewer.get(LIST, {"node": "n4", "all": ""}))) == set()
    assert names(viewer.get(LIST, {"q": "ORDERS 59"})) == ["orders:59"]
    assert len(names(viewer.get(LIST, {"q": "shop.import web-1", "all": ""}))) == 61
    assert names(viewer.get(LIST, {"o": "-0"}))[0] == "orders:59"
    assert names(viewer.get(LIST, {"o": "5.0"}))[:2] == ["orders:59", "orders:00"]
    assert names(viewer.get(LIST, {"o": "-5"}))[0] == "orders:58"


def test_a_lock_is_found_by_its_whole_name(five, viewer):
    """A name that the list cuts short finds its lock, and the names of one lock, as its lease joins them, find each."""
    long = "Заказ:" + "ж" * 120
    for name in (long, long + "ж", "stock:1", "stock:2"):
        put(name)

    def found(text: str) -> list[str]:
        return sorted(row.name for row in viewer.get(LIST, {"q": text}).context["cl"].result_list)

    with lock(long + "!", limit=2):
        [permit] = found(long + "!")

    assert permit.startswith(f"{long[:SHOWN]}… #")
    assert [len(found(text)) for text in (long, long[:50], long + "?")] == [1, 2, 0]
    assert found("stock:1, stock:2") == ["stock:1", "stock:2"]


def test_what_people_wait_for_comes_first(five, viewer):
    """Among many that are held for longer, it is on the first screen; a tile and a filter show it alone."""
    for number in range(60):
        put(f"old:{number:02}", left=10 + number / 10, age=5000)
    put("endless", left=None, age=5000)
    lease = lock("wanted", ttl=29, renew=False).acquire()
    with waited_for("wanted"), waited_for("wanted"):
        found, values = names(viewer.get(LIST)), tiles(viewer)
        filtered = names(viewer.get(LIST, {"waiting": "yes"}))
        assert f":{os.getpid()} #" in text_of(viewer, DETAIL, key=row_key("wanted"))
        out = StringIO()
        call_command("redlock_top", "--once", stdout=out)
        lease.release()

    assert (found[:2], filtered, values["Waited for"]) == (["wanted", "endless"], ["wanted"], "1, 2 waiting")
    assert re.search(r"^LOCK.*\nwanted ", out.getvalue(), re.MULTILINE)
    assert names(viewer.get(LIST, {"waiting": "yes"})) == []


CRAFTED = [
    {"state": "held\x00", "kind": "'; DROP TABLE", "waiting": "no"},
    {"using": "nobody"},
    {"o": "-99.7.x.-"},
    {"o": "9" * 5000, "node": "n" * 5000},
    {"p": "9" * 5000},
    {"q": "a\x00b"},
    {"q": "x" * 1_000_000},
    {"_facets": "True", "_popup": "1", "all": ""},
    {"e": "1", "lock__user__password": "x"},
    {"_selected_action": "x", "action": "release", "confirmed": "yes"},
]
KEYS = ["", "a/b/c/d", "%00/default/%00", "x/default/%ff", "x/nobody/y", "\x00", "x" * 100_000]


@pytest.mark.parametrize("query", CRAFTED, ids=lambda query: urlencode(query)[:40])
def test_crafted_queries_do_nothing(five, operator, query):
    """No query is an error of the server, and none releases a lock."""
    put("orders:7")

    responses = [operator.get(page, query) for page in (LIST, LIVE)]

    assert [response.status_code for response in responses] == [200, 200]
    assert max(len(response.content) for response in responses) < 100_000
    assert look("orders:7") is not None


def test_crafted_keys_do_nothing(five, operator):
    """What was not offered on a page cannot be released, and has no page; it is no error of the server."""
    put("orders:7")

    for key in KEYS:
        for confirmed in (True, False):
            assert act(operator, "release", key, confirmed=confirmed).status_code == 200
        assert operator.get(DETAIL, {"key": key}).status_code in (200, 404)
    for path in ("x/change/", "x/history/", "x/delete/", "add/", "x/"):  # pages for rows, which the model has not
        assert operator.get(LIST + path, follow=True).status_code in (200, 403, 404)
    too_long = key_of("0" * 12, "default", "{" + "a" * 9000 + "}")  # cut short, it would name another lock
    assert operator.get(DETAIL, {"key": too_long}).status_code == 404
    assert look("orders:7") is not None


# Who may do what


def test_strangers_are_sent_to_the_login(five):
    """Without a login no page can be read and nothing released; staff who may not look, and other sites, get a 403."""
    key = put("orders:7")

    for response in (*map(Client().get, (LIST, LIVE, DETAIL, NODES)), act(Client(), "release", key, follow=False)):
        assert response.status_code == 302
        assert "/login/" in response.url
    staff = client_of("release_heldlock")
    refused = [*map(staff.get, (LIST, LIVE, DETAIL, NODES)), act(staff, "release", key)]
    assert [response.status_code for response in refused] == [403] * 5
    checked = Client(enforce_csrf_checks=True)
    checked.force_login(User.objects.create_superuser("root"))
    assert act(checked, "release", key).status_code == 403
    assert look("orders:7") is not None


@pytest.mark.parametrize("both", [True, False])
def test_pages_of_another_site_lead_to_that_site(five, viewer, both):
    """No link of the page on a site of one's own leaves it, whether Django's own site has the page or not."""
    key, mine, django = put("orders:7"), admin.AdminSite(name="mine"), admin.AdminSite()
    mine.register(HeldLock, HeldLockAdmin)
    if both:
        django.register(HeldLock, HeldLockAdmin)

    class Urls:
        urlpatterns = (urls.path("admin/", django.urls), urls.path("ops/", mine.urls))

    with override_settings(ROOT_URLCONF=Urls):
        for page in (LIST, LIVE, DETAIL, NODES):
            text = text_of(viewer, page.replace("/admin/", "/ops/"), key=key).replace('\\"', '"')
            assert "orders:7" in text or page == NODES
            links = re.findall(r'(?:href|action|data-url)="(/[^"]+)"', text)
            assert [link for link in links if not link.startswith(("/ops/", "/static/"))] == []


def test_who_may_only_look_cannot_act(five, viewer):
    """With the view permission alone there is no action, and posting one does nothing but show the list."""
    key = put("orders:7")

    page = text_of(viewer, LIST)
    answers = [act(viewer, action, key, confirmed=step) for action in ("stop", "release") for step in (True, False)]

    assert 'name="action"' not in page
    assert "redlock-buttons" not in text_of(viewer, DETAIL, key=key)
    assert [names(answer) for answer in answers] == [["orders:7"]] * 4
    assert look("orders:7") is not None
    assert not LogEntry.objects.exists()


# Actions


@pytest.mark.parametrize("action", ["release", "stop"])
def test_each_action_asks_first(five, operator, action):
    """Each action leads to a page that lists every name with its holder, says what will happen, and does nothing."""
    keys = [put("orders:7", left=None, process="1f.ab"), put("orders:8", B, process="1f.ab")]

    page = act(operator, action, *keys, confirmed=False).content.decode()

    assert f'name="action" value="{action}"' in page
    assert re.findall(r'<strong class="redlock-name">([^<]*)<', page) == ["orders:7", "orders:8"]
    assert "task shop.import id-1 on web-1:77" in page
    assert "never ends" in page
    assert "<dt>Alias</dt>" not in page  # there is one only
    assert "at its next renewal or, if nobody renews the lock, when it asks the nodes" in page or action == "stop"
    assert look("orders:7") is not None
    assert not LogEntry.objects.exists()


def test_a_confirmed_release_is_done_and_audited(five, operator):
    """The confirmed release frees the lock and logs who, whose, which holder, the time left and why, with a link."""
    response = act(operator, "release", key := put("orders:7"), reason="worker killed\n")

    assert look("orders:7") is None
    assert said(response) == ["“orders:7” was released."]
    after = text_of(operator, DETAIL, key=key)
    assert ("Nobody holds this lock now." in after, "Released by force (released)." in after) == (True, True)
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_id, entry.action_flag) == ("staff", "orders:7", DELETION)
    assert entry.content_type.model == "heldlock"
    assert entry.change_message.startswith(
        "Released by force (released). Alias default, holder task shop.import id-1 on web-1:77, "
        f"fingerprint {shown(A)}, 1"
    )
    assert entry.change_message.endswith("Reason: worker killed")
    put("orders:7")
    linked = operator.get(entry.get_admin_url(), follow=True)  # there is no page to change one
    assert linked.redirect_chain[0][0] == f"{LIST}?q=orders%3A7"
    assert names(linked) == ["orders:7"]


def test_other_names_of_a_released_holder_are_said(five, operator):
    """A lock over several names keeps those that were not released; page and command say which, until none is left."""
    for group in ("abc", "de"):
        lock([*group], renew=False).acquire()
    put("other")

    said_of = [said(act(operator, "release", *map(row_key, names))) for names in ("ad", "be")]
    out = run("redlock_release", "c", "other", "--no-input")[0]

    still = "The holder of “%s” still has %s, until its lease or its minimum hold ends."
    assert said_of[0][2:] == [still % ("a", "b, c"), still % ("d", "e")]
    assert said_of[1][2:] == [still % ("b", "c")]
    assert out.endswith("c: released.\nother: released.\n")
    lock(["x", "y\n"], renew=False).acquire()
    assert run("redlock_release", "x", "--no-input")[0].endswith(
        "x: released.\nThe holder of x still has y\\n, until its lease or its minimum hold ends.\n"
    )


@pytest.mark.parametrize("action", ["stop", "release"])
def test_a_lock_that_changed_hands_is_left_alone(five, operator, action):
    """It is not offered, and keeps its holder when confirmed; without a quorum nothing is sent. No log has either."""
    seen, gone = put("orders:7"), key_of(shown(A), "default", "{gone}")
    with down(five):
        assert "too few nodes answered" in said(act(operator, action, seen))[0]
    put("orders:7", B)

    page = act(operator, action, seen, confirmed=False).content.decode()
    response = act(operator, action, seen, gone)

    assert ("it changed hands since you looked" in page, 'name="confirmed"' in page) == (True, False)
    assert said(response) == [
        "“orders:7” was left alone: it changed hands since you looked. Look again and decide anew.",
        "“gone” was left alone: nobody holds it any more.",
    ]
    assert look("orders:7").fingerprint == shown(B)
    assert not LogEntry.objects.exists()
    assert "asked to stop" not in text_of(operator, LIST)


def test_a_holder_is_asked_to_stop(five, operator):
    """Its lease is lost with the reason, the lock stays held, and the log and its row, but no other alias, show it."""
    with override_settings(REDLOCK={"default": {"NODES": FIVE}, "other": {"NODES": FIVE, "KEY_PREFIX": "other"}}):
        lease = lock("orders:7").acquire()
        other = lock("orders:7", using="other").acquire()
        keys = {alias: row_key("orders:7", alias) for alias in ("default", "other")}
        response = act(operator, "stop", keys["default"], reason="too slow")
        LogEntry.objects.update(action_time=now() - timedelta(minutes=14, seconds=5))
        listed = text_of(operator, LIST)
        detail = {alias: text_of(operator, DETAIL, key=key) for alias, key in keys.items()}

    assert "was asked to stop" in said(response)[0]
    assert re.match("Asked its holder to stop .asked.*Reason: too slow$", LogEntry.objects.get().change_message)
    assert listed.count("asked to stop 14 min ago") == 1
    assert ["asked to stop 14 min ago" in text for text in detail.values()] == [True, False]
    assert ["too slow" in text for text in detail.values()] == [True, False]
    assert (lease.extend(), lease.reason, other.extend()) == (False, "revoked", True)
    assert look("orders:7") is not None
    other.release()


def test_an_action_of_the_project_gets_the_selected_locks(five, operator, monkeypatch):
    """It gets them as the second argument, as in any list of Django's."""
    got = []

    @admin.action(description="Note")
    def note(model_admin, request, queryset):
        got.extend(lock.name for lock in queryset)

    monkeypatch.setattr(type(admin.site.get_model_admin(HeldLock)), "actions", ["stop", "release", note])
    put("orders:8")

    act(operator, "note", put("orders:7"), confirmed=False)

    assert got == ["orders:7"]


def test_no_more_is_released_than_one_can_read(five, operator):
    """Neither too many locks, nor all: that includes locks that were on no page."""
    keys = [put(f"orders:{number}") for number in range(21)]

    everything = act(operator, "release", keys[0], confirmed=False, select_across="1")
    many = act(operator, "release", *keys)

    assert "Nothing was done" in said(everything)[0]
    assert "at most 20 locks" in said(many)[0]
    assert look("orders:0") is not None


def test_names_survive_the_form(five, operator):
    strange = ["a\nb\x00c", "a/b%2F", "x" * 5000, "ключ 🔑", "'\"&", "{}~*[?"]
    keys = [put(name) for name in strange]
    assert all(map(str.isascii, keys))
    page = act(operator, "release", *keys, confirmed=False).content.decode()

    act(operator, "release", *re.findall(r'name="_selected_action" value="([^"]*)"', page))

    assert [look(name) for name in strange] == [None] * len(strange)


def test_a_shared_lock_is_no_one_holders(five, operator):
    """Several holders at once cannot be asked one by one, and all of them lose the lock; the page says so."""
    with lock("orders:7", shared=True) as lease:
        key = row_key("orders:7")
        page = act(operator, "stop", key, confirmed=False).content.decode()
        assert ("held by several holders" in page, 'name="confirmed"' in page) == (True, False)
        assert "held by several holders" in said(act(operator, "stop", key))[0]
        page = act(operator, "release", key, confirmed=False).content.decode()
        assert ('value="release"' in page, 'value="stop"' in page, "All of them lose it" in page) == (True, False, True)
        assert lease.extend()
    assert "All of them lose it" not in act(operator, "release", put("a"), confirmed=False).content.decode()


@pytest.mark.parametrize("how", [{}, {"process": "1f.ab", "state": "held"}])
def test_nobody_is_asked_to_stop_who_would_not_learn_of_it(five, operator, how):
    """A lock that nobody renews, or whose work is over, ends by itself; page and command say so and send no request."""
    key = put("orders:7", **how)

    page = act(operator, "stop", key, confirmed=False).content.decode()
    assert ("nobody renews it" in page, 'name="confirmed"' in page) == (True, False)
    assert said(act(operator, "stop", key)) == [
        "“orders:7” was left alone: nobody renews it, so its holder cannot be asked to stop. It ends by itself."
    ]
    page = act(operator, "release", key, confirmed=False).content.decode()
    assert ('value="release"' in page, 'value="stop"' in page) == (True, False)
    assert ask_to_stop("orders:7", key.partition("/")[0]) == "unrenewed"
    out = run("redlock_release", "orders:7", "--polite=60", "--no-input")[0]
    assert out.endswith("orders:7: nobody renews it; its holder cannot be asked.\norders:7: released.\n")


def test_holder_that_extends_its_lock_by_hand_is_asked_to_stop(five, operator):
    """Nothing renews the lock, but its next extend() learns of the request."""
    key = put("orders:7", extensions=1)

    assert 'name="confirmed"' in act(operator, "stop", key, confirmed=False).content.decode()
    assert ask_to_stop("orders:7", key.partition("/")[0]) == "asked"


@pytest.mark.parametrize("text", ["theirs", "c" * 32])
def test_another_program_is_not_asked_to_stop(five, operator, text):
    """Another program would not learn of a request to stop, so the confirmation does not offer it."""
    key = put("orders:7", text=text)

    assert ask_to_stop("orders:7", key.partition("/")[0]) == "foreign"
    page = act(operator, "stop", key, confirmed=False).content.decode()
    assert ("another program holds it" in page, 'name="confirmed"' in page) == (True, False)
    page = act(operator, "release", key, confirmed=False).content.decode()
    assert ('value="release"' in page, 'value="stop"' in page) == (True, False)
    assert "another program holds it" in said(act(operator, "stop", key))[0]
    assert said(act(operator, "release", key)) == ["“orders:7” was released."]


# Tasks that hold locks


def test_a_task_can_be_revoked_in_the_same_action(five, operator, monkeypatch):
    """The confirmation offers to revoke the task that holds a lock, and does so if it is ticked and still holds it."""
    revoked = []
    monkeypatch.setattr(_state._tls, "current_app", Celery("shop", broker="memory://"))
    monkeypatch.setattr("celery.app.control.Control.revoke", lambda self, task, **how: revoked.append((task, how)))
    task, view = put("a", process="1f.ab"), put("b", B, kind="view", process="1f.ab")
    changed = put("c", kind="view")
    put("c", B)

    for action in ("release", "stop"):
        page = act(operator, action, task, confirmed=False).content.decode()
        assert re.findall('name="revoke"|revoke it below|Its Celery task goes on', page) != []
        page = act(operator, action, view, changed, confirmed=False).content.decode()
        assert ("changed hands" in page, 'name="confirmed"' in page, 'name="revoke"' in page) == (True, True, False)
    act(operator, "release", view, revoke="yes")
    assert revoked == []
    act(operator, "release", task, revoke="yes", reason="stuck")
    assert [(each, how["terminate"]) for each, how in revoked] == [("id-1", True)]
    released, told = LogEntry.objects.filter(object_id="a").order_by("pk")
    assert released.change_message.endswith("Reason: stuck")
    assert told.change_message.startswith("Told the workers to revoke its task (revoked).")
    assert told.change_message.endswith("Reason: task id-1")


def test_a_broker_that_is_away_is_said_and_stops_nothing(five, operator, monkeypatch):
    """Whatever a broker's client raises, the page and the log say so, and this and the next lock are released."""
    monkeypatch.setattr(_state._tls, "current_app", Celery("broken", broker="foo://somewhere"))
    first, second = put("a"), put("b", B)

    response = act(operator, "release", first, second, revoke="yes")

    assert [text[:44] for text in said(response) if "could not be told" in text] == [
        f"“{name}”: the workers could not be told to revoke" for name in "ab"
    ]
    assert (look("a"), look("b")) == (None, None)
    written = [entry.change_message for entry in LogEntry.objects.order_by("pk")]
    assert [text.partition(" (")[0] for text in written] == [
        *["Released by force"] * 2,
        *["Told the workers to revoke its task"] * 2,
    ]
    assert "(not revoked: " in written[2]


def test_users_with_a_name_for_a_key(five, operator, monkeypatch):
    """The admin's log takes the key of a user of any type."""
    written = []
    monkeypatch.setattr(LogEntry.objects, "create", lambda **row: written.append(row["user_id"]))
    monkeypatch.setattr(User, "pk", "ada")

    act(operator, "release", put("orders:7"))

    assert written == ["ada"]


# The page of a lock, and the nodes


def test_the_page_of_a_lock(five, operator):
    """Each node's view, the holder, who waits, and what operators did; the name in the list leads there."""
    key = put("orders:7")
    put("orders:7", B, count=1)
    five[4].down = True

    listed, text = text_of(operator, LIST), text_of(operator, DETAIL, key=key)

    assert f"{DETAIL}?key=" in listed
    assert text.count("this holder</td>") == 3
    assert text.count("another holder</td>") == 1
    assert "A quorum of the nodes has this holder." in text
    assert "<dt>Waiting</dt><dd>nobody</dd>" in text
    assert text.count("no answer") == 1
    assert "task shop.import id-1 on web-1:77" in text
    assert "Nobody waits." in text


@pytest.mark.parametrize(
    ("slug", "other"),
    [(slug("é" * 200 + "A"), slug("é" * 200 + "B")), ("{a}#1", "{a #1}"), ("{a #1}", "{a}#1"), ("{a\nb}", "{a\\nb}")],
)
def test_the_page_of_a_lock_has_no_entries_about_another_one(five, operator, slug, other):
    """Two locks may be shown with the same name; what operators did to one is on its page alone."""
    keys = [key_of(shown(A), "default", slug), key_of(shown(A), "default", other)]
    for node in five:
        node.store.put(slug, value(), 200)
    act(operator, "release", keys[0])

    pages = [text_of(operator, DETAIL, key=key) for key in keys]

    assert ["Released by force" in page for page in pages] == [True, False]


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("{o'rders 7}", """--using other --name 'o'"'"'rders 7'"""),
        ("{a\nb}", "--using other"),
        ("another {program}", "--using other"),
    ],
)
def test_the_page_of_a_lock_has_the_command_that_clears_its_key(five, viewer, written, options):
    """Typed as it is there, the command finds the key: it names the alias and, if a command can, the lock."""
    with override_settings(REDLOCK={"default": {"NODES": FIVE}, "other": {"NODES": ["memory://other"]}}):
        locks["other"].nodes[0].store.put(written, "theirs", None)
        page = text_of(viewer, DETAIL, key=key_of("", "other", written))
        command = unescape(re.search("To clear it: (.*?)</p>", page)[1])
        out = StringIO()
        call_command(*shlex.split(command)[1:], "--dry-run", stdout=out)

    assert command == f"manage.py redlock_clear {options}"
    assert "Dry run: 1 key would be deleted." in out.getvalue()
    assert "never ends" in page


def test_nodes_in_memory_are_shown(five, viewer):
    """The panel has a row for every node, also for one that is down, and with a quorum how many locks each has."""
    put("orders:7")
    with down(five, 1):
        text = text_of(viewer, NODES)
    with down(five):
        blind = text_of(viewer, NODES)

    assert all(f"{node.name}</th>" in text for node in five)
    assert "4 of 5 nodes answer; 3 needed." in text
    assert [len(re.findall(r"</span> (\d+\+?)</td>", page)) for page in (text, blind)] == [4, 0]


def test_real_nodes_are_shown(servers, five, viewer):
    """The panel shows role, version, clock, memory, storage and uptime of real servers, and which does not answer."""
    servers.reset()
    servers[1].kill()
    options = {"restart_guard": False, "node_timeout": 5.0}
    with override_settings(REDLOCK={"default": {"NODES": servers.urls, "OPTIONS": options}}):
        text = text_of(viewer, NODES)
    servers.reset()

    assert text.count("</span> master</td>") == 4
    assert text.count("</span> unlimited</td>") == 4
    assert ">refused</span> <span" in text
    assert re.findall(r'<tr class="redlock-([\w -]+)"', text) == ["no redlock-empty", *["yes"] * 4]
    assert re.search(r"</span> [+-]0\.\d{3} s</td>", text)


# Refresh


def test_the_live_rows_are_those_of_the_page(five, viewer):
    """The JSON has the rows that the list with the same query string has, and the nodes; nothing keeps it."""
    put("orders:7")
    put("other")

    response = viewer.get(LIVE, {"q": "orders"})
    data = response.json()

    assert NAME.findall(data["rows"]) == ["orders%3A7"]
    assert (data["version"], data["count"], data["counted"]) == (2, 1, "1 held lock")
    assert "5 of 5 nodes answer" in data["nodes"]
    assert "no-store" in response["Cache-Control"]


# The model without a table, and Django around it


def test_model_has_no_table(django_assert_num_queries):
    """``dumpdata``, which reads every model, finds no held locks; a row is no way to take one."""
    with django_assert_num_queries(0):
        assert (HeldLock.objects.count(), list(HeldLock._base_manager.all())) == (0, [])
    for options in ({}, {"use_base_manager": True}):
        call_command("dumpdata", "redlock", stdout=(out := StringIO()), **options)
        assert json.loads(out.getvalue()) == []
    with pytest.raises(TypeError, match=r"django_redlock\.lock\(\)"):
        HeldLock.objects.create(name="x")


@pytest.mark.parametrize("page", [LIVE, NODES, DETAIL])
def test_page_that_asks_by_itself_does_not_prolong_a_session(five, viewer, settings, page):
    """Under SESSION_SAVE_EVERY_REQUEST, only what a person asks for renews the session."""
    settings.SESSION_SAVE_EVERY_REQUEST = True
    key = put("orders:7")

    def ends() -> object:
        return Session.objects.get().expire_date

    begun = ends()
    polled = viewer.get(page, {"key": key}, headers={"X-Redlock-Poll": "1"})
    after_poll = ends()
    viewer.get(page, {"key": key})

    assert (polled.status_code, after_poll) == (200, begun)
    assert ends() > begun


@pytest.mark.parametrize("page", [LIVE, NODES, DETAIL])
def test_page_that_asks_by_itself_keeps_a_session_that_django_renews(five, viewer, settings, page):
    """After a rotation of SECRET_KEY, the first request gets a new session, also a poll; nobody is logged out."""
    settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], "rotated" * 10
    key, keys = put("orders:7"), []

    for _ in range(3):
        assert viewer.get(page, {"key": key}, headers={"X-Redlock-Poll": "1"}).status_code == 200
        keys.append(viewer.cookies["sessionid"].value)

    assert keys == [Session.objects.get().session_key] * 3


@pytest.mark.parametrize("page", [LIVE, NODES, DETAIL])
def test_page_that_asks_by_itself_leaves_messages_to_people(five, operator, page):
    """A poll takes no message that another page has queued; the next page that a person opens shows it."""
    left_alone = "it changed hands since you looked"
    put("orders:7")
    act(operator, "release", key_of(shown(B), "default", "{orders:7}"), follow=False)

    polled = operator.get(page, {"key": row_key("orders:7")}, headers={"X-Redlock-Poll": "1"}).content.decode()

    assert (left_alone in polled, left_alone in text_of(operator, LIST)) == (False, True)


@pytest.mark.parametrize("name", ['<b title="x">&amp;', "\ue000 and \ue001"])
def test_tickbox_is_that_of_django(name):
    """The tickbox of each row is the one that it would render itself, although its template is rendered only once."""
    page = admin.site.get_model_admin(HeldLock)
    row = HeldLock(key=f"{name}/default/{{{name}}}", name=name)
    page.action_checkbox(HeldLock(key="k", name="a"))

    with translation.override("de"):
        assert page.action_checkbox(row) == admin.ModelAdmin.action_checkbox(page, row)
