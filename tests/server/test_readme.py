"""The commands of the quickstart, and the code of the README and of a how-to, work as written."""

from pathlib import Path
from typing import Any

from django.test import override_settings

from django_redlock import locks
from django_redlock.testing import Server
from tests.typed import Reader, blocks, commands

INSTALLATION = ["python3 -m venv .venv", ".venv/bin/pip install django-redlock"]


def test_quickstart_without_redis_works_from_an_empty_folder(tmp_path: Path):
    """The lines of the page, typed one after the other, take a lock, list it, and report who holds it."""
    typed, outputs, reader = [], [], Reader(tmp_path)

    for language, text in blocks("docs/start/quickstart.md", "With a database"):
        if language == "python":
            reader.write(text)
        for command in commands(text) if language == "console" else []:
            typed.append(command)
            if command not in INSTALLATION:
                outputs.append(reader.type(command))

    assert typed[:2] == INSTALLATION
    assert len(typed) == 7
    for output, expected in zip(outputs[-2:], ["invoice-run", "Lock 'invoice-run' is held by"], strict=True):
        assert expected in output


def test_readme_takes_a_lock_on_one_redis():
    """With the setting for one server, the first block of the README takes its lock there."""
    one, _ = (text for _, text in blocks("README.md", "Set it up") if text.startswith("REDLOCK"))
    (block,) = (text for _, text in blocks("README.md", "django_redlock") if "with lock" in text)
    namespace: dict[str, Any] = {}
    taken = []

    with Server() as server:
        exec(one.replace("redis://localhost:6379", server.url), namespace)
        with override_settings(REDLOCK=namespace["REDLOCK"]), server.client() as client:
            exec(block, {"send_invoices": lambda: taken.extend(client.keys("mysite:*invoice-run*"))})
            assert len(locks["default"].nodes) == 1

    assert taken


def test_page_on_testing_starts_real_servers():
    """The block of the page starts five servers, stops two of them in its own way, and ends them all."""
    (block,) = (text for _, text in blocks("docs/howto/testing.md", "Real servers") if "start_servers" in text)
    namespace: dict[str, Any] = {}

    exec(block, namespace)

    assert [server.running for server in namespace["servers"]] == [False] * 5
