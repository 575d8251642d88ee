import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import environ
from pathlib import Path
from types import FrameType
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from shop.demo import attended, unattended
from shop.demo.clusters import KINDS
from shop.demo.report import Check, diary
from shop.demo.stack import Stack

SHORTEST = 20.0  # seconds, for three imports, and for two servers to be killed and to come back
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Command(BaseCommand):
    help = "Run the shop with its lock nodes, a worker, beat and a broker; Ctrl-C stops everything."
    requires_system_checks = []  # the settings of this process are not the shop's

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--seconds", type=float, help="run unattended for that time, check everything, exit")
        parser.add_argument(
            "--port", type=int, default=0, help="port of the web server; the system chooses one by default"
        )

        parser.add_argument(
            "--nodes",
            choices=KINDS,
            default="redis",
            help="what the locks are on: five embedded servers (redis, the default), a Redis Cluster of six of them "
            "(cluster), or three members of a cluster that must be installed (etcd, zookeeper)",
        )

    def handle(self, *, seconds: float | None, port: int, nodes: str, **options: Any) -> None:
        if seconds is not None and not SHORTEST <= seconds < 86400:
            raise CommandError(f"--seconds must be from {SHORTEST:.0f} to 86400, not {seconds:g}.")
        stop_like_ctrl_c()
        # Without a visitor, imports may be short, so that several fit into the time.
        slow = float(environ.get("SHOP_IMPORT_SECONDS", "30"))
        pace = slow if seconds is None else min(30.0, max(6.0, seconds / 5))
        try:
            with folder_for_files() as folder:
                every = min(pace, 30.0) / 4
                self.run(Stack(folder, KINDS[nodes], port=port, import_seconds=pace, import_every=every), seconds)
        except KeyboardInterrupt:
            if seconds is not None:
                raise CommandError("Interrupted before the checks were done.", returncode=130) from None

    def run(self, stack: Stack, seconds: float | None) -> None:
        try:
            self.open(stack, seconds)
        finally:
            ignore_signals()
            self.say("Stopping …")
            stack.stop()

    def open(self, stack: Stack, seconds: float | None) -> None:
        self.say(f"Starting {stack.nodes.title}, a broker, a worker, beat and the web server …")
        stack.start()
        self.say(attended.welcome(stack))
        if seconds is None:
            attended.run(stack, diary(self.say))
        else:
            self.report(unattended.run(stack, seconds, diary(self.say)), stack.folder)

    def report(self, checks: list[Check], folder: Path) -> None:
        self.say("")
        for check in checks:
            self.say(str(check))
        if failed := sum(not check.ok for check in checks):
            raise CommandError(f"{failed} of {len(checks)} checks FAILED; the logs are in {folder}.")
        self.say(f"\nAll {len(checks)} checks hold.")

    def say(self, text: str) -> None:
        with suppress(OSError):  # the terminal may be gone
            self.stdout.write(text)
            self.stdout.flush()


@contextmanager
def folder_for_files() -> Iterator[Path]:
    """Make a folder, and remove it at the end; it stays if something with logs failed."""
    folder = Path(tempfile.mkdtemp(prefix="redlock-demo-"))
    try:
        yield folder
    except Exception:
        if not any(folder.glob("*.log")):
            shutil.rmtree(folder)
        raise
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def stop_like_ctrl_c() -> None:
    """Make SIGTERM, and the end of the terminal, act like Ctrl-C."""
    for each in ENDINGS:
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, _interrupt)


def ignore_signals() -> None:
    """Ignore every signal but SIGKILL while the demo ends."""
    for each in ENDINGS:
        signal.signal(each, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    ignore_signals()  # tox, for one, sends Ctrl-C to processes that have already got it
    raise KeyboardInterrupt
