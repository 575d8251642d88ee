"""The pages at every width, with few and many locks, with and without trouble: nothing overflows, nothing overlaps."""

import re
import time
from contextlib import contextmanager
from itertools import cycle
from threading import Thread

import pytest
from django.conf import settings
from django.test import RequestFactory, override_settings
from django.utils.timezone import now

from django_redlock import LockTakenError, lock, locks
from django_redlock.contrib.history.models import Hold
from django_redlock.inventory import find_lock, force_release
from django_redlock.views import response_to
from tests.held import value
from tests.waiting import wait_until

from .audit import serious
from .conftest import expect, named

pytestmark = pytest.mark.xdist_group("screens")
HISTORY = "/admin/redlock_history/hold/"
WIDTHS = (400, 800, 1280, 1400)
TASK = "warehouse.inventory.tasks.synchronise_stock_levels_with_suppliers"
WORST = f"orders:3:{'long-name:' * 3}"  # of those that fill() puts there: it has no expiry, and is held for longest
# The layout is the same in both schemes. An audit takes most of the time: pages are audited light or dark, in turn.
LOOKS = [*(("light", width) for width in WIDTHS), ("dark", 1400)]
AUDITS = [("light", 400), ("dark", 1400)]
# Texts that lie on top of each other: the boxes of all text nodes, as far as anybody can see them.
OVERLAPPING = """() => {
    const boxes = [];
    const style = (e) => getComputedStyle(e);
    const unseen = '.visually-hidden, [hidden], option, details:not([open]) > :not(summary)';
    const hidden = (e) => e.closest(unseen) || style(e).visibility === 'hidden';
    const frames = new Map();  // how much of the window an element and its parents let through
    const frame = (e) => {
        if (!e) { return {left: -1e6, top: -1e6, right: 1e6, bottom: 1e6}; }
        if (!frames.has(e)) {
            const f = frame(e.parentElement), box = e.getBoundingClientRect(), cut = style(e).overflowX !== 'visible';
            frames.set(e, cut ? {...f, left: Math.max(f.left, box.left), right: Math.min(f.right, box.right)} : f);
        }
        return frames.get(e);
    };
    const walk = document.createTreeWalker(document.querySelector('#content'), NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode;
        if (!node.data.trim() || hidden(node.parentElement)) { continue; }
        const range = document.createRange();
        range.selectNodeContents(node);
        const {left, right} = frame(node.parentElement);
        for (const {x, y, width, height} of range.getClientRects()) {
            const box = {left: Math.max(x, left), right: Math.min(x + width, right), top: y, bottom: y + height};
            if (box.right - box.left > 1 && height > 1) { boxes.push([node, box]); }
        }
    }
    const found = [];
    boxes.sort(([, p], [, q]) => p.top - q.top);
    boxes.forEach(([a, p], i) => {
        for (let j = i + 1; j < boxes.length && boxes[j][1].top < p.bottom - 3; j++) {
            const [b, q] = boxes[j];
            const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
            if (a !== b && wide > 2) { found.push(`${a.data.trim()} | ${b.data.trim()}`); }
        }
    });
    return found;
}"""

# A table that does not fit into its own frame, and has to be moved there to be read.
CUT = """() => Array.from(document.querySelectorAll('.results, .redlock-wide, .redlock-chart'))
    .filter((frame) => frame.scrollWidth > frame.clientWidth + 1)
    .map((frame) => `${frame.scrollWidth} > ${frame.clientWidth}`)"""

# The button of the actions on another line than their choice.
APART = """() => {
    const places = ['select', 'button'].map((each) => document.querySelector(`#changelist .actions ${each}`));
    const [choice, button] = places.map((each) => each?.getBoundingClientRect().top);
    return choice && Math.abs(choice - button) > 10 ? [choice, button] : [];
}"""

# A moment of which a part is on another line.
BROKEN = """() => Array.from(document.querySelectorAll('#result_list time'))
    .filter((each) => each.getClientRects().length > 1)
    .map((each) => each.innerText)"""

# A field that is too narrow to type into.
CRAMPED = """() => Array.from(document.querySelectorAll('#content input[type=text]'), (each) => each.clientWidth)
    .filter((width) => width < 80)"""

COUNT_CHANGES = """(counter) => {
    window.changes = 0;
    const watch = new MutationObserver(() => { window.changes += 1; });
    watch.observe(counter, {childList: true, characterData: true, subtree: true});
}"""

