"""The page *Held locks* in a real browser, over five real servers."""

import re

import pytest

from django_redlock import lock
from django_redlock.inventory import find_lock
from tests.held import held_by
from tests.waiting import wait_until

from .conftest import expect

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture
def held(site):
    """A held lock that is not renewed for minutes, so that its time falls; on all nodes, also where one was late."""
    name = "shop.tasks.import_catalogue"
    lease = held_by(name, "task", name, "7f3a", ttl=600, renew=True).acquire()
    while find_lock(name).votes < 5:
        lease.extend()
    return lease


def cell(page, column: str):
    """Return a cell of the first row."""
    return page.locator(f"#result_list tbody tr >> nth=0 >> .field-{column}")


def left(page) -> int:
    """Return the remaining time on the page, in seconds."""
    minutes, seconds = cell(page, "time_left").locator("time").inner_text().split(":")
    return int(minutes) * 60 + int(seconds)


def later(page, seconds: int = 6) -> None:
    """Let time pass on the page, enough for it to ask anew unless told otherwise."""
    page.clock.fast_forward(seconds * 1000)


def test_the_day_of_an_operator(held, open_page, nodes):
    """
    Logged in, one sees the lock with 5/5 votes and what each node has of it, then 4/5 when a node is killed, and
    releases it on the confirmation page.
    """
    page = open_page()
    expect(page.locator("h1").last).to_have_text("Held locks")
    expect(cell(page, "votes_shown")).to_contain_text("5/5")
    page.locator("#result_list .redlock-name").click()
    expect(page.get_by_text("this holder")).to_have_count(5)
    page.get_by_role("link", name="All held locks").click()

    nodes[3].kill()
    later(page)
    expect(cell(page, "votes_shown")).to_contain_text("4/5")
    expect(cell(page, "lock_state")).to_have_text("degraded")
    expect(page.locator(".redlock-alias")).to_contain_text("4 of 5 nodes answer")
    expect(page.locator(".redlock-alias li.redlock-no")).to_contain_text("lock-4")
    expect(page.locator("#redlock-live [aria-live]")).to_contain_text("degraded")
    page.goto("/admin/redlock/heldlock/nodes/")
    expect(page.locator(".redlock-panel tr.redlock-no")).to_contain_text("lock-4")
    expect(page.locator(".redlock-panel tr.redlock-yes")).to_have_count(4)
    page.go_back()

    page.locator("input.action-select").check()
    page.select_option("select[name=action]", "release")
    page.locator("button[name=index]").first.click()
    expect(page.locator(".redlock-choices .redlock-name")).to_have_text("shop.tasks.import_catalogue")
    page.fill("#redlock-reason", "worker was killed")
    page.get_by_role("button", name="Release it").click()

    expect(page.locator(".messagelist")).to_contain_text("was released")
    assert find_lock(held.name) is None
    assert held.extend() is False
    expect(page.locator("#redlock-live")).to_contain_text("No lock is held.")


SELECT = """([first, last, backwards]) => {
    const ends = [[first.firstChild, 0], [last.firstChild, 3]];
    document.getSelection().setBaseAndExtent(...(backwards ? ends.reverse() : ends).flat());
    return first.isConnected && last.isConnected;  // a refresh may just have replaced them
}"""
SELECTED = "(([s]) => [s.toString(), s.anchorNode.data, s.focusNode.data])([document.getSelection()])"


def select(page, first, last, backwards: bool = False) -> list[str]:
    """Select from the begin of one element into another one; return the text, and those of its ends."""
    wait_until(lambda: page.evaluate(SELECT, [first.element_handle(), last.element_handle(), backwards]))
    return page.evaluate(SELECTED)


def test_selected_text_stays_selected_on_the_list(held, open_page):
    """
    Somebody who selects a name to copy it can take longer than a refresh, also when locks come and go. What is said
    about the nodes can be selected while the list changes.
    """
    page = open_page()
    rows, name = page.locator("#result_list tbody tr"), page.locator(".redlock-name")
    quorum = page.locator(".redlock-nodes [data-say]")
    before = select(page, name, name)

    with lock("another", ttl=30):
        later(page)
        later(page)
        assert page.evaluate(SELECTED) == before
        before = select(page, quorum, quorum)
        later(page)
        expect(rows).to_have_count(2)
        assert page.evaluate(SELECTED) == before


