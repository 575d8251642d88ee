"""The references on the pages about guarantees are valid."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TRUST = TESTS.parent / "docs" / "trust"
NAMES = ("guarantees", "criticism", "testing")
PAGES = "".join((TRUST / f"{name}.md").read_text() for name in NAMES)


def test_tests_that_the_pages_name_exist():
    """
    A reader who wants to see a guarantee tested finds the test, under the name and in the file that the pages give.
    """
    names = set(re.findall(r"`(?:tests/[\w/]+/)?(test_\w+)`", PAGES))
    written = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}

    assert len(names) > 8
    assert names <= written


def test_files_that_the_pages_name_exist():
    """The same for files and folders."""
    paths = set(re.findall(r"`(tests/[\w/]+(?:\.py)?)`", PAGES))

    assert len(paths) > 5
    assert [path for path in paths if not (TESTS.parent / path).exists()] == []
