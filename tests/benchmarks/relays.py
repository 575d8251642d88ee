"""
Put a distance between a client and the servers: relays that hold every byte back for the same time.

The relays are processes of their own, so that their work takes no time from the measurement. They are few, because on a
machine with few cores five processes would wait for each other. A relay waits with ``select``, whose timeout is counted
in microseconds; that of ``poll`` is counted in milliseconds, as are those of asyncio. (``select`` takes no more than a
thousand descriptors, so a relay serves at most three servers, and is started anew for each measurement.) What a relay
itself costs is measured with no delay, and shown beside the other figures.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection

from .bench import children
from .floors import address

CHUNK = 65_536  # bytes
SERVERS = 3  # of a relay, each with the connections of a hundred tasks


@contextmanager
def relays(urls: list[str], round_trip: float) -> Iterator[list[str]]:
    """
    Start relays in front of these servers and return an address for each of them.

    Args:
        urls: The servers.
        round_trip: Seconds by which a round trip takes longer; each direction takes half of it.
    """
    context = children()
    groups = [urls[first : first + SERVERS] for first in range(0, len(urls), SERVERS)]
    ends = [context.Pipe() for _ in groups]
    for (_, there), group in zip(ends, groups, strict=True):
        context.Process(target=_serve, args=(there, group, round_trip / 2), daemon=True).start()
    try:
        yield [url for here, _ in ends for url in here.recv()]
    finally:
        for here, _ in ends:
            here.send("end")
            here.recv()


def _serve(pipe: Connection, urls: list[str], delay: float) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=200)) for _ in urls]
        relay = Relay(dict(zip(listeners, map(address, urls), strict=True)), delay)
        pipe.send([f"redis://127.0.0.1:{listener.getsockname()[1]}/0" for listener in listeners])
        while not pipe.poll():
            relay.step(pipe)
        pipe.send("ended")


class Relay:
    """
    Carries the bytes between clients and servers, in one thread.

    Args:
        targets: Host and port of the server behind each socket at which clients connect.
        delay: Seconds for which it holds every byte back.
    """

    def __init__(self, targets: dict[socket.socket, tuple[str, int]], delay: float) -> None:
        self._delay = delay
        self._targets = targets
        self._others: dict[socket.socket, socket.socket] = {}
        self._underway: deque[tuple[float, socket.socket, bytes]] = deque()

    def step(self, pipe: Connection) -> None:
        """Wait for the next event and deal with it: a client, bytes, the end of a delay, or a message on *pipe*."""
        left = max(0.0, self._underway[0][0] - time.monotonic()) if self._underway else None
        ready, _, _ = select.select([pipe, *self._targets, *self._others], [], [], left)
        now = time.monotonic()
        for source in ready:
            if source in self._targets:
                self._accept(source)
            elif source is not pipe:
                self._take(source, now)
        while self._underway and self._underway[0][0] <= now:
            _, target, data = self._underway.popleft()
            self._pass_on(target, data)

    def _accept(self, listener: socket.socket) -> None:
        client, server = listener.accept()[0], socket.create_connection(self._targets[listener])
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._others |= {client: server, server: client}

    def _take(self, source: socket.socket, now: float) -> None:
        data = b""
        with suppress(OSError):
            data = source.recv(CHUNK)
        target = self._others[source]
        if not data:
            del self._others[source]  # it has ended; the other end learns of it behind the last bytes
        self._underway.append((now + self._delay, target, data))

    def _pass_on(self, target: socket.socket, data: bytes) -> None:
        with suppress(OSError):
            if data:
                target.sendall(data)
                return
        self._others.pop(target, None)
        target.close()
