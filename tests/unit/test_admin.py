"""The admin page *Held locks*: what it shows, who may release, and what crafted requests do (nothing)."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from html import unescape
from io import StringIO
from pathlib import Path
from urllib.parse import unquote, urlencode

import pytest
from django.contrib import admin
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.test import Client, RequestFactory, override_settings
from django.utils import translation
from django.utils.html import format_html
from django.utils.safestring import SafeString

from django_redlock import lock, locks
from django_redlock.admin import MAX_RELEASE, HeldLockAdminMixin, changelist, clock
from django_redlock.admin.pages import look_again
from django_redlock.admin.rows import audit
from django_redlock.core.names import Owner, encode, fingerprint, slug
from django_redlock.inventory import PAGE, ask_to_stop, find_locks, held_locks
from django_redlock.inventory import HeldLock as Held
from django_redlock.models import HeldLock, key_of, parse_key
from django_redlock.nodes.memory import forget_nodes

pytestmark = pytest.mark.django_db

A, B = "a" * 32, "b" * 32
FIVE = [f"memory://n{place}" for place in range(5)]
CHECKOUT = Path(__file__).parents[2]
LIST = "/admin/redlock/heldlock/"
LIVE = f"{LIST}live/"
NAME = re.compile(r'class="redlock-name" data-lock="\w+/%7B([^"]*)%7D"')


@pytest.fixture
def nodes():
    """Five nodes in memory."""
    with override_settings(REDLOCK={"default": {"NODES": FIVE}}):
        yield locks["default"].nodes
    forget_nodes()


def client_of(*permissions: str) -> Client:
    """Return a client whose user is staff and has *permissions*."""
    user = User.objects.create_user("staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def viewer() -> Client:
    """Somebody who may look."""
    return client_of("view_heldlock")


@pytest.fixture
def operator() -> Client:
    """Somebody who may look and release."""
    return client_of("view_heldlock", "release_heldlock")


def put(
    name: str, secret: str = A, left: float | None = 200, *, kind: str = "task", count: int = 5, age: float = 1.0
) -> str:
    """Put a lock that is *age* seconds old on *count* nodes; returns what a tickbox for it says."""
    owner = Owner("web-1", 77, kind, "shop.import", "id-1", time.time() - age, 30.0)
    for node in locks["default"].nodes[:count]:
        node.store.put(slug(name), encode(secret, owner), left)
    return key_of(fingerprint(secret), "default", slug(name))


def find_lock(name: str, using: str = "default") -> Held | None:
    """Return a lock, without looking for the thousand places that one of its name may have."""
    return next(iter(find_locks([slug(name)], using).locks), None)


def names(response) -> list[str]:
    """Return the locks on a page."""
    return [unquote(name) for name in NAME.findall(response.content.decode())]


def release(client: Client, *keys: str, confirmed: bool = True, follow: bool = True, **more: str):
    """Post the action, as the confirmation page does or as the list does."""
    data = {"action": "release", "_selected_action": list(keys), **more}
    if confirmed:
        data["confirmed"] = "yes"
    else:
        data["index"] = "0"
    return client.post(LIST, data, follow=follow)


def said(response) -> list[str]:
    """Return the messages on a page."""
    return [str(message) for message in response.context["messages"]]


# What is shown


def test_a_held_lock_is_shown(nodes, viewer):
    """
    L71, L72: the list shows name, state, remaining time, votes with words for them, and holder.
    """
    with lock("orders:7", ttl=30, label="nightly import") as lease:
        page = viewer.get(LIST).content.decode()
        assert lease.valid()

    assert "orders:7" in page
    assert "nightly import" in page
    assert re.search(r'data-left="(2\d)\.\d"><time datetime="PT\1S">0:\1<', page)
    assert "5 of 5 nodes</span>" in page
    assert "5 of 5 nodes answer; 3 needed. 2 more may fail." in page
    assert "<title>Held locks" in page


def test_a_node_that_is_down_is_named(nodes, viewer):
    """
    L73: with a node down the page shows 4/5 and a banner that names the node, and is no error.
    """
    put("orders:7")
    nodes[2].down = True

    response = viewer.get(LIST)

    assert response.status_code == 200
    page = response.content.decode()
    assert "4 of 5 nodes answer; 3 needed. 1 more may fail." in page
    assert "n2 (" in page
    assert "without n2" in page
    assert "redlock-degraded" in page


def test_without_a_quorum_the_list_is_empty_and_says_why(nodes, viewer):
    """
    L73: with three of five nodes down the page is there, empty, with a banner.
    """
    put("orders:7")
    for node in nodes[:3]:
        node.down = True

    response = viewer.get(LIST)

    assert response.status_code == 200
    assert names(response) == []
    assert "Too few to say which locks are held" in response.content.decode()


def test_tiles_say_how_much_is_wrong_and_lead_to_it(nodes, viewer):
    """
    L72: each state in trouble has a tile, with the number of its locks; without a quorum the number is unknown.
    """
    put("healthy", age=3720)
    put("endless", left=None)
    put("degraded", count=4)

    tiles = {tile.label: tile for tile in viewer.get(LIST).context["cl"].tiles}

    values = {label: tile.value for label, tile in tiles.items()}
    assert (values["All"], values["No expiry"], values["Degraded"]) == ("3", "1", "1")
    assert values["Longest hold"].startswith("1 h")
    assert values["Nodes, 2 spare"] == "5/5"
    assert names(viewer.get(LIST + tiles["Degraded"].url)) == ["degraded"]

    for node in nodes[:3]:
        node.down = True

    values = {tile.label: tile.value for tile in viewer.get(LIST).context["cl"].tiles}
    assert (values["All"], values["No expiry"], values["Nodes, 0 spare"]) == ("?", "?", "2/5")


def test_worst_comes_first_and_then_what_is_held_longest(nodes, viewer):
    """
    L72: trouble is above what is well, and within a state the oldest hold is above the others.
    """
    put("a", age=10)
    put("b", age=1000)
    put("c", age=100)
    put("z", left=None, age=1)

    assert names(viewer.get(LIST)) == ["z", "b", "c", "a"]


@pytest.mark.parametrize("setting", [None, {}, {"default": {"NODES": []}}, {"default": 7}])
def test_settings_that_cannot_be_used_are_shown(viewer, setting):
    """
    A wrong setting is a message on the page, with what to write instead.
    """
    with override_settings(REDLOCK=setting):
        response = viewer.get(LIST)

    assert response.status_code == 200
    assert "REDLOCK" in response.content.decode()


def test_the_secret_is_on_no_page(nodes, operator):
    """
    P36: the lock's secret is neither on the list, nor in its JSON, nor on the confirmation, nor in the log.
    """
    key = put("orders:7")

    pages = [operator.get(LIST), operator.get(LIVE), release(operator, key, confirmed=False), release(operator, key)]

    assert fingerprint(A) in pages[2].content.decode()
    for page in pages:
        assert A[:8] not in page.content.decode()
    assert A[:8] not in LogEntry.objects.get().change_message


def test_names_are_escaped(nodes, operator):
    """
    L78: what is in a name or an owner is text on every page, never markup, and shows what it hides.
    """
    key = put("<script>alert(1)</script>\n\u202e")

    pages = [operator.get(LIST), operator.get(LIVE), release(operator, key, confirmed=False)]

    for page in pages:
        assert "<script>alert" not in page.content.decode()
    assert "\\n\\u202e" in pages[0].content.decode()


def test_a_lock_without_expiry_shows_no_number(nodes, viewer):
    """
    L72: -1 is shown as "never ends".
    """
    put("orders:7", left=None)

    page = viewer.get(LIST).content.decode()

    assert "never ends" in page
    assert "data-left" not in page


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3600, "1:00:00")])
def test_durations_are_written_like_a_clock(seconds, text):
    """
    Minutes and seconds, and hours when there are any.
    """
    assert clock(seconds) == text


def test_several_aliases_are_shown_together(viewer):
    """
    With several aliases there is a column and a filter for them, and a banner for each.
    """
    aliases = {"default": {"NODES": FIVE}, "other": {"NODES": FIVE[:3], "KEY_PREFIX": "other"}}
    with override_settings(REDLOCK=aliases), lock("a"), lock("b", using="other"):
        both, one = viewer.get(LIST), viewer.get(LIST, {"using": "other"})
    forget_nodes()

    assert sorted(names(both)) == ["a", "b"]
    assert names(one) == ["b"]
    assert "column-alias_name" in both.content.decode()
    assert ">Alias</span> other</td>" in both.content.decode()  # where a row is a card, no header says what the word is


# Filters, search, order, pages


def test_filter_search_sort_and_pages(nodes, viewer):
    """
    The list can be filtered by state and kind, searched by name and holder, sorted and leafed through.
    """
    for number in range(60):
        put(f"orders:{number:02}", left=200 + number / 10)
    put("lonely", count=2, kind="view")

    assert names(viewer.get(LIST))[:2] == ["lonely", "orders:00"]
    assert len(names(viewer.get(LIST))) == 50
    assert len(names(viewer.get(LIST, {"p": "2"}))) == 11
    assert names(viewer.get(LIST, {"state": "partial"})) == ["lonely"]
    assert names(viewer.get(LIST, {"kind": "view"})) == ["lonely"]
    assert names(viewer.get(LIST, {"q": "ORDERS 59"})) == ["orders:59"]
    assert len(names(viewer.get(LIST, {"q": "shop.import web-1", "all": ""}))) == 61
    assert names(viewer.get(LIST, {"o": "-0"}))[0] == "orders:59"
    assert names(viewer.get(LIST, {"o": "5.0"}))[-1] == "orders:49"
    assert names(viewer.get(LIST, {"o": "-5"}))[0] == "orders:59"


CRAFTED = [
    {"state": "nonsense"},
    {"state": "held\x00"},
    {"kind": "'; DROP TABLE"},
    {"using": "nobody"},
    {"o": "99"},
    {"o": "-99.7.x.-"},
    {"o": "9" * 5000},
    {"node": "nobody"},
    {"node": "\x00"},
    {"node": "n" * 5000},
    {"waiting": "yes"},
    {"waiting": "no"},
    {"waiting": "yes\x00"},
    {"p": "0"},
    {"p": "-3"},
    {"p": "x"},
    {"p": "9" * 5000},
    {"q": "a\x00b"},
    {"q": "x" * 1_000_000},
    {"_facets": "True"},
    {"e": "1"},
    {"e": "1", "nonsense": "1"},
    {"nonsense": "1"},
    {"name__regex": "("},
    {"lock__user__password": "x"},
    {"all": ""},
    {"_popup": "1"},
    {"_selected_action": "x", "action": "release", "confirmed": "yes"},
]


@pytest.mark.parametrize("query", CRAFTED, ids=lambda query: urlencode(query)[:40])
def test_crafted_queries_do_nothing(nodes, operator, query):
    """
    No query is an error of the server, and none releases a lock.
    """
    put("orders:7")

    responses = [operator.get(page, query) for page in (LIST, LIVE)]

    assert [response.status_code for response in responses] == [200, 200]
    assert max(len(response.content) for response in responses) < 100_000
    assert find_lock("orders:7") is not None


@pytest.mark.parametrize(
    "key",
    ["", "x", "a/b", "a/b/c/d", "%00/default/%00", "x/default/%ff", "x/nobody/y", "\x00", "x" * 100_000, "../../x"],
    ids=lambda key: repr(key[:20]),
)
@pytest.mark.parametrize("confirmed", [True, False])
def test_crafted_selections_release_nothing(nodes, operator, key, confirmed):
    """
    What was not offered on the page cannot be released, and is no error of the server.
    """
    put("orders:7")

    response = release(operator, key, confirmed=confirmed)

    assert response.status_code == 200
    assert find_lock("orders:7") is not None


@pytest.mark.parametrize("path", ["x/change/", "x/history/", "x/delete/", "add/", "x/"])
def test_other_pages_of_the_model_are_not_there(nodes, operator, path):
    """
    The pages for adding, editing and deleting rows answer with a refusal or lead away, and ask no table.
    """
    response = operator.get(LIST + path, follow=True)

    assert response.status_code in (200, 403, 404)


# Who may do what


def test_strangers_are_sent_to_the_login(nodes):
    """
    L75: without a login neither the list nor its JSON can be read, nor anything be released.
    """
    key = put("orders:7")

    for response in (Client().get(LIST), Client().get(LIVE), release(Client(), key, follow=False)):
        assert response.status_code == 302
        assert "/login/" in response.url
    assert find_lock("orders:7") is not None


def test_staff_without_permission_sees_nothing(nodes):
    """
    L75: staff without the view permission gets a 403 from the list and its JSON.
    """
    client = client_of()

    assert client.get(LIST).status_code == 403
    assert client.get(LIVE).status_code == 403


def test_who_may_only_look_cannot_release(nodes, viewer):
    """
    L75: with the view permission alone there is no action, and posting it releases nothing.
    """
    key = put("orders:7")

    page = viewer.get(LIST).content.decode()
    release(viewer, key)
    release(viewer, key, confirmed=False)

    assert 'name="action"' not in page
    assert find_lock("orders:7") is not None
    assert not LogEntry.objects.exists()


def test_who_may_release_without_looking_gets_a_403(nodes):
    """
    L75: the release permission alone opens no page.
    """
    key = put("orders:7")

    assert release(client_of("release_heldlock"), key).status_code == 403
    assert find_lock("orders:7") is not None


def test_posts_from_other_sites_are_refused(nodes):
    """
    L75: without the CSRF token nothing is released.
    """
    key = put("orders:7")
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))

    assert release(client, key).status_code == 403
    assert find_lock("orders:7") is not None


# Release


def test_release_asks_first(nodes, operator):
    """
    L75: the action leads to a page that lists every name with its holder, and releases nothing.
    """
    keys = [put("orders:7"), put("orders:8", B)]

    page = release(operator, *keys, confirmed=False).content.decode()

    assert NAME.findall(page) == []
    assert re.findall(r'<strong class="redlock-name">([^<]*)<', page) == ["orders:7", "orders:8"]
    assert "task shop.import id-1 on web-1:77" in page
    assert find_lock("orders:7") is not None


def test_a_confirmed_release_is_done_and_audited(nodes, operator):
    """
    L74, L75: the confirmed release frees the lock and logs who, whose, which holder, the time left and why.
    """
    key = put("orders:7")

    response = release(operator, key, reason="worker killed\n")

    assert find_lock("orders:7") is None
    assert said(response) == ["“orders:7” was released."]
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_id, entry.action_flag) == ("staff", "orders:7", DELETION)
    assert entry.content_type.model == "heldlock"
    assert entry.change_message.startswith(
        "Released by force (released). Alias default, holder task shop.import id-1 on web-1:77, "
        f"fingerprint {fingerprint(A)}, 1"
    )
    assert entry.change_message.endswith("Reason: worker killed")


def test_a_lock_that_changed_hands_is_refused_before_the_confirmation(nodes, operator):
    """
    L74: a lock whose holder changed since the list was shown is not offered for release.
    """
    seen = put("orders:7")
    put("orders:7", B)

    page = release(operator, seen, confirmed=False).content.decode()

    assert "it changed hands since you looked" in page
    assert 'name="confirmed"' not in page


def test_a_lock_that_changed_hands_is_refused_after_the_confirmation(nodes, operator):
    """
    L74: a lock whose holder changed since the confirmation was shown keeps its new holder.
    """
    seen = put("orders:7")
    put("orders:7", B)

    response = release(operator, seen)

    assert said(response) == [
        "“orders:7” was left alone: it changed hands since you looked. Look again and decide anew."
    ]
    found = find_lock("orders:7")
    assert found is not None
    assert found.fingerprint == fingerprint(B)
    assert not LogEntry.objects.exists()


def test_a_lock_that_is_gone_is_said_to_be_free(nodes, operator):
    """
    L74: releasing what nobody holds any more says so, and writes no audit entry.
    """
    response = release(operator, key_of(fingerprint(A), "default", slug("orders:7")))

    assert said(response) == ["“orders:7” was left alone: nobody holds it any more."]
    assert not LogEntry.objects.exists()


def test_too_few_nodes_release_nothing_for_sure(nodes, operator):
    """
    L73, L74: with too few nodes the page says that it cannot tell.
    """
    key = put("orders:7")
    for node in nodes[:3]:
        node.down = True

    assert "too few nodes answered" in said(release(operator, key))[0]


@pytest.mark.parametrize("action", ["stop", "release"])
def test_the_log_has_nothing_that_was_not_done(nodes, operator, action):
    """
    L74: too few nodes answer, so nothing is sent to the holder, and the admin's log does not have it. When they answer
    again, no badge says that the holder was asked to stop.
    """
    key = put("orders:7")
    for node in nodes[:3]:
        node.down = True
    assert "too few nodes answered" in said(act(operator, action, key))[0]
    for node in nodes[:3]:
        node.down = False

    assert not LogEntry.objects.exists()
    assert "asked to stop" not in operator.get(LIST).content.decode()


def test_select_all_releases_nothing(nodes, operator):
    """
    L74: "select all" is refused, because it includes locks that were on no page.
    """
    key = put("orders:7")

    response = release(operator, key, confirmed=False, select_across="1")

    assert "Nothing was done" in said(response)[0]
    assert find_lock("orders:7") is not None


def test_bulk_release_is_capped(nodes, operator):
    """
    L75: no more locks are released at a time than one can read.
    """
    keys = [put(f"orders:{number}") for number in range(MAX_RELEASE + 1)]

    response = release(operator, *keys)

    assert f"at most {MAX_RELEASE}" in said(response)[0]
    assert find_lock("orders:0") is not None


def test_names_survive_the_form(nodes, operator):
    """
    L20: names with line ends, slashes and the like come back from the form as they were.
    """
    strange = ["a\nb", "a/b%2F", "x" * 5000, "ключ 🔑", "'\"&"]
    keys = [put(name) for name in strange]
    page = release(operator, *keys, confirmed=False).content.decode()

    release(operator, *re.findall(r'name="_selected_action" value="([^"]*)"', page))

    assert [find_lock(name) for name in strange] == [None] * len(strange)


def test_keys_can_be_parsed():
    """
    A row's key holds the fingerprint, alias and slug, in plain ASCII.
    """
    key = key_of("0a", "oth/er", "{ключ/\r\n}")

    assert key.isascii()
    assert parse_key(key) == ("0a", "oth/er", "{ключ/\r\n}")


# Refresh


def test_the_live_rows_are_those_of_the_page(nodes, viewer):
    """
    The JSON has the rows that the list with the same query string has, and the nodes.
    """
    put("orders:7")
    put("other")

    data = json.loads(viewer.get(LIVE, {"q": "orders"}).content)

    assert NAME.findall(data["rows"]) == ["orders%3A7"]
    assert (data["version"], data["count"], data["counted"]) == (2, 1, "1 held lock")
    assert "5 of 5 nodes answer" in data["nodes"]


def test_the_live_rows_are_not_cached(nodes, viewer):
    """
    Nothing keeps the JSON.
    """
    assert "no-store" in viewer.get(LIVE)["Cache-Control"]


# The model without a table


def test_no_table_is_ever_asked(nodes, operator, django_assert_num_queries):
    """
    The list asks the database for session, user, permissions and the requests to stop; the model asks nothing.
    """
    put("orders:7")
    operator.get(LIST)  # caches content types

    with django_assert_num_queries(5):
        operator.get(LIST)
    with django_assert_num_queries(0):
        assert (HeldLock.objects.count(), list(HeldLock._base_manager.all())) == (0, [])


def test_dumpdata_works():
    """
    ``dumpdata``, which reads every model, finds no held locks instead of a missing table.
    """
    for options in ({}, {"use_base_manager": True}):
        out = StringIO()
        call_command("dumpdata", "redlock", stdout=out, **options)
        assert json.loads(out.getvalue()) == []


def test_no_migration_is_missing():
    """
    The model without a table needs no migration.
    """
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_saving_is_refused():
    """
    A row of the page is no way to take a lock.
    """
    with pytest.raises(TypeError, match=r"django_redlock\.lock\(\)"):
        HeldLock.objects.create(name="x")


def test_pages_do_not_warn(nodes, operator):
    """
    No page uses anything of Django that is going away.
    """
    key = put("orders:7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for response in (operator.get(LIST), release(operator, key, confirmed=False), release(operator, key)):
            assert response.status_code == 200


@pytest.mark.parametrize("language", ["en", "de", None])
@pytest.mark.parametrize("name", ["orders:7", '<b title="x">&amp;', "\ue000 and \ue001", "Zürich 100 %"])
def test_tickbox_is_that_of_django(name, language):
    """L72: the tickbox of each row is the one that Django renders, although its template is rendered only once."""
    row = HeldLock(key=f"{name}/default/{slug(name)}", name=name)
    page = admin.site.get_model_admin(HeldLock)
    with translation.override(language) if language else nullcontext():
        expected = admin.ModelAdmin.action_checkbox(page, row)
        assert page.action_checkbox(row) == expected
        assert isinstance(page.action_checkbox(row), SafeString)


def test_tickbox_is_that_of_the_theme():
    """A theme whose tickboxes look different keeps them."""

    class Theme(admin.ModelAdmin):
        def action_checkbox(self, obj):
            return format_html('<theme-box value="{}">{}</theme-box>', obj.pk, obj)

    class Themed(HeldLockAdminMixin, Theme):
        pass

    page = Themed(HeldLock, admin.site)
    assert page.action_checkbox(HeldLock(key="k&1", name="a")) == '<theme-box value="k&amp;1">a</theme-box>'
    assert page.action_checkbox(HeldLock(key="k2", name="b")) == '<theme-box value="k2">b</theme-box>'


def test_the_page_is_translatable(nodes, viewer):
    """
    With another language active the page works.
    """
    put("orders:7")
    with translation.override("de"):
        assert viewer.get(LIST, headers={"accept-language": "de"}).status_code == 200


# More that an operator does


def act(client: Client, action: str, *keys: str, confirmed: bool = True, **more: str):
    """Post an action, as the confirmation page does or as the list and the page of a lock do."""
    return release(client, *keys, confirmed=confirmed, **{"action": action, **more})


@pytest.mark.parametrize("action", ["release", "stop"])
def test_each_action_asks_first(nodes, operator, action):
    """
    L75: each action leads to a page that lists the locks, says what will happen, and does nothing.
    """
    lease = lock("orders:7", renew=False).acquire()
    key = key_of(fingerprint(lease.secret), "default", slug("orders:7"))

    page = act(operator, action, key, confirmed=False).content.decode()

    assert f'name="action" value="{action}"' in page
    assert "orders:7" in page
    assert lease.extend()
    assert not LogEntry.objects.exists()


def test_a_holder_is_asked_to_stop(nodes, operator):
    """
    L74, L75: asked to stop, the holder finds its lease lost with the reason; the lock stays held, and the log says who
    asked.
    """
    lease = lock("orders:7", renew=False).acquire()
    key = key_of(fingerprint(lease.secret), "default", slug("orders:7"))

    response = act(operator, "stop", key, reason="deploy")

    assert "was asked to stop" in said(response)[0]
    assert find_lock("orders:7") is not None
    assert lease.extend() is False
    assert lease.reason == "revoked"
    assert LogEntry.objects.get().change_message.startswith("Asked its holder to stop (asked).")
    assert LogEntry.objects.get().change_message.endswith("Reason: deploy")


def test_an_entry_of_the_log_leads_to_its_lock(nodes, operator):
    """
    L75: the link in the admin's log shows the locks of that name; there is no page to change one.
    """
    key = put("orders:7", left=5)
    act(operator, "stop", key)

    response = operator.get(LogEntry.objects.get().get_admin_url(), follow=True)

    assert response.redirect_chain[0][0] == f"{LIST}?q=orders%3A7"
    assert names(response) == ["orders:7"]


def test_the_log_of_a_lock_is_that_of_its_alias(operator):
    """
    L75: what was done to a lock of the same name under another alias is on that one's page.
    """
    both = {"default": {"NODES": FIVE}, "other": {"NODES": FIVE, "KEY_PREFIX": "other"}}
    with override_settings(REDLOCK=both):
        lock("orders:7", renew=False).acquire()
        lock("orders:7", using="other", renew=False).acquire()
        keys = {alias: key_of(find_lock("orders:7", alias).fingerprint, alias, slug("orders:7")) for alias in both}
        act(operator, "stop", keys["other"], reason="too slow")
        pages = {alias: operator.get(f"{LIST}lock/", {"key": key}).content.decode() for alias, key in keys.items()}
    forget_nodes()

    assert ("too slow" in pages["default"], "too slow" in pages["other"]) == (False, True)


@pytest.mark.parametrize("action", ["stop", "release"])
def test_only_what_was_seen_and_only_with_permission(nodes, viewer, action):
    """
    L74, L75: who may only look can do neither, and nobody to a lock that changed hands.
    """
    key = put("orders:7", left=5)
    act(viewer, action, key)
    assert find_lock("orders:7").remaining < 6

    viewer.logout()
    root = User.objects.create_superuser("root")
    viewer.force_login(root)
    put("orders:7", B, left=5)
    response = act(viewer, action, key)

    assert "changed hands" in said(response)[0]
    assert find_lock("orders:7").remaining < 6
    assert not LogEntry.objects.exists()


def test_a_shared_lock_is_no_one_holders(nodes, operator):
    """
    L74: several holders at once cannot be asked one by one, and the page says so.
    """
    with lock("orders:7", shared=True) as lease:
        key = key_of(find_lock("orders:7").fingerprint, "default", slug("orders:7"))
        page = act(operator, "stop", key, confirmed=False).content.decode()
        assert ("held by several holders" in page, 'name="confirmed"' in page) == (True, False)
        assert "held by several holders" in said(act(operator, "stop", key))[0]
        page = act(operator, "release", key, confirmed=False).content.decode()
        assert ('value="release"' in page, 'value="stop"' in page) == (True, False)
        assert lease.extend()


@pytest.mark.parametrize("text", ["theirs", "c" * 32])
def test_another_program_is_not_asked_to_stop(nodes, operator, text):
    """
    L74: another program would not learn of a request to stop, so the confirmation does not offer it.
    """
    for node in nodes:
        node.store.put(slug("orders:7"), text, 200)
    key = key_of(find_lock("orders:7").fingerprint, "default", slug("orders:7"))

    assert ask_to_stop("orders:7", key.partition("/")[0]) == "foreign"
    page = act(operator, "stop", key, confirmed=False).content.decode()
    assert ("another program holds it" in page, 'name="confirmed"' in page) == (True, False)
    page = act(operator, "release", key, confirmed=False).content.decode()
    assert ('value="release"' in page, 'value="stop"' in page) == (True, False)
    assert "another program holds it" in said(act(operator, "stop", key))[0]
    assert said(release(operator, key)) == ["“orders:7” was released."]


def test_a_task_can_be_revoked_in_the_same_action(nodes, operator, monkeypatch):
    """
    L74: for a lock that a task holds the confirmation offers to revoke the task, and does so when it is ticked.
    """
    from django_redlock.celery import handle as control

    revoked = []
    monkeypatch.setattr(control, "revoke", lambda task_id, **how: revoked.append((task_id, how)) is None)
    task, view = put("a"), put("b", B, kind="view")

    assert 'name="revoke"' in act(operator, "release", task, confirmed=False).content.decode()
    assert 'name="revoke"' not in act(operator, "release", view, confirmed=False).content.decode()
    act(operator, "release", view, revoke="yes")
    assert revoked == []
    act(operator, "release", task, revoke="yes", reason="stuck")
    assert revoked == [("id-1", {"terminate": True})]
    released, told = LogEntry.objects.filter(object_id="a").order_by("pk")
    assert released.change_message.endswith("Reason: stuck")
    assert told.change_message.startswith("Told the workers to revoke its task (revoked).")
    assert told.change_message.endswith("Reason: task id-1")


PEOPLE = """
from django.contrib.auth.models import AbstractUser
from django.db import models

