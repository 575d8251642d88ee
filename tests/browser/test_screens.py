"""The pages at every width, with few and many locks, with and without trouble: nothing overflows, nothing overlaps."""

import json
import time

import pytest

from django_redlock import locks
from django_redlock.core.owner import Owner, encode
from django_redlock.inventory import find_lock

from .conftest import expect

pytestmark = pytest.mark.xdist_group("browser")
WIDTHS = (400, 800, 1280, 1400)
OVERLAPPING = """() => {
    const seen = (e) => e.offsetParent !== null && e.textContent.trim() && getComputedStyle(e).position !== 'absolute';
    const groups = ['#result_list tbody tr', '.redlock-tiles', '.redlock-bar', '.redlock-facts', '.redlock-buttons'];
    const found = [];
    for (const group of document.querySelectorAll(groups.join(','))) {
        const boxes = Array.from(group.children).filter(seen).map((e) => [e, e.getBoundingClientRect()]);
        boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
            const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
            const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
            if (wide > 1 && high > 1) { found.push(`${a.className} ${b.className}`); }
        }));
    }
    return found;
}"""


def fill(nodes, count: int) -> None:
    """Put locks on all servers: held, without an end, on too few of them, with long names."""
    for place, server in enumerate(nodes):
        with server.client() as client:
            pipe = client.pipeline(transaction=False)
            for number in range(count):
                owner = Owner(f"web-{number % 7}", 77, "task", "shop.tasks.import_catalogue", "7f3a", time.time() - 840)
                name = f"{{orders:{number}:{'long-name:' * (number % 11)}}}"
                ends = None if number % 10 == 3 else 500_000
                if number % 10 != 4 or place < 4:
                    pipe.set(f"redlock:{name}:h", encode(f"{number:032x}", owner._replace(ttl=600.0)), px=ends)
                    pipe.zadd("redlock:index", {name: (time.time() + 500) * 1000 if ends else "inf"})
            pipe.execute()


def check(page, width: int) -> None:
    """Fail if a page is wider than its window, or if texts are on top of each other."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERLAPPING) == []


@pytest.mark.parametrize(("count", "scheme"), [(0, "light"), (1, "dark"), (50, "light"), (5000, "light")])
def test_every_page_fits_every_window(site, open_page, nodes, shoot, count, scheme):
    """
    L71, L73: the list, a lock, the confirmation and the nodes fit windows of 400 to 1400 pixels, healthy and not.
    """
    fill(nodes, count)
    page = open_page(color_scheme=scheme)

    def visit(what: str) -> None:
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 800})
            check(page, width)
            shoot(page, f"{what}-{count}-{scheme}-{width}", whole=False)

    visit("list")
    if count:
        page.locator("#result_list .redlock-name").first.click()
        expect(page.get_by_text("What each node has").first).to_be_visible()
        visit("lock")
        page.get_by_role("button", name="Release").click()
        expect(page.get_by_role("button", name="Ask it to stop")).to_be_visible()
        visit("confirm")
    if count in (5000, 0):
        return
    nodes[4].kill()
    page.goto("/admin/redlock/heldlock/nodes/")
    expect(page.locator(".redlock-panel tr.redlock-no")).to_contain_text("lock-5")
    visit("nodes")
    page.goto("/admin/redlock/heldlock/")
    visit("list-down")
    for server in nodes[:3]:
        server.kill()
    page.clock.fast_forward(6000)
    expect(page.locator(".redlock-asof")).to_contain_text("too few nodes answer")
    expect(page.locator("#result_list tbody tr").first).to_have_class("redlock-old")
    visit("list-old")
    page.reload()
    expect(page.locator(".redlock-taken")).to_contain_text("Too few nodes answer")
    visit("list-unknown")


@pytest.mark.parametrize("width", [400, 1400])
def test_the_first_screen_answers_who_and_what(site, open_page, nodes, width):
    """
    L71, L73: without scrolling, one sees the lock in the worst state, who holds it, for how long, on how many nodes,
    how many wait, and which node is ill.
    """
    fill(nodes, 50)
    nodes[4].kill()
    page = open_page(viewport={"width": width, "height": 800})
    row = page.locator("#result_list tbody tr").first

    expect(row.locator(".redlock-state")).to_have_text("no expiry")
    for part in (".field-lock_name", ".field-held_by", ".redlock-for", ".redlock-votes", ".field-waiting_count"):
        box = row.locator(part).bounding_box()
        assert box["y"] + box["height"] <= 800, part
    expect(row.locator(".redlock-for")).to_have_text("14 min")
    ill = page.locator(".redlock-alias li.redlock-no")
    expect(ill).to_have_text("lock-5 refused")
    assert ill.bounding_box()["y"] < 800


def test_old_rows_look_old_and_their_time_stands_still(site, open_page):
    """
    L73: what is no longer known is grey, says when it was known, and its countdown stands still. When the server
    answers again, it is as before.
    """
    lease = locks["default"].lock("orders:7", ttl=600, renew=False).acquire()
    while find_lock(lease.name).votes < 5:
        lease.extend()
    page = open_page()
    page.route("**/live/**", lambda route: route.fulfill(body="away"))
    page.clock.fast_forward(6000)

    row = page.locator("#result_list tbody tr")
    expect(row).to_have_class("redlock-old")
    expect(row.locator(".redlock-lastknown")).to_contain_text("last known")
    before = row.locator("time").all_inner_texts()
    page.clock.fast_forward(3000)
    assert row.locator("time").all_inner_texts() == before
    page.unroute("**/live/**")
    page.clock.fast_forward(6000)
    expect(page.locator("#result_list .redlock-lastknown")).to_have_count(0)
    expect(page.locator("#result_list tbody tr.redlock-old")).to_have_count(0)


def test_one_alias_without_a_quorum_leaves_the_rows_of_the_others(site, open_page):
    """
    L73: rows of an alias of which too few nodes answer stay and are grey; those of the others go on.
    """
    first = locks["default"].lock("orders:7", ttl=600, renew=False).acquire()
    second = locks["default"].lock("orders:8", ttl=600, renew=False).acquire()
    page = open_page()

    def answer(route) -> None:
        data = json.loads(route.fetch().text())
        rows = data["rows"].replace('data-lock="default {orders:7}"', 'data-lock="other {orders:7}"')
        route.fulfill(json={**data, "rows": rows, "unknown": ["default"], "counted": "1+ held locks"})

    second.release()
    page.route("**/live/**", answer)
    page.clock.fast_forward(6000)

    expect(page.locator("#result_list tbody tr.redlock-old")).to_have_count(2)
    expect(page.locator('#result_list tbody tr:not(.redlock-old) [data-lock="other {orders:7}"]')).to_have_count(1)
    expect(page.locator(".changelist-footer, .paginator").first).to_contain_text("1+ held locks")
    assert first.valid()


def test_a_row_that_arrived_can_be_ticked_and_is_counted(site, open_page):
    """
    L74: what an operator ticks, also in a row that came later, is counted above the list.
    """
    first = locks["default"].lock("orders:7", ttl=600, renew=False).acquire()
    page = open_page()
    second = locks["default"].lock("orders:8", ttl=600, renew=False).acquire()
    page.clock.fast_forward(6000)
    expect(page.locator("#result_list tbody tr")).to_have_count(2)

    for place in range(2):
        page.locator("input.action-select").nth(place).check()

    expect(page.locator(".action-counter").first).to_have_text("2 of 2 selected")
    expect(page.locator(".changelist-footer, .paginator").first).to_contain_text("2 held locks")
    assert first.valid()
    assert second.valid()
