"""The commands in the README and in the quickstart work as written."""

from pathlib import Path
from typing import Any

import pytest

from tests.typed import Reader, blocks, commands

INSTALLATION = "python3 -m venv .venv && .venv/bin/pip install django-redlock"


@pytest.mark.parametrize(
    ("page", "heading", "count", "printed"),
    [
        ("README.md", "A lock in five minutes", 5, ["invoice-run"]),
        ("docs/start/quickstart.md", "With a database", 6, ["invoice-run", "Lock 'invoice-run' is held by"]),
    ],
)
def test_quick_start_without_redis_works_from_an_empty_folder(
    page: str, heading: str, count: int, printed: list[str], tmp_path: Path
):
    """
    The lines of the page, typed one after the other, take a lock and list it, or report who holds it.

    The first command creates an environment; the environment of the tests takes its place.
    """
    typed, outputs = [], []

    with Reader(tmp_path) as reader:
        for language, text in blocks(page, heading):
            if language == "python":
                reader.write(text)
            for command in commands(text) if language == "console" else []:
                typed.append(command)
                if command != INSTALLATION:
                    outputs.append(reader.type(command))

    assert typed[0] == INSTALLATION
    assert len(typed) == count
    for output, expected in zip(outputs[-len(printed) :], printed, strict=True):
        assert expected in output


def test_page_on_testing_starts_real_servers():
    """
    The block of the page starts five servers, stops two of them in its own way, and ends them all.
    """
    (block,) = (text for _, text in blocks("docs/howto/testing.md", "Real servers") if "start_servers" in text)
    namespace: dict[str, Any] = {}

    exec(block, namespace)

    assert [server.running for server in namespace["servers"]] == [False] * 5