# Texts in Latin letters that are not read from left to right: the places of the characters of each, in each line.
REVERSED = """() => {
    const found = [];
    const walk = document.createTreeWalker(document.querySelector('#content'), NodeFilter.SHOW_TEXT);
    while (walk.nextNode()) {
        const node = walk.currentNode, text = node.data.trimEnd();
        const skipped = node.parentElement.closest(".visually-hidden, option");
        if (skipped || !/^[ -~\\s]*[a-z][ -~\\s]*$/i.test(text)) { continue; }
        const range = document.createRange();
        let last = null;
        for (let i = 0; i < text.length; i++) {
            range.setStart(node, i);
            range.setEnd(node, i + 1);
            const box = range.getBoundingClientRect();
            if (!text[i].trim() || !box.width) { continue; }
            if (last && box.top < last.bottom && box.left < last.left) { found.push(text.trim()); break; }
            last = box;
        }
    }
    return found;
}"""


def fill(nodes, count: int) -> None:
    """Put locks on all servers: held, without an end, on too few of them, with long names."""
    for place, server in enumerate(nodes):
        with server.client() as client:
            pipe = client.pipeline(transaction=False)
            for number in range(count):
                about = {"host": f"web-{number % 7}", "label": TASK, "ref": "7f3a9c52-0d1e-4b8a", "ttl": 600.0}
                name = f"{{orders:{number}:{'long-name:' * (number % 11)}}}"
                ends = None if number % 10 == 3 else 500_000
                about |= {} if ends else {"process": "1f.ab"}  # whose holder can be asked to stop
                if number % 10 != 4 or place < 4:
                    pipe.set(f"redlock:{name}:h", value(f"{number:032x}", age=840, **about), px=ends)
                    pipe.zadd("redlock:index", {name: (time.time() + 500) * 1000 if ends else "inf"})
            pipe.execute()


class Visit:
    """Look at a page at every width and in both colour schemes, without loading it again."""

    def __init__(self, page) -> None:
        self.page = page
        self._audits = cycle(AUDITS)

    def __call__(self, what: str, path: str = "") -> None:
        """Fail if anything is wider than its window or frame, if texts overlap, or if axe finds something serious."""
        if path:
            self.page.goto(path)
        self.page.wait_for_load_state()  # a page whose style sheets have not arrived is wider
        audited = next(self._audits)
        for scheme, width in LOOKS:
            self.page.emulate_media(color_scheme=scheme)
            self.page.set_viewport_size({"width": width, "height": 800})
            where = (what, scheme, width)
            assert self.page.evaluate("document.documentElement.scrollWidth") <= width, where
            for script in (CUT, OVERLAPPING, APART, CRAMPED, BROKEN):
                assert (*where, self.page.evaluate(script)) == (*where, [])
            assert (*where, serious(self.page) if (scheme, width) == audited else []) == (*where, [])

    def open_lock(self) -> None:
        """Open the page of the first lock."""
        self.page.locator("#result_list .redlock-name").first.click()
        expect(self.page.get_by_text("What each node has").first).to_be_visible()


@contextmanager
def second_alias(nodes):
    """Have a second alias on the last three nodes, one of which answers: it has no quorum, and the first one has."""
    options = {"restart_guard": False, "node_timeout": 7.0, "max_ttl": 900.0}
    other = {"NODES": named(nodes)[2:], "KEY_PREFIX": "other", "OPTIONS": options}
    with override_settings(REDLOCK={**settings.REDLOCK, "other": other}):
        held = [locks["other"].lock(f"reports:{number}", ttl=600, renew=False).acquire() for number in range(2)]
        yield held
    locks.reset()


def test_every_page_fits_every_window(site, open_page, nodes):
    """
    The list, a lock, the confirmations and the nodes fit windows of 400 to 1400 pixels, light and dark, and
    an audit finds nothing that keeps people from using them.
    """
    visit = Visit(open_page())
    visit("list-empty")
    fill(nodes, 50)
    visit("list", "/admin/redlock/heldlock/")
    visit.open_lock()
    visit("lock")
    for button, confirm in (("Ask the holder to stop", "Ask it to stop"), ("Release", "Release it")):
        visit.page.get_by_role("button", name=button, exact=True).click()
        expect(visit.page.get_by_role("button", name=confirm)).to_be_visible()
        visit(confirm)
        visit.page.go_back()
    visit("nodes", "/admin/redlock/heldlock/nodes/")


