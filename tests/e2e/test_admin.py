"""The page *Held locks* in a real browser, over five real servers."""

import re

import pytest

from django_redlock import lock, locks
from django_redlock.inventory import find_lock

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright").expect

pytestmark = pytest.mark.e2e


@pytest.fixture
def held(site):
    """A held lock that nobody renews, so that its time falls."""
    name = "shop.tasks.import_catalogue"
    return locks["default"].lock(name, ttl=60, renew=False, kind="task", label=name, ref="7f3a").acquire()


def cell(page, column: str):
    """Return a cell of the first row."""
    return page.locator(f"#result_list tbody tr >> nth=0 >> .field-{column}")


def left(page) -> int:
    """Return the remaining time on the page, in seconds."""
    minutes, seconds = cell(page, "time_left").locator("time").inner_text().split(":")
    return int(minutes) * 60 + int(seconds)


def test_the_day_of_an_operator(held, open_page, nodes, shoot):
    """
    L71 to L75: logged in, one sees the lock with 5/5 votes and a falling time, then 4/5 when a node is killed, and
    releases it on the confirmation page.
    """
    page = open_page()
    expect(page.locator("h1").last).to_have_text("Held locks")
    expect(cell(page, "votes_shown")).to_contain_text("5/5")
    before = left(page)
    shoot(page, "held-locks")

    page.wait_for_timeout(2500)
    assert before - 4 <= left(page) <= before - 2

    nodes[3].kill()
    expect(cell(page, "votes_shown")).to_contain_text("4/5", timeout=10_000)
    expect(cell(page, "lock_state")).to_have_text("degraded")
    expect(page.locator(".redlock-alias")).to_contain_text("4 of 5 nodes answer")
    expect(page.locator(".redlock-alias li.redlock-no")).to_contain_text("lock-4")
    expect(page.locator("#redlock-live [aria-live]")).to_contain_text("degraded")
    shoot(page, "held-locks-node-down")

    page.locator("input.action-select").check()
    page.select_option("select[name=action]", "release")
    page.locator("button[name=index]").first.click()
    expect(page.locator(".redlock-choices .redlock-name")).to_have_text("shop.tasks.import_catalogue")
    page.fill("#redlock-reason", "worker was killed")
    shoot(page, "release")
    page.click("input[type=submit][value='Release it']")

    expect(page.locator(".messagelist")).to_contain_text("was released")
    assert find_lock(held.name) is None
    assert held.extend() is False
    expect(page.locator("#redlock-live")).to_contain_text("No lock is held.")


def test_a_lock_that_changes_hands_is_not_released(held, open_page):
    """
    L74: what was ticked for one holder is not released from the next.
    """
    page = open_page()
    page.locator("input.action-select").check()
    page.select_option("select[name=action]", "release")
    page.locator("button[name=index]").first.click()
    held.release()

    with lock(held.name, ttl=30):
        page.click("input[type=submit][value='Release it']")

        expect(page.locator(".messagelist")).to_contain_text("changed hands")
        assert find_lock(held.name) is not None


def test_rows_come_and_go(held, open_page):
    """
    The page follows the locks by itself; a row that is ticked stays in its place until it is no longer.
    """
    page = open_page()
    rows = page.locator("#result_list tbody tr")
    expect(rows).to_have_count(1)

    with lock("second", ttl=30):
        expect(rows).to_have_count(2, timeout=10_000)
        page.locator("input.action-select").first.check()
    expect(rows.filter(has_text="second")).to_have_class(re.compile("redlock-gone"), timeout=10_000)
    page.locator("input.action-select:checked").uncheck()
    page.locator("h1").last.click()
    page.evaluate("document.activeElement.blur()")
    expect(rows).to_have_count(1, timeout=10_000)


def test_pause(held, open_page):
    """
    Paused, the page asks nothing; resumed, it does again.
    """
    page = open_page()
    asked = []
    page.on("request", lambda request: "/live/" in request.url and asked.append(request.url))

    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(6000)
    assert asked == []
    page.get_by_role("button", name="Resume").click()
    page.wait_for_timeout(6000)
    assert asked != []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wide", {"viewport": {"width": 1440, "height": 700}}),
        ("dark", {"color_scheme": "dark"}),
        ("narrow", {"viewport": {"width": 400, "height": 800}}),
        ("still", {"reduced_motion": "reduce"}),
        ("no-script", {"java_script_enabled": False}),
    ],
)
def test_the_page_can_be_read(held, open_page, shoot, name, options):
    """
    In the dark, at 400 pixels, without motion and without JavaScript the list can be read.
    """
    page = open_page(**options)

    expect(cell(page, "lock_name")).to_contain_text("shop.tasks.import_catalogue")
    expect(cell(page, "votes_shown")).to_contain_text("5/5")
    assert 50 <= left(page) <= 60
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    shoot(page, f"held-locks-{name}")
