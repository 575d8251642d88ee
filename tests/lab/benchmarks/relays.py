"""
Put a distance between a client and the servers: relays that hold every byte back for the same time.

Each server has a relay in a process of its own, so that its work takes no time from the measurement. The relay waits
with ``select``, whose timeout is counted in microseconds; that of ``poll`` is counted in milliseconds, as are those of
asyncio. (``select`` takes no more than a thousand descriptors, which the connections of all libraries with a hundred
tasks to one server nearly are; so each server has its relay, which is started anew for each measurement.) What a relay
itself costs is measured with no delay, and shown beside the other figures.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from .bench import children
from .floors import address

CHUNK = 65_536  # bytes


@contextmanager
def relays(urls: list[str], round_trip: float) -> Iterator[list[str]]:
    """
    Start a relay in front of each of these servers and return the addresses of the relays.

    Args:
        urls: The servers.
        round_trip: Seconds by which a round trip takes longer; each direction takes half of it.
    """
    context = children()
    ends = [context.Pipe() for _ in urls]
    for (_, there), url in zip(ends, urls, strict=True):
        context.Process(target=_serve, args=(there, url, round_trip / 2), daemon=True).start()
    try:
        yield [here.recv() for here, _ in ends]
    finally:
        for here, _ in ends:
            here.send("end")
            here.recv()


def _serve(pipe: Connection, url: str, delay: float) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as listener:
        relay = Relay(listener, address(url), delay)
        pipe.send(f"redis://127.0.0.1:{listener.getsockname()[1]}/0")
        while not pipe.poll():
            relay.step(pipe)
        pipe.send("ended")


class Relay:
    """
    Carries the bytes between the clients of one server and the server, in one thread.

    Args:
        listener: Where clients connect.
        target: Host and port of the server.
        delay: Seconds for which it holds every byte back.
    """

    def __init__(self, listener: socket.socket, target: tuple[str, int], delay: float) -> None:
        self._delay = delay
        self._listener = listener
        self._target = target
        self._others: dict[socket.socket, socket.socket] = {}
        self._underway: deque[tuple[float, socket.socket, bytes]] = deque()

    def step(self, pipe: Connection) -> None:
        """Wait for the next event and deal with it: a client, bytes, the end of a delay, or a message on *pipe*."""
        left = max(0.0, self._underway[0][0] - time.monotonic()) if self._underway else None
        ready, _, _ = select.select([pipe, self._listener, *self._others], [], [], left)
        now = time.monotonic()
        for source in ready:
            if source is self._listener:
                self._accept()
            elif source is not pipe:
                self._take(source, now)
        while self._underway and self._underway[0][0] <= now:
            _, target, data = self._underway.popleft()
            self._pass_on(target, data)

    def _accept(self) -> None:
        client, server = self._listener.accept()[0], socket.create_connection(self._target)
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