def test_every_page_in_trouble(site, open_page, nodes):
    """The same with a node down and without a quorum, as the page finds out by itself and after a reload."""
    fill(nodes, 50)
    visit, lock_visit = Visit(open_page()), Visit(open_page())
    nodes[4].kill()
    visit("nodes", "/admin/redlock/heldlock/nodes/")
    expect(visit.page.locator(".redlock-panel tr.redlock-no")).to_contain_text("refused")
    visit("list", "/admin/redlock/heldlock/")
    lock_visit.open_lock()
    for server in nodes[:3]:
        server.kill()
    visit.page.clock.fast_forward(6000)
    expect(visit.page.locator(".redlock-asof")).to_contain_text("too few nodes answer")
    expect(visit.page.locator("#result_list tbody tr").first).to_have_class("redlock-old")
    visit("list-old")
    visit("list-unknown", "/admin/redlock/heldlock/")
    expect(visit.page.locator(".redlock-taken")).to_contain_text("Too few nodes answer")
    lock_visit.page.get_by_role("button", name="Release", exact=True).click()
    expect(lock_visit.page.locator(".redlock-choices .errornote")).to_contain_text("too few nodes answered")
    expect(lock_visit.page.locator("h1").last).to_have_text("Nothing can be done")
    lock_visit("confirm-unknown")
    lock_visit.page.go_back()
    lock_visit.page.reload()
    expect(lock_visit.page.locator("p.errornote")).to_contain_text("Too few to say which locks are held")
    lock_visit("lock-unknown")


def test_one_of_two_aliases_in_trouble(site, open_page, nodes):
    """
    The pages with a second alias that has lost its quorum: its locks are unknown, also those of other programs, whose
    keys look different; those of the first are shown.
    """
    fill(nodes, 3)
    foreign = "another {program}"
    for server in nodes[2:]:
        with server.client() as client:
            client.set(f"other:{foreign}:h", "theirs", px=500_000)
            client.zadd("other:index", {foreign: (time.time() + 500) * 1000})
    with second_alias(nodes):
        visit = Visit(open_page())
        expect(visit.page.locator("#result_list tbody tr")).to_have_count(6)
        visit("list-both")
        nodes[3].kill()
        nodes[4].kill()
        visit.page.clock.fast_forward(6000)
        expect(visit.page.locator("#result_list tbody tr.redlock-old")).to_have_count(3)
        expect(visit.page.locator(".redlock-asof")).to_have_text("Not updated: too few nodes answer (other).")
        expect(visit.page.locator(".changelist-footer, .paginator").first).to_contain_text("+ held locks")
        for server in nodes[:3]:
            with server.client() as client:
                client.delete("redlock:{orders:0:}:h")
        visit.page.clock.fast_forward(6000)
        expect(visit.page.locator("#result_list tbody tr")).to_have_count(5)  # what is known to have ended is gone
        expect(visit.page.locator("#result_list tbody tr.redlock-old")).to_have_count(3)
        visit("list-old")
        visit("list", "/admin/redlock/heldlock/")
        expect(visit.page.locator("#result_list tbody tr")).to_have_count(2)
        expect(visit.page.locator(".redlock-alias.redlock-error")).to_contain_text("other")
        visit("nodes", "/admin/redlock/heldlock/nodes/")


def test_the_history_fits_every_window(site, open_page):
    """The list of former locks and their kinds: empty, with rows, and with no match."""
    visit = Visit(open_page())
    visit("former-none", HISTORY)
    about = {"alias": "default", "host": "web-1", "pid": 7, "ttl": 30.0, "ended": now()}
    for name, outcome, seconds in (("shop.import:*", "expired", 840.0), ("orders:*", "released", 0.0004)):
        row = {**about, "name": name, "template": name, "outcome": outcome, "waited": 0.2, "held": seconds}
        Hold.objects.bulk_create(Hold(**row) for _ in range(30))
    visit("former", HISTORY)
    visit("kinds", f"{HISTORY}kinds/")
    visit("former-unmatched", f"{HISTORY}?q=nothing")


