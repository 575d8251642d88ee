"""The texts for operators are translated completely, with the same placeholders."""

import ast
import gettext
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.utils.translation.template import templatize

import django_redlock

PACKAGE = Path(django_redlock.__file__).parent
FUNCTIONS = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy"}
TEXT = r"u?('''(?:.|\n)*?'''|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")"
BLANK = re.compile(r"%\((\w+)\)[sd]")


PLACES = ("admin", "inventory", "models.py", "apps.py", "contrib/history")


def texts() -> Iterator[str]:
    """Yield every text of the admin's pages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if not path.relative_to(PACKAGE).as_posix().startswith(PLACES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            marked = isinstance(node, ast.Call) and getattr(node.func, "id", "") in FUNCTIONS
            if marked and isinstance(node.args[0], ast.Constant):
                yield node.args[0].value
    for path in PACKAGE.rglob("templates/admin/**/*.html"):
        code = templatize(path.read_text(encoding="utf-8"))
        for quoted in re.findall(r"\b(?:n?gettext|_)\(\s*" + TEXT, code):
            yield ast.literal_eval(quoted)


@pytest.fixture(params=["de", "zh_Hans"])
def catalog(request) -> gettext.GNUTranslations:
    with (PACKAGE / "locale" / request.param / "LC_MESSAGES" / "django.mo").open("rb") as file:
        return gettext.GNUTranslations(file)


def test_every_text_is_translated(catalog):
    known = {key[0] if isinstance(key, tuple) else key for key, text in catalog._catalog.items() if text}
    asked = set(texts())

    assert asked >= {"Held locks", "Nobody waits.", "Kinds of locks"}  # of Python, of a template and of the history
    assert asked - known == set()


def test_blanks_are_the_same(catalog):
    for key, text in catalog._catalog.items():
        original = key[0] if isinstance(key, tuple) else key
        if original and not (isinstance(key, tuple) and key[1] == 0 and "%(" not in original):
            assert set(BLANK.findall(text)) <= set(BLANK.findall(original)) | {"count", "n", "spare"}, original
            if not isinstance(key, tuple):
                assert set(BLANK.findall(text)) == set(BLANK.findall(original)), original


def test_the_sources_are_those_of_the_compiled_catalogues():
    """Each ``django.po`` has the texts of its ``django.mo``."""
    for path in PACKAGE.rglob("django.po"):
        source = path.read_text(encoding="utf-8")
        with path.with_suffix(".mo").open("rb") as file:
            compiled = gettext.GNUTranslations(file)._catalog
        for key, text in compiled.items():
            if key != "":
                escaped = text.replace("\\", "\\\\").replace('"', '\\"')
                assert f'"{escaped}"' in source
