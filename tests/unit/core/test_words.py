"""The words that the core chooses for people."""

import re
from pathlib import Path

from django_redlock.core.protocol import EndReason, Failure
from django_redlock.exceptions import EXPLANATIONS

SETTINGS = Path(__file__).parents[3] / "docs" / "reference" / "settings.md"


def test_words_of_nodes_are_explained():
    """Every word with which a node is reported to have given no vote is on the page of the settings."""
    explained = SETTINGS.read_text().partition("\n## Why a node gave no vote\n")[2].partition("\n## ")[0]
    internal = {Failure.RESTARTED, Failure.WRONG_MODE}  # reported with the seconds left, and by the mode's name
    words = {re.split(r"[,(]", failure.value)[0].strip() for failure in set(Failure) - internal}

    assert {word for word in words if word not in explained} == set()


def test_every_end_of_a_lease_has_an_explanation():
    """A new reason would leave an error without its sentence; "margin" is one of the error alone."""
    assert sorted({*map(str, EndReason), "margin"}) == sorted(EXPLANATIONS)