@pytest.mark.parametrize("backwards", [False, True])
def test_selected_text_stays_selected_on_the_page_of_a_lock(held, open_page, backwards):
    """The page changes around the selected text; when the lock has gone, the text stays, and looks old."""
    page = open_page()
    page.locator("#result_list .redlock-name").click()
    part = page.locator("[data-refresh]")
    extended = part.locator("dt:has-text('Extended') + dd")
    times = extended.inner_text()
    title, value = part.locator("dt", has_text="Fencing token"), part.locator("dt:has-text('Fingerprint') + dd")
    before = select(page, title, value, backwards)
    assert str(held.fencing_token) in before[0]

    assert held.extend()
    later(page)
    expect(extended).not_to_have_text(times)
    assert page.evaluate(SELECTED) == before
    held.release()
    later(page)
    expect(part).to_have_class("redlock-old")
    assert page.evaluate(SELECTED) == before
    page.evaluate("document.getSelection().removeAllRanges()")
    later(page)
    expect(part).to_contain_text("Nobody holds this lock now.")
    expect(part).not_to_have_class("redlock-old")


def test_selected_text_that_begins_above_the_page_of_a_lock_stays_selected(held, open_page):
    """All of the page stays as it is then, and looks old."""
    page = open_page()
    page.locator("#result_list .redlock-name").click()
    part = page.locator("[data-refresh]")
    ends = select(page, page.locator("h1").last, part.locator(".redlock-state"))[1:]

    later(page)
    expect(part).to_have_class("redlock-old")
    assert page.evaluate(SELECTED)[1:] == ends


def test_pause_and_log_out(held, open_page):
    """
    Paused, the page asks nothing, and its time stands still; resumed, it asks again, and says that nobody asked it to.
    Left open after logging out, it says so, and not that the server is away.
    """
    page = open_page()
    page.get_by_role("button", name="Pause").click()
    page.wait_for_load_state("networkidle")
    asked = []
    page.on("request", lambda request: "/live/" in request.url and asked.append(request.url))
    before = left(page)

    for _ in range(10):
        later(page)
    assert left(page) == before
    assert asked == []
    with page.expect_response("**/live/**") as answered:
        page.get_by_role("button", name="Resume").click()
        later(page)
    assert answered.value.request.headers["x-redlock-poll"] == "1"
    page.context.clear_cookies()
    later(page)
    expect(page.locator(".redlock-asof")).to_contain_text("log in again")


def test_the_pages_can_be_read_without_javascript(held, open_page):
    """Without JavaScript, the list, the page of a lock, the confirmation and the nodes can be read."""
    page = open_page(java_script_enabled=False)
    expect(cell(page, "lock_name")).to_contain_text("shop.tasks.import_catalogue")
    expect(cell(page, "votes_shown")).to_contain_text("5/5")
    assert 20 <= left(page) <= 600
    page.locator("#result_list .redlock-name").click()
    expect(page.get_by_text("What each node has").first).to_be_visible()
    page.get_by_role("button", name="Release").click()
    expect(page.locator(".redlock-choices .redlock-name")).to_be_visible()
    page.goto("/admin/redlock/heldlock/nodes/")
    expect(page.get_by_text("lock-1").first).to_be_visible()


def taken(name: str, *, kind="task", label="", ref="", **how):
    """Hold a lock that nobody renews."""
    return held_by(name, kind, label, ref, **{"ttl": 600, **how}).acquire()


def tab_to(page, selector: str, key: str = "Tab"):
    """Press a key until the focus is on an element, as somebody without a mouse does."""
    for _ in range(120):
        page.keyboard.press(key)
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return page.locator(":focus")
    raise AssertionError(f"the key {key} does not lead to {selector}")