def test_pages_that_read_from_right_to_left(site, open_page, nodes):
    """
    In Arabic the pages are mirrored and fit their windows. Names, hosts and texts that are not translated keep the
    order of their characters.
    """
    fill(nodes, 5)
    sharers = [lock("shared", shared=True, wait=30).acquire() for _ in range(3)]
    nodes[4].kill()
    row = {"alias": "default", "host": "web-1", "pid": 7, "ttl": 30.0, "ended": now(), "waited": 0.2, "held": 840.0}
    Hold.objects.create(**row, name="orders:7", template="orders:*", outcome="expired")

    def look(what: str) -> None:
        for width in (400, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (what, width)
            for script in (CUT, OVERLAPPING, APART, REVERSED):
                assert (what, width, page.evaluate(script)) == (what, width, [])

    with override_settings(LANGUAGE_CODE="ar"):
        page = open_page()
        expect(page.locator("html[dir=rtl]")).to_have_count(1)
        expect(page.get_by_text("3 holders, who share it").first).to_be_visible()
        look("list")
        page.locator("#result_list .redlock-name").first.click()
        expect(page.get_by_text("What each node has").first).to_be_visible()
        look("lock")
        page.get_by_role("button", name="Release", exact=True).click()
        expect(page.get_by_role("button", name="Release it")).to_be_visible()
        look("confirmation")
        for path in ("/admin/redlock/heldlock/nodes/", HISTORY, f"{HISTORY}kinds/"):
            page.goto(path)
            look(path)
    for lease in sharers:
        lease.release()


@pytest.mark.parametrize("width", [400, 1400])
def test_the_first_screen_answers_who_and_what(site, open_page, nodes, width):
    """
    Without scrolling, one sees the lock in the worst state, who holds it, for how long, on how many nodes,
    how many wait, and which node is ill.
    """
    fill(nodes, 50)
    nodes[4].kill()
    waiter = Thread(target=lambda: locks["default"].lock(WORST, wait=600).acquire().release(), daemon=True)
    waiter.start()
    wait_until(lambda: find_lock(WORST).waiting)
    page = open_page(viewport={"width": width, "height": 800})
    row = page.locator("#result_list tbody tr").first

    expect(row.locator(".redlock-state")).to_have_text("no expiry")
    for part in (".field-lock_name", ".field-held_by", ".redlock-for", ".redlock-votes", ".field-waiting_count"):
        box = row.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 800, part
    expect(row.locator(".field-lock_name a")).to_have_attribute("title", WORST)
    expect(row.locator(".redlock-waited")).to_have_text("1")
    ill = page.locator(".redlock-alias li.redlock-no")
    expect(ill).to_contain_text("lock-5")
    assert ill.bounding_box()["y"] + ill.bounding_box()["height"] <= 800
    held = find_lock(WORST)
    force_release(held, held.fingerprint)
    waiter.join(60)
    assert not waiter.is_alive()


def test_old_rows_show_the_time_of_the_server(site, open_page, nodes):
    """
    The time at which a row was last known is that of the page's own "As of", whatever the browser's time zone.
    Each row has its own: those of one alias are not older because too few nodes of another answered before.
    """
    with second_alias(nodes):
        lease = locks["default"].lock("orders:7", ttl=600, renew=False).acquire()
        page = open_page(timezone_id="Asia/Kathmandu")
        taken, at = page.locator(".redlock-taken"), "element => element.dataset.at"
        opened = taken.evaluate(at)
        nodes[3].kill()
        nodes[4].kill()
        time.sleep(1.1)  # the time has seconds
        page.clock.fast_forward(6000)
        old = page.locator("#result_list tbody tr.redlock-old .redlock-lastknown")
        expect(old).to_have_text([f"last known {opened}"] * 2)
        later = taken.evaluate(at)
        assert later > opened
        expect(taken).to_contain_text(f"Asked at {later}")
        nodes[2].kill()
        page.clock.fast_forward(6000)
        expect(old).to_have_text([f"last known {opened}"] * 2 + [f"last known {later}"])
        assert lease.valid()


def test_a_lock_whose_time_is_over_is_old_until_the_page_asks_again(site, open_page):
    """Nobody knows then whether it has ended or been renewed: its row says when it was last known."""
    lease = locks["default"].lock("orders:7", ttl=600).acquire()
    page = open_page()
    rows = page.locator("#result_list tbody tr")

    rows.locator(".redlock-left").evaluate("element => { element.dataset.left = 3; }")
    page.clock.fast_forward(3500)
    expect(rows).to_have_class("redlock-old")
    expect(rows.locator(".redlock-left time")).to_have_text("0:00")
    expect(rows.locator(".redlock-lastknown")).to_contain_text("last known")
    page.clock.fast_forward(2000)
    expect(rows.locator(".redlock-lastknown")).to_have_count(0)
    assert lease.release() == "released"


def test_a_server_that_hangs_makes_the_page_old(site, open_page):
    """
    A request that is never answered, or otherwise than expected, does not leave a page that looks up to date: rows and
    nodes turn grey, and a countdown stands still.
    """
    lease = locks["default"].lock("orders:7", ttl=600, renew=False).acquire()
    page = open_page()
    page.route("**/live/**", lambda route: None)
    page.clock.fast_forward(6000)

    expect(page.locator(".redlock-asof")).to_have_text("Not updated: the server did not answer.")
    expect(page.locator("#result_list tbody tr")).to_have_class("redlock-old")
    expect(page.locator(".redlock-nodes")).to_have_class("redlock-nodes redlock-old")
    assert serious(page) == []
    page.unroute("**/live/**")
    page.clock.fast_forward(6000)
    expect(page.locator("#result_list tbody tr.redlock-old")).to_have_count(0)
    page.route("**/live/**", lambda route: route.fulfill(body="away"))
    page.clock.fast_forward(6000)
    row = page.locator("#result_list tbody tr.redlock-old")
    expect(row.locator(".redlock-lastknown")).to_contain_text("last known")
    before = row.locator("time").all_inner_texts()
    page.clock.fast_forward(3000)
    assert row.locator("time").all_inner_texts() == before
    page.unroute("**/live/**")
    page.clock.fast_forward(6000)
    expect(page.locator(".redlock-asof")).to_have_text("")
    expect(page.locator("#redlock-live .redlock-old, #result_list .redlock-old")).to_have_count(0)
    assert lease.valid()


def test_the_page_of_a_lock_keeps_what_was_known(site, open_page, nodes):
    """
    When too few nodes answer, the page of a lock still shows who held it, in grey and with the time when that was
    known. When they answer again, it is as before.
    """
    lease = locks["default"].lock("orders:7", ttl=600, renew=False).acquire()
    page = open_page()
    page.locator("#result_list .redlock-name").first.click()
    part, status = page.locator("[data-refresh]"), page.locator(".redlock-asof")
    expect(part.get_by_text("this holder").first).to_be_visible()
    for server in nodes[:3]:
        server.kill()
    page.clock.fast_forward(6000)

    expect(status).to_have_text("Not updated: too few nodes answer (default).")
    expect(part).to_have_class("redlock-old")
    known = part.locator(".redlock-taken").evaluate("element => element.dataset.at")
    expect(part.locator(".redlock-lastknown")).to_have_text(f"last known {known}")
    expect(part.get_by_text("this holder").first).to_be_visible()
    for server in nodes[:3]:
        server.start()
    page.clock.fast_forward(6000)
    expect(status).to_have_text("")
    expect(part).not_to_have_class("redlock-old")
    lease.release(wait=False)


def test_the_page_of_a_refused_request(browser):
    """The page fits small and wide windows, light and dark, and axe finds nothing serious in it."""
    request = RequestFactory().post("/", headers={"accept": "text/html"})
    answer = response_to(request, LockTakenError("orders:7", 0.0, 1, {"n0": "held"}, 1), status=409)
    page = browser.new_page()
    page.set_content(answer.content.decode())

    for scheme, width in LOOKS:
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert serious(page, {"include": [["html"]]}) == []
    page.close()


def test_a_row_that_arrived_can_be_ticked_and_is_counted(site, open_page):
    """
    What an operator ticks, also in a row that came later, is counted above the list. A row that left stays in its place
    while it is ticked, and is not counted. The number is written only when it changes. The action asks nothing about
    changes that nobody made.
    """
    first = locks["default"].lock("orders:7", ttl=600, renew=False).acquire()
    page = open_page()
    asked = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    counter = page.locator(".action-counter").first
    second = locks["default"].lock("orders:8", ttl=600, renew=False).acquire()
    page.clock.fast_forward(6000)
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
    expect(page.locator(".changelist-footer, .paginator").first).to_contain_text("2 held locks")
    page.locator("input.action-select").nth(1).check()
    second.release()
    page.clock.fast_forward(6000)
    expect(page.locator("#result_list tbody tr", has_text="orders:8")).to_have_class(re.compile("redlock-gone"))
    page.locator("input.action-select:checked").uncheck()
    page.locator("h1").last.click()
    page.evaluate("document.activeElement.blur()")
    page.clock.fast_forward(6000)
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    expect(counter).to_have_text("0 of 1 selected")
    counter.evaluate(COUNT_CHANGES)
    with page.expect_response("**/live/**"):
        page.clock.fast_forward(6000)
    third = locks["default"].lock("orders:9", ttl=600, renew=False).acquire()
    page.clock.fast_forward(6000)
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
    expect(counter).to_have_text("0 of 2 selected")
    assert page.evaluate("changes") == 1, "a screen reader reads the number out again, although it is the same"

    page.locator("#action-toggle").check()
    expect(counter).to_have_text("2 of 2 selected")
    page.locator("input.action-select").nth(1).uncheck()
    expect(counter).to_have_text("1 of 2 selected")
    page.locator("input.action-select").nth(1).check()
    page.select_option("select[name=action]", "release")
    page.locator("button[name=index]").first.click()

    expect(page.locator(".redlock-choices .redlock-name")).to_have_count(2)
    assert not asked
    assert first.valid()
    assert third.valid()
