"""
What a later version must not change unseen: files with which tests compare what they find.

A file has sections with a line for each thing. ``REDLOCK_FREEZE=1`` writes it anew.
"""

import os
from collections.abc import Iterable, Mapping
from difflib import unified_diff
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

Found = Mapping[str, Iterable[str]]
"""The lines of each section."""


def compare(name: str, found: Found, rules: str) -> None:
    """Fail if what was found differs from a file; the message says how, and what to do about it."""
    file, text = FOLDER / name, text_of(found)
    if "REDLOCK_FREEZE" in os.environ:
        file.write_text(text, "utf-8")
    before, now = file.read_text("utf-8").splitlines(), text.splitlines()
    changed = "\n".join(unified_diff(before, now, f"tests/frozen/{name}", "what the test found", n=1, lineterm=""))
    if changed:
        meant = "If the change is meant, repeat this test with REDLOCK_FREEZE=1, and commit the file with the change."
        pytest.fail(f"{changed}\n{rules}\n{meant}", pytrace=False)


def text_of(found: Found) -> str:
    return "\n".join(f"# {title}\n\n" + "".join(f"{line}\n" for line in lines) for title, lines in found.items())
