"""The pages for operators are short, say whom they are for, and name checks and findings that exist."""

import re

import pytest

from django_redlock.conf import read_alias
from tests.deployment import CHECKOUT

DOCS = CHECKOUT / "docs"
PAGES = sorted((DOCS / "operate").glob("*.md"))
SHOWING = [page for page in PAGES if "REDLOCK = " in page.read_text()]
LONGEST = 1500  # words: a reader in trouble does not read more


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_page_is_short_and_says_whom_it_is_for(page):
    """
    The first sentence names the reader.
    """
    text = page.read_text()

    assert re.match(r"# .+\n\nThis page is for ", text)
    assert len(text.split()) <= LONGEST


def test_checks_and_findings_that_pages_name_exist():
    """
    Each `redlock.W001` and each "The doctor reports `clock`" is in the table that lists all of them.
    """
    listed = (DOCS / "operate" / "doctor.md").read_text() + (DOCS / "reference" / "settings.md").read_text()
    known = set(re.findall(r"^\| `([\w.-]+)` \|", listed, re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    checks = set(re.findall(r"`(redlock\.[EW]\d+)`", text))
    findings = set(re.findall(r"doctor\W+reports\s+`([a-z-]+)`", text))

    assert checks - known == set()
    assert findings - known == set()
    assert len(findings) >= 5


@pytest.mark.parametrize("page", SHOWING, ids=[page.stem for page in SHOWING])
def test_settings_on_a_page_can_be_used(page, settings):
    """
    Every value of REDLOCK that a page shows is read without an error; the tests have no database for locks alone.
    """
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for statement in re.split(r"^(?=REDLOCK = )", block, flags=re.MULTILINE)[1:]:
            namespace = {"SENTINELS": [("sentinel-1", 26379)]}
            exec(statement.replace("database://locks", "database://default"), namespace)
            settings.REDLOCK = namespace["REDLOCK"]
            assert read_alias("default").nodes


def test_terms_of_the_glossary_are_sorted():
    """
    A reader finds a term by its first letter.
    """
    (listed,) = re.findall(r"```\{glossary\}\n(.*?)```", (DOCS / "glossary.md").read_text(), re.DOTALL)
    terms = re.findall(r"^(\w.*)$", listed, re.MULTILINE)

    assert terms == sorted(terms, key=str.lower)
    assert len(terms) >= 30
