"""The drawn pictures of the documentation are those that the code draws."""

import re
from xml.etree import ElementTree

import pytest

from tests.lab.pictures import gallery

DRAWN = gallery.files()


@pytest.mark.parametrize("name", DRAWN)
def test_stored_picture_is_the_drawn_one(name):
    """``python -m tests.lab.pictures`` writes them; a picture says what it shows, also to screen readers."""
    assert (gallery.IMAGES / name).read_text() == DRAWN[name]
    assert ElementTree.fromstring(DRAWN[name])[0].text


@pytest.mark.parametrize("name", sorted({name.rpartition("-")[0] for name in DRAWN}))
def test_both_themes_show_the_same(name):
    """The light picture and the dark one differ in their colours alone, and a page has both."""
    light, dark = (re.sub("#[0-9a-f]{6}", "#", DRAWN[f"{name}-{theme}.svg"]) for theme in ("light", "dark"))

    assert light == dark


def test_every_picture_is_on_a_page():
    """Each is shown in both themes."""
    pages = "".join(page.read_text() for page in gallery.IMAGES.parent.rglob("*.md"))

    assert [name for name in DRAWN if f"images/{name}" not in pages] == []