def test_every_way_by_keyboard(held, open_page, nodes):
    """
    Pause, tiles, columns, filters, the page of a lock and its actions are reached with the keyboard alone, an action is
    chosen and confirmed with it, and the page does not take the focus away when it is fetched anew.
    """
    page = open_page()
    tab_to(page, ".redlock-pause")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Resume")).to_be_focused()
    page.keyboard.press("Space")
    tile = tab_to(page, ".redlock-tile[href*=degraded]")
    nodes[3].kill()
    later(page)
    expect(page.locator(".redlock-alias")).to_contain_text("4 of 5 nodes answer")
    expect(tile).to_contain_text("Degraded")
    tab_to(page, ".column-lock_name .text a")
    name = tab_to(page, "a.redlock-name")
    nodes[3].start()
    later(page)
    expect(page.locator(".redlock-alias")).to_contain_text("5 of 5 nodes answer")
    expect(name).to_have_class("redlock-name")
    tab_to(page, "#changelist-filter a, #changelist-filter summary")
    tab_to(page, "a.redlock-name", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("What each node has").first).to_be_visible()
    for action in ("stop", "release"):
        tab_to(page, f"button[name=action][value={action}]")
    table = tab_to(page, ".redlock-wide")
    with page.expect_response("**/lock/**") as answered:
        later(page)
    assert answered.value.request.headers["x-redlock-poll"] == "1"
    expect(table).to_have_class("redlock-wide")

    page.goto("/admin/redlock/heldlock/")
    tab_to(page, "select[name=action]")
    page.keyboard.type("Ask")
    tab_to(page, "input.action-select")
    page.keyboard.press("Space")
    tab_to(page, "button[name=index]", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".redlock-choices")).to_be_visible()
    tab_to(page, "button[value=stop]")
    page.keyboard.press("Enter")
    expect(page.locator(".messagelist")).to_contain_text("was asked to stop")
    assert held.extend() is False
    assert held.reason == "revoked"


def test_what_a_screen_reader_hears(site, open_page, nodes):
    """
    Votes are said in words, tables have headers, regions and fields have names. The list says which node was lost and
    how many rows changed, not each of many; the page of a lock says that it is free, and the page of the nodes which of
    them does not answer.
    """
    leases = [taken(f"orders:{number}") for number in range(6)]
    page = open_page()
    spoken = page.locator(".redlock-say[aria-live=polite]")
    expect(page.locator(".redlock-votes .visually-hidden").first).to_have_text("5 of 5 nodes")
    expect(page.get_by_role("region", name="Nodes of default")).to_be_visible()
    unnamed = "els => els.filter(e => !(e.labels && e.labels.length) && !e.ariaLabel && !e.title).length"
    assert page.locator("#content input:not([type=hidden]):not([type=submit])").evaluate_all(unnamed) == 0
    nodes[3].kill()
    later(page)
    # In one look: the next refresh may find another reason, and announce only that.
    expect(spoken).to_contain_text(
        re.compile(r"4 of 5 nodes answer.* lock-4 \((refused|closed)\), orders:.* and 4 more")
    )
    page.locator("#result_list .redlock-name").first.click()
    expect(page.get_by_text("What each node has").first).to_be_visible()
    leases[0].release()
    later(page)
    expect(spoken).to_contain_text("orders:0: Nobody holds this lock now.")
    page.goto("/admin/redlock/heldlock/nodes/")
    panel = page.locator(".redlock-panel")
    expect(panel.locator("tr.redlock-no")).to_contain_text("lock-4")
    assert panel.get_by_role("columnheader").count() == 10
    assert panel.get_by_role("rowheader").count() == 5
    nodes[2].kill()
    later(page)
    expect(spoken).to_have_text(re.compile("^lock-3: (refused|closed)$"))


def test_the_filters_are_folded_where_there_is_no_room(held, open_page):
    """Below 1,100 pixels the filters are folded, also when a window becomes that narrow. With room they open again."""
    page = open_page(viewport={"width": 1280, "height": 800})
    filters = page.locator("#changelist-filter details")
    folded = page.locator("#changelist-filter details:not([open])")
    expect(folded).to_have_count(0)
    page.set_viewport_size({"width": 1000, "height": 800})
    expect(folded).to_have_count(filters.count())
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(folded).to_have_count(0)


def test_a_long_name_is_copied(site, open_page):
    """The list cuts a long name; its button and that of its page copy all of it."""
    lease = taken(name := "orders:" + "long-name:" * 12)
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    for _ in range(2):
        page.evaluate("navigator.clipboard.writeText('')")
        page.locator(".redlock-copy").click()
        expect(page.locator(".redlock-say")).to_have_text("The name was copied.")
        assert page.evaluate("navigator.clipboard.readText()") == name
        page.locator(".redlock-name, .redlock-release > p > a").first.click()
    assert lease.valid()
