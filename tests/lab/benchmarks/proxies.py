"""
Bad networks in a process of their own, so that forwarding bytes takes no time from the measurement.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection

from django_redlock.testing import FaultProxy

from .bench import children


class Proxies:
    """A proxy in front of each of some servers; a fault hits all of them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.urls: list[str] = pipe.recv()

    def tell(self, method: str, *args: object) -> None:
        """Call a method of every :class:`~django_redlock.testing.FaultProxy`, and wait until it returns."""
        self._pipe.send((method, args))
        self._pipe.recv()


@contextmanager
def proxies(urls: list[str]) -> Iterator[Proxies]:
    """Start proxies in front of these servers, all in one child process."""
    context = children()
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, urls), daemon=True)
    process.start()
    try:
        yield Proxies(here)
    finally:
        here.send(None)
        process.join(10)


def _serve(pipe: Connection, urls: list[str]) -> None:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # before 3.12 it reports every connection that was reset
    sys.setswitchinterval(0.001)  # two threads of this process take turns for every byte
    with ExitStack() as stack:
        running = [stack.enter_context(FaultProxy(url)) for url in urls]
        pipe.send([proxy.url for proxy in running])
        while told := pipe.recv():
            for proxy in running:
                getattr(proxy, told[0])(*told[1])
            pipe.send("done")
