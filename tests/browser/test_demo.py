"""The demo, as a newcomer meets it: one command, a real browser, a node killed, a lock released, and nothing left."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from signal import SIGKILL, SIGTERM
from threading import Thread
from urllib.request import Request, urlopen

import pytest

from tests.services import ended, family
from tests.waiting import wait_until

from .conftest import TIMEOUT, expect

pytestmark = [
    pytest.mark.endurance,  # the demo keeps a processor busy for as long as it runs
    pytest.mark.xdist_group("browser"),
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc: run it on Linux"),
]

MANAGE = Path(__file__).resolve().parents[2] / "example_project" / "manage.py"
PATIENCE = 150.0  # seconds, for busy machines; 10 are usual


class Demo:
    """The demo in a process of its own, without the settings of these tests, but for imports that last."""

    def __init__(self) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")}
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, str(MANAGE), "demo"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env=ours | {"SHOP_IMPORT_SECONDS": "120"},
        )
        self._reader = Thread(target=self._read)
        self._reader.start()
        wait_until(lambda: "Ctrl-C" in self.output or self.process.poll() is not None, seconds=PATIENCE)
        assert self.process.poll() is None, self.output
        self.url, self.folder = self.said(r"The shop +(\S+)"), Path(self.said(r"Files and logs +(\S+)"))

    def said(self, pattern: str) -> str:
        """Return what the demo printed."""
        found = re.search(pattern, self.output)
        assert found, self.output
        return found[1]

    def end(self, signal: int) -> int:
        """Send a signal, and return the exit status."""
        self.process.send_signal(signal)
        status = self.process.wait(PATIENCE)
        self._reader.join()
        return status

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line


@pytest.fixture(scope="module")
def demo():
    """One demo for all tests of this file."""
    demo = Demo()
    yield demo
    if demo.process.poll() is None:
        demo.end(SIGTERM)


@pytest.fixture
def page(browser, demo):
    """The page *Held locks* of the demo, after the login; at the end the console must be empty."""
    errors: list[str] = []
    context = browser.new_context()
    context.set_default_timeout(TIMEOUT)
    context.on("weberror", lambda error: errors.append(str(error.error)))
    context.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page = context.new_page()
    page.goto(f"{demo.url}admin/redlock/heldlock/")
    page.get_by_label("Username:").fill("admin")
    page.get_by_label("Password:").fill(demo.said(r"password (\S+)"))
    page.get_by_role("button", name="Log in").click()
    yield page
    context.close()
    assert errors == []


def test_an_operator_watches_and_releases_the_lock_of_an_import(demo, page):
    """The admin shows 5 of 5 votes, 4 of 5 after a node was killed, and releases the lock for good."""
    row = page.locator("#result_list tbody tr", has_text="import_catalogue")
    hit = wait_until(lambda: early_import(page, demo), seconds=PATIENCE)
    page.reload()
    expect(row).to_contain_text("5/5")

    os.kill(int(demo.said(r"lock-2 .*pid (\d+)")), SIGKILL)

    expect(row).to_contain_text("4/5")
    rows = import_of(page, demo, hit)["rows"]
    wait_until(lambda: import_of(page, demo, hit)["rows"] > rows + 1)

    row.locator("input.action-select").check()
    page.get_by_label("Action:").select_option("release")
    page.locator("button[name=index]").first.click()  # Go, or Run since Django 6.1
    page.get_by_role("button", name="Release it").click()

    expect(page.locator(".messagelist .success")).to_contain_text("was released")
    wait_until(lambda: imports(page, demo)[0]["task_id"] != hit)
    assert import_of(page, demo, hit)["finished"] is None


def test_sigterm_leaves_nothing(demo):
    """SIGTERM ends the demo with status 0, and no process and no file stays."""
    pids = family(demo.process.pid)

    status = demo.end(SIGTERM)

    assert (status, all(map(ended, pids)), demo.folder.exists()) == (0, True, False)
    assert "Traceback" not in demo.output


def test_sigkill_leaves_no_process():
    """On Linux no server and no worker outlives a demo that was killed."""
    demo = Demo()
    pids = family(demo.process.pid)

    demo.end(SIGKILL)

    wait_until(lambda: all(map(ended, pids)))
    shutil.rmtree(demo.folder)


def imports(page, demo):
    """Return the last imports, newest first, as the shop tells programs."""
    cookies = "; ".join(f"{cookie['name']}={cookie['value']}" for cookie in page.context.cookies(demo.url))
    with urlopen(Request(demo.url, headers={"Accept": "application/json", "Cookie": cookies}), timeout=60) as answer:
        return json.load(answer)["imports"]


def import_of(page, demo, task_id):
    return next(run for run in imports(page, demo) if run["task_id"] == task_id)


def early_import(page, demo):
    """Return the id of a running import that will run for a minute more."""
    newest = imports(page, demo)[0]
    return newest["task_id"] if newest["finished"] is None and newest["rows"] < 20 else None
