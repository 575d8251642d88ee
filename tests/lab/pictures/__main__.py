"""
Draw the pictures that move, of the demo: ``tox run -e pictures``, with ``-- --to FOLDER`` for others to compare with.

*held-locks* is the page of the admin while an import runs and two of five servers are killed and come back. *top* is a
terminal with ``redlock_top`` while the orders of one customer are packed one after the other. What a caption says is
written when it has been seen on the page.
"""

import argparse
import os
import pty
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from playwright.sync_api import Route
from shop.catalogue import read_catalogue
from shop.demo.nodes import RedisNodes
from shop.demo.stack import MANAGE, Stack

from django_redlock.management.commands.redlock_top import CLEAR
from django_redlock.testing.servers import spawn

from . import CHECKOUT
from .burst import ORDERS
from .film import CAPTION_STYLE, filming

IMPORT_SECONDS = 27.0
NEVER = 3600.0  # seconds until beat submits a second import
# What the picture leaves out of the page, so that a telephone shows the rest in a legible size.
CROP = """
#header, nav[aria-label=Breadcrumbs], #nav-sidebar, #toggle-nav-sidebar, #toolbar, .redlock-bar, .redlock-tiles,
.redlock-taken, .actions, .action-checkbox, #changelist-filter { display: none !important; }
#content { padding: 12px 15px !important; }
#content h1 { margin: 0 0 10px !important; font-size: 17px; font-weight: 600; }
.redlock-alias { margin-top: 0 !important; }
.redlock-alias p { height: 4.2em; line-height: 1.4 !important; overflow: hidden; }
#result_list tbody tr { grid-template-columns: 0 repeat(8, minmax(0, 1fr)) !important; }
.field-held_by .redlock-where { display: none; }
.field-held_by .redlock-what { display: block; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.field-held_by wbr { display: none; }
"""
WORKER = ("-m", "celery", "-A", "tests.lab.pictures.burst", "worker", "--loglevel", "INFO")
WORKER += ("--queues", "parcels", "--pool", "threads", "--concurrency", "4")
COLUMNS, LINES = 64, 12
TERMINAL = """<!doctype html><style>
  :root { color-scheme: light dark; }
  body { margin: 0; background: light-dark(#f6f8fa, #0d1117); color: light-dark(#1f2328, #e6edf3); }
  pre { margin: 0; padding: 12px 13px; font: 10.6px/1.6 "DejaVu Sans Mono", ui-monospace, monospace; }
  b { color: light-dark(#8c1d18, #ff9b8f); }
</style><pre><b>$</b> python manage.py redlock_top

<span></span></pre>"""


def main() -> None:
    """Draw the pictures that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PICTURES), help=", ".join(PICTURES))
    parser.add_argument("--to", type=Path, default=CHECKOUT / "docs" / "images", help="where the files are written")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        PICTURES[name](options.to)


def held_locks(folder: Path) -> None:
    """Draw the page *Held locks* while servers are killed."""
    with filming(height=352) as film, shop() as stack:
        for page in film.pages.values():
            page.route("**/admin/redlock/heldlock/", ask_every_second)
            page.goto(f"{stack.url}admin/redlock/heldlock/")
            page.get_by_label("Username:").fill("admin")
            page.get_by_label("Password:").fill(stack.password)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_selector("#result_list")
            page.unroute_all(behavior="wait")
            page.add_style_tag(content=CAPTION_STYLE + CROP)
        total = len(read_catalogue())
        victims = (stack.nodes.servers[1], stack.nodes.servers[3])

        def votes(*wanted: str) -> bool:
            """Return whether both pages show locks with just these votes."""
            shown = [page.locator("#result_list .redlock-votes").all_inner_texts() for page in film.pages.values()]
            return all([text.split("/")[0] for text in texts] == list(wanted) for texts in shown)

        film.aside = lambda: f"row {stack.admin.get().json()['imports'][0]['rows']} of {total}"
        film.say("An import runs, and its lock has 5 of 5 votes.")
        film.roll(until=lambda: votes("5"))
        film.roll(3)
        film.say("Two of the five servers are killed …")
        for server in victims:
            server.kill()
        film.roll(until=lambda: votes("3"))
        film.say("3 of 5 votes are a majority: the lock is held, and the import goes on.")
        film.roll(3)
        film.keep()
        film.roll(3)
        film.say("The two servers are back, without their data.")
        for server in victims:
            server.restart()
        film.roll(until=lambda: votes("5"))
        film.say("The next renewal brings their votes back: 5 of 5.")
        film.roll(until=lambda: votes())
        film.say("The import has ended, and its lock is free.")
        film.roll(4)
        film.save(folder, "held-locks")


def ask_every_second(route: Route) -> None:
    """Let the page ask the nodes every second, instead of every five."""
    answer = route.fetch()
    route.fulfill(response=answer, body=answer.text().replace('data-every="5"', 'data-every="1"'))


def top(folder: Path) -> None:
    """Draw a terminal with ``redlock_top`` while a burst of calls is worked off."""
    with filming(height=296) as film, shop() as stack:
        for page in film.pages.values():
            page.set_content(TERMINAL)
            page.add_style_tag(content=CAPTION_STYLE)
        packer = stack.run("packer", *WORKER)
        stack.wait_for("the packer", lambda: "ready." in packer.text())
        with terminal(stack.environment, sys.executable, MANAGE, "redlock_top", "--interval", "0.5") as screen:

            def packed() -> int:
                """Show the newest screen; return how many orders have been packed."""
                for page in film.pages.values():
                    page.locator("pre span").evaluate("(span, text) => { span.textContent = text; }", screen())
                return packer.text().count(" succeeded in ")

            stack.wait_for("the first screen", screen)
            film.aside = lambda: f"packed: {packed()} of {len(ORDERS)}"
            film.say("An import runs.")
            film.roll(2)
            stack.manage("shell", "--command", "from tests.lab.pictures.burst import send; send()")
            film.say("One order of a customer is packed at a time.")
            film.roll(4)
            film.keep()
            film.roll(until=lambda: packed() == len(ORDERS))
            film.say("All are packed.")
            film.roll(2)
        film.save(folder, "top")


@contextmanager
def terminal(environment: dict[str, str], *command: str) -> Iterator[Callable[[], str]]:
    """Run a command that fills the screen of a terminal; yield a function that returns what stands there."""
    ours, theirs = pty.openpty()
    size = {"COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    process = spawn(list(command), env=environment | size, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = bytearray()

    def read() -> None:
        with suppress(OSError):  # how a terminal ends
            while part := os.read(ours, 4096):
                written.extend(part)

    reader = Thread(target=read)
    reader.start()
    try:
        # The last screen that is complete: the next one has begun with its first bytes.
        yield lambda: "".join(written.decode(errors="ignore").split(CLEAR)[1:-1][-1:]).replace("\r", "")
    finally:
        process.terminate()
        process.wait()
        reader.join()
        os.close(ours)


PICTURES = {"held-locks": held_locks, "top": top}


@contextmanager
def shop() -> Iterator[Stack]:
    """Run the demo's shop; its first import has just begun."""
    with tempfile.TemporaryDirectory(prefix="redlock-pictures-") as folder:
        stack = Stack(Path(folder), RedisNodes, port=0, import_seconds=IMPORT_SECONDS, import_every=NEVER)
        try:
            stack.start()
            yield stack
        finally:
            stack.stop()
            tempfile.tempdir = None  # which the stack has set


if __name__ == "__main__":
    main()
