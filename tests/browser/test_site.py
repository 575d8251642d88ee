"""The documentation in a browser, in windows of a telephone, a tablet and a desk."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import needs

from .audit import serious
from .conftest import expect

pytestmark = pytest.mark.xdist_group("browser")

DOCS = Path(__file__).resolve().parents[2] / "docs"
WINDOWS = [(400, 800), (1100, 800), (1400, 900)]
BUILDERS = {"furo": "furo", "myst_parser": "myst-parser", "sphinx_copybutton": "sphinx-copybutton"}
BUILDERS |= {"sphinx_design": "sphinx-design"}
# What is wider than the page, and what is too small to be read.
WIDE = """() => [document.documentElement, ...document.querySelectorAll(".page, .content")]
    .filter(each => each.scrollWidth > each.clientWidth)
    .map(each => `${each.className} has ${each.scrollWidth} of ${each.clientWidth}`)"""
SMALL_CODE = """() => [...document.querySelectorAll("article pre, article code")]
    .filter(each => each.checkVisibility() && parseFloat(getComputedStyle(each).fontSize) < 13)
    .map(each => `${getComputedStyle(each).fontSize}: ${each.textContent.slice(0, 60)}`)"""
SMALL_TEXT = """() => [...document.querySelectorAll("article svg text")]
    .filter(each => each.checkVisibility())
    .map(each => [parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a, each.textContent])
    .filter(([size]) => size < 11)"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the site, built as it stands."""
    for module, package in BUILDERS.items():
        needs(package, find_spec(module), f"pip install {package}")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", folder / "doctrees", DOCS, folder / "html"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
    subprocess.run(command, check=True, env=ours, timeout=300)
    return folder / "html"


@pytest.fixture(params=WINDOWS, ids=lambda window: f"{window[0]} pixels")
def page(browser, request):
    """A page in a window of one of the sizes."""
    width, height = request.param
    page = browser.new_page(viewport={"width": width, "height": height})
    yield page
    page.close()


def test_every_page_fits_its_window_and_can_be_read(page, built):
    """No page scrolls sideways; code has 13 pixels or more, and the text of drawings 11 on a telephone."""
    narrow = page.viewport_size["width"] == 400
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        name = str(path.relative_to(DOCS).with_suffix(""))
        page.goto((built / f"{name}.html").as_uri())
        faults = page.evaluate(WIDE) + page.evaluate(SMALL_CODE) + (page.evaluate(SMALL_TEXT) if narrow else [])
        if faults:
            found[name] = faults

    assert found == {}


def test_drawings_have_a_form_for_each_window(page, built):
    """A drawing is shown once: wide on a desk, narrow on a telephone."""
    page.goto((built / "operate" / "topologies.html").as_uri())
    shown = page.locator("svg.drawing:visible")

    expect(shown).to_have_count(1)
    expect(shown).to_have_class("drawing narrow" if page.viewport_size["width"] == 400 else "drawing wide")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_shows_what_it_is(page, built, scheme):
    """Without scrolling one sees what the package is, how to install it, three tabs, and a picture in these colours."""
    page.emulate_media(color_scheme=scheme, reduced_motion="no-preference")
    page.goto((built / "index.html").as_uri())
    picture = page.locator("img.frame:visible")
    tabs = page.locator(".sd-tab-set > label")

    expect(tabs).to_have_text(["A block", "A task", "A view"])
    expect(picture).to_have_attribute("src", f"_images/held-locks-{scheme}.webp")
    assert picture.evaluate("async image => { await image.decode(); return image.naturalWidth; }") > 0
    for part in (page.get_by_text("Distributed locks for Django and Celery"), page.get_by_text("pip install").first):
        expect(part).to_be_in_viewport(ratio=1)
    for part in (*tabs.all(), picture):
        expect(part).to_be_in_viewport(ratio=1)
    for tab, code in (("A task", "@singleton_task"), ("A view", "@locked_view"), ("A block", "with lock(")):
        tabs.get_by_text(tab).click()
        expect(page.locator(".sd-tab-content:visible")).to_contain_text(code)
    assert serious(page, {"include": [["article"]]}) == []


def test_a_reader_who_wants_no_motion_gets_a_picture_that_stands_still(page, built):
    """The picture is then one of the moment in which two servers are down."""
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.goto((built / "index.html").as_uri())

    expect(page.locator("img.frame:visible")).to_have_attribute("src", "_images/held-locks-light.png")


def test_groups_of_pages_fold(browser, built):
    """In the sidebar, the group of the page is open. The others open by a click."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto((built / "howto" / "celery.html").as_uri())
    sidebar = page.locator(".sidebar-tree")

    expect(sidebar.locator("details[open] > summary")).to_have_text(["Celery and tasks"])
    expect(sidebar.get_by_role("link", name="Transactions")).not_to_be_visible()
    sidebar.get_by_text("Django", exact=True).click()
    expect(sidebar.get_by_role("link", name="Transactions")).to_be_visible()
    page.close()


def test_pictures_that_move_are_small():
    """Each is at most 600 kB, so that a page with one of them is there at once."""
    pictures = {path.name: path.stat().st_size for path in (DOCS / "images").glob("*.webp")}

    assert pictures.keys() == {
        f"{name}-{scheme}.webp" for name in ("held-locks", "top") for scheme in ("light", "dark")
    }
    assert max(pictures.values()) <= 600_000