class Person(AbstractUser):
    username = models.CharField(max_length=50, primary_key=True)
"""
RELEASING = """
import django
from django.conf import settings
from tests import settings as tests

conf = {name: value for name, value in vars(tests).items() if name.isupper()}
conf["INSTALLED_APPS"] = [app for app in conf["INSTALLED_APPS"] if not app.startswith("tests.")] + ["people"]
settings.configure(**conf | {"AUTH_USER_MODEL": "people.Person", "ALLOWED_HOSTS": ["testserver"]})
django.setup()
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client
from django_redlock import lock
from django_redlock.inventory import find_lock
from django_redlock.models import key_of

call_command("makemigrations", "people", verbosity=0)
call_command("migrate", verbosity=0)
client = Client()
client.force_login(get_user_model().objects.create_superuser("ada", "ada@example.com", "x"))
names = ["orders:7", "orders:8"]
leases = [lock(name, renew=False).acquire() for name in names]
chosen = [key_of(held.fingerprint, "default", held.slug) for held in map(find_lock, names)]
data = {"action": "release", "confirmed": "yes", "_selected_action": chosen}
response = client.post("/admin/redlock/heldlock/", data)
users = [entry.user_id for entry in LogEntry.objects.all()]
print(response.status_code, [find_lock(name) for name in names], users)
"""


@pytest.mark.server
def test_users_with_a_name_for_a_key(tmp_path):
    """
    L75: who released is logged whatever the primary key of the project's user model is.
    """
    (tmp_path / "people").mkdir()
    (tmp_path / "people" / "__init__.py").touch()
    (tmp_path / "people" / "models.py").write_text(PEOPLE)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(CHECKOUT)])}

    done = subprocess.run(
        [sys.executable, "-c", RELEASING], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.stdout == "302 [None, None] ['ada', 'ada']\n", done.stderr


# The page of a lock, and the nodes

DETAIL, NODES = f"{LIST}lock/", f"{LIST}nodes/"


def test_the_page_of_a_lock(nodes, operator):
    """
    L71: each node's view, the holder, who waits, and what operators did; the name in the list leads there.
    """
    key = put("orders:7")
    put("orders:7", B, count=1)
    nodes[4].down = True

    listed = operator.get(LIST).content.decode()
    page = operator.get(DETAIL, {"key": key})
    text = page.content.decode()

    assert f"{DETAIL}?key=" in listed
    assert page.status_code == 200
    assert text.count("this holder</td>") == 3
    assert text.count("another holder</td>") == 1
    assert "A quorum of the nodes has this holder." in text
    assert "<dt>Waiting</dt><dd>nobody</dd>" in text
    assert text.count("no answer") == 1
    assert "task shop.import id-1 on web-1:77" in text
    assert "Nobody waits." in text
    assert A[:8] not in text


def test_the_page_of_a_lock_shows_who_waits_and_what_was_done(nodes, operator):
    """
    L71, L75: waiters in order, and the entries of the log about this lock.
    """
    lease = lock("orders:7", renew=False).acquire()
    key = key_of(fingerprint(lease.secret), "default", slug("orders:7"))
    waiting = threading.Thread(target=lambda: lock("orders:7", wait=30).acquire().release())
    waiting.start()
    try:
        while not find_lock("orders:7").waiters:
            pass
        text = operator.get(DETAIL, {"key": key}).content.decode()
        listed = operator.get(LIST).content.decode()
    finally:
        act(operator, "release", key, reason="stuck")
        waiting.join(30)

    assert f":{os.getpid()} #" in text
    assert '<strong class="redlock-waited">1</strong>' in listed
    after = operator.get(DETAIL, {"key": key}).content.decode()
    assert "Nobody holds this lock now." in after
    assert "Released by force (released)." in after


@pytest.mark.parametrize(
    ("written", "options"),
    [
        (slug("orders:7"), "--using other --name orders:7"),
        (slug("o'rders 7"), """--using other --name 'o'"'"'rders 7'"""),
        (slug("a\nb"), "--using other"),
        (slug("n" * 300), "--using other"),
        ("another {program}", "--using other"),
    ],
)
def test_the_page_of_a_lock_has_the_command_that_clears_its_key(viewer, written, options):
    """
    L77: typed as it is there, the command finds the key: it names the alias and, if a command can, the lock.
    """
    with override_settings(REDLOCK={"default": {"NODES": FIVE}, "other": {"NODES": ["memory://other"]}}):
        locks["other"].nodes[0].store.put(written, "theirs", None)
        page = viewer.get(f"{LIST}lock/", {"key": key_of("", "other", written)}).content.decode()
        command = unescape(re.search("To clear it: (.*?)</p>", page)[1])
        out = StringIO()
        call_command(*shlex.split(command)[1:], "--dry-run", stdout=out)

    assert command == f"manage.py redlock_clear {options}"
    assert "Dry run: 1 key would be deleted." in out.getvalue()


def test_who_may_only_look_has_no_buttons(nodes, viewer):
    """
    L75: without the release permission the page of a lock has nothing to press.
    """
    key = put("orders:7")

    assert "redlock-buttons" not in viewer.get(DETAIL, {"key": key}).content.decode()


def test_the_page_of_a_lock_without_a_quorum(nodes, viewer):
    """
    L73: with too few nodes the page says that it cannot tell.
    """
    key = put("orders:7")
    for node in nodes[:3]:
        node.down = True

    text = viewer.get(DETAIL, {"key": key}).content.decode()

    assert "Too few to say which locks are held" in text
    assert "Trouble:</strong> n0 (refused), n1 (refused), n2 (refused)." in text
    assert ("Asked at" in text, "As of" in text) == (True, False)


@pytest.mark.parametrize(
    "key",
    ["", "x", "a/b", "a/b/c/d", "x/nobody/y", "x/default/%ff", "\x00", "x" * 1_000_000, "../../x", "a/default/\x00"],
)
def test_crafted_keys_find_no_page(nodes, operator, key):
    """
    L78: what names no lock is a 404 or a free lock, never an error of the server.
    """
    assert operator.get(DETAIL, {"key": key}).status_code in (200, 404)


def test_scripts_in_names_are_text_on_every_page(nodes, operator):
    """
    L78: a name with markup is text on the page of the lock and on every confirmation.
    """
    key = put("<script>alert(1)</script>")

    pages = [operator.get(DETAIL, {"key": key})]
    pages += [act(operator, action, key, confirmed=False) for action in ("stop", "release")]

    for page in pages:
        assert "<script>alert" not in page.content.decode()
        assert "&lt;script&gt;" in page.content.decode()


@pytest.mark.parametrize("page", [DETAIL, NODES])
def test_pages_need_the_view_permission(nodes, page):
    """
    L75: strangers are sent to the login, staff without permission gets a 403.
    """
    assert Client().get(page).status_code == 302
    assert client_of().get(page).status_code == 403


def test_nodes_in_memory_are_shown(nodes, viewer):
    """
    L73: the panel has a row for every node, with how many locks it has, also for one that is down.
    """
    put("orders:7")
    nodes[2].down = True

    text = viewer.get(NODES).content.decode()

    assert all(f"{node.name}</th>" in text for node in nodes)
    assert "4 of 5 nodes answer; 3 needed." in text


def test_real_nodes_are_shown(servers, nodes, viewer):
    """
    L73: the panel shows role, version, clock, memory, storage and uptime of real servers, and which does not answer.
    """
    servers.reset()
    servers[1].kill()
    with override_settings(REDLOCK={"default": {"NODES": servers.urls, "OPTIONS": {"restart_guard": False}}}):
        text = viewer.get(NODES).content.decode()
    servers.reset()

    assert text.count("</span> master</td>") == 4
    assert text.count("</span> unlimited</td>") == 4
    assert ">refused</span> <span" in text
    assert re.findall(r'<tr class="redlock-([\w -]+)"', text) == ["no redlock-empty", *["yes"] * 4]
    assert re.search(r"</span> [+-]0\.\d{3} s</td>", text)


@pytest.mark.parametrize("setting", [None, {"default": {"NODES": []}}])
def test_nodes_of_settings_that_cannot_be_used(viewer, setting):
    """
    A wrong setting is a message on the panel.
    """
    with override_settings(REDLOCK=setting):
        response = viewer.get(NODES)

    assert response.status_code == 200
    assert "REDLOCK" in response.content.decode()


def test_filter_of_what_ends_soon(nodes, viewer):
    """
    The list can show what ends within ten seconds.
    """
    put("soon", left=5)
    put("late", left=25)

    assert names(viewer.get(LIST, {"left": "soon"})) == ["soon"]


def test_filter_by_node(nodes, viewer):
    """
    The list can show what a node has a vote for: what loses one when that node is stopped.
    """
    put("everywhere")
    put("on-three", count=3)

    page = viewer.get(LIST, {"node": nodes[4].name})

    assert names(page) == ["everywhere"]
    assert f"?node={nodes[4].name}" in viewer.get(LIST).content.decode()
    assert set(names(viewer.get(LIST, {"node": nodes[0].name}))) == {"everywhere", "on-three"}


def test_filter_by_node_knows_the_holder(nodes, viewer):
    """
    L71: a node that has another holder than the majority has no vote for the one that is shown.
    """
    put("orders:7")
    owner = Owner("web-2", 78, "task", "shop.import", "id-2", time.time(), 30.0)
    nodes[4].store.put(slug("orders:7"), encode(B, owner), 20)

    assert names(viewer.get(LIST, {"node": nodes[4].name})) == []
    assert names(viewer.get(LIST, {"node": nodes[3].name})) == ["orders:7"]


def test_filter_of_what_somebody_waits_for(nodes, viewer):
    """
    The list can show what somebody waits for: of all locks and not only of those on the page.
    """
    for number in range(60):
        put(f"quiet:{number}", left=10 + number / 10)
    lease = lock("wanted", ttl=29, renew=False).acquire()
    waiting = threading.Thread(target=lambda: lock("wanted", wait=30).acquire().release())
    waiting.start()
    try:
        while not find_lock("wanted").waiters:
            pass
        found = names(viewer.get(LIST, {"waiting": "yes"}))
    finally:
        lease.release()
        waiting.join(30)

    assert found == ["wanted"]
    assert names(viewer.get(LIST, {"waiting": "yes"})) == []


def test_rows_are_made_of_what_is_shown(nodes, viewer, monkeypatch):
    """
    L70: a page makes rows of the locks it shows, and not of all that are held.
    """
    for number in range(60):
        put(f"n{number:02}", left=10 + number / 10)
    made = []
    of = HeldLock.of
    monkeypatch.setattr(HeldLock, "of", lambda found: made.append(found.name) or of(found))

    viewer.get(LIST, {"p": "2"})

    assert made == [f"n{number:02}" for number in range(50, 60)]


def break_broker(monkeypatch, broker):
    """Give the tests a Celery app with this broker."""
    from celery import Celery, _state

    monkeypatch.setattr(_state._tls, "current_app", Celery("broken", broker=broker))


@pytest.mark.parametrize("broker", ["foo://somewhere", "redis://h:notaport"])
def test_a_broker_that_cannot_be_used_stops_nothing(nodes, operator, monkeypatch, broker):
    """
    L75: whatever a broker's client raises, the lock is released, that is written down, and the page says so.
    """
    break_broker(monkeypatch, broker)

    response = act(operator, "release", put("a"), revoke="yes")

    assert "could not be told" in said(response)[1]
    assert find_lock("a") is None
    assert LogEntry.objects.count() == 2


@pytest.mark.server
def test_a_broker_that_is_away_is_said_and_stops_nothing(nodes, operator, monkeypatch):
    """
    L75: if a task cannot be revoked the page says so; what was done is in the log, and the next lock has its turn.
    """
    break_broker(monkeypatch, "redis://127.0.0.1:1/0")
    first, second = put("a"), put("b", B)

    response = act(operator, "release", first, second, revoke="yes")

    assert response.status_code == 200
    assert [text for text in said(response) if "could not be told" in text] == [
        f"“{name}”: the workers could not be told to revoke its task: OperationalError." for name in "ab"
    ]
    assert find_lock("a") is None
    assert find_lock("b") is None
    written = [entry.change_message for entry in LogEntry.objects.order_by("pk")]
    assert [text.split(".")[0] for text in written] == [
        *["Released by force (released)"] * 2,
        *["Told the workers to revoke its task (not revoked: OperationalError)"] * 2,
    ]


def test_the_log_takes_any_kind_of_user(nodes, monkeypatch):
    """
    L75: a project's users may be known by a text instead of a number.
    """
    written = []
    monkeypatch.setattr(LogEntry.objects, "create", lambda **fields: written.append(fields))
    request = RequestFactory().post(LIST)
    request.user = User(pk="ann@example.com")

    [choice] = look_again([put("a")], "release")
    audit(request, "release", choice.row, ("a", "default", choice.fingerprint), "released", "")

    assert written[0]["user_id"] == "ann@example.com"


def test_too_few_nodes_are_not_taken_for_no_locks(nodes, viewer):
    """
    L73: while too few nodes answer the page says that it does not know, and so does what it asks every few seconds.
    """
    put("orders:7")
    for node in nodes[:3]:
        node.down = True

    pages = [viewer.get(LIST, query).content.decode() for query in ({}, {"q": "orders"}, {"state": "held"})]
    live = viewer.get(LIVE).json()

    for page in pages:
        assert "Too few nodes answer to say which locks are held." in page
        assert "No lock is held." not in page
        assert "No lock matches." not in page
    assert live["unknown"] == ["default"]
    for node in nodes[:3]:
        node.down = False
    assert viewer.get(LIVE).json()["unknown"] == []


def test_a_lock_beyond_what_is_listed_is_found_by_its_name(nodes, viewer, monkeypatch):
    """
    L70: a listing is bounded; the lock whose very name is searched for is found all the same, and else it is said.
    """
    monkeypatch.setattr(changelist, "held_locks", lambda alias, **how: held_locks(alias, limit=PAGE, **how))
    for number in range(PAGE):
        put(f"n{number}", left=10)
    put("late", left=25)

    assert names(viewer.get(LIST, {"q": "late"})) == ["late"]
    assert names(viewer.get(LIST, {"q": "n4"})) == [f"n{number}" for number in (4, *range(40, 50))]
    text = viewer.get(LIST, {"q": "lat"}).content.decode()
    assert "None of the locks that this page has asked for matches." in text
    assert "No lock matches." not in text


def test_the_confirmation_says_that_all_holders_of_a_shared_lock_lose_it(nodes, operator):
    """
    L74: they share one key, so the confirmation says that all of them lose it.
    """
    with lock("orders:7", shared=True):
        shared = key_of(find_lock("orders:7").fingerprint, "default", slug("orders:7"))
        assert "All of them lose it" in act(operator, "release", shared, confirmed=False).content.decode()
    assert "All of them lose it" not in act(operator, "release", put("a"), confirmed=False).content.decode()


def test_the_confirmation_says_when_the_holders_learn_of_it(nodes, operator):
    """L72: a holder that does not renew its lock has no next renewal at which it could notice that the lock is gone."""
    keys = [put("orders:7"), put("orders:8", B)]

    for some in (keys[:1], keys):
        page = release(operator, *some, confirmed=False).content.decode()
        assert "at its next renewal or, if nobody renews the lock, when it asks the nodes" in page


def test_the_confirmation_offers_only_what_the_page_has(nodes, operator):
    """
    L74: the page that gives more time has no box that revokes a task, and does not mention one.
    """
    key = put("orders:7")

    pages = {each: act(operator, each, key, confirmed=False).content.decode() for each in ("stop", "release")}

    assert {each for each, page in pages.items() if "Its Celery task goes on" in page} == {"stop", "release"}
    assert {each for each, page in pages.items() if "revoke it below" in page} == {"stop", "release"}
    assert {each for each, page in pages.items() if 'name="revoke"' in page} == {"stop", "release"}


def test_the_confirmation_revokes_no_task_that_it_leaves_alone(nodes, operator):
    """
    L74: one lock changed hands, and now a task holds it. Nothing is done to that lock, so no box revokes the task.
    """
    kept, changed = put("a", kind="view"), put("b", kind="view")
    put("b", B)

    page = act(operator, "release", kept, changed, confirmed=False).content.decode()

    assert ("changed hands" in page, 'name="confirmed"' in page) == (True, True)
    assert 'name="revoke"' not in page


def test_the_confirmation_names_the_alias_if_there_are_several(nodes, operator):
    """
    L74: two aliases may have locks of the same name.
    """
    key = put("orders:7")
    pages = [act(operator, "release", key, confirmed=False).content.decode()]
    with override_settings(REDLOCK={"default": {"NODES": FIVE}, "other": {"NODES": ["memory://other"]}}):
        pages.append(act(operator, "release", key, confirmed=False).content.decode())

    assert ["<dt>Alias</dt><dd>default</dd>" in page for page in pages] == [False, True]
