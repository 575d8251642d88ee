"""
The floor: the cost of the same exchange with raw sockets and bytes that are packed in advance.

There are two floors. One does what a textbook lock does: SET NX PX, and a script that compares and deletes. The other
sends exactly the bytes that this library sends. They are recorded from the library, so both stay in step.
"""

import asyncio
import hashlib
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from urllib.parse import urlsplit

from .bench import manager_of, ours
from .measure import AsyncContender, Contender

COMPARE_AND_DELETE = b"if redis.call('GET',KEYS[1])==ARGV[1] then return redis.call('DEL',KEYS[1]) end return 0"
PLAIN, SAME = "raw sockets, SET NX PX", "raw sockets, the same scripts"
SENT = f"{SAME}, release sent"
LOCK = b"floor"  # the name of the lock in the recorded requests


def pack(*words: bytes | str) -> bytes:
    """Return a command as RESP."""
    parts = [word.encode() if isinstance(word, str) else word for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def address(url: str) -> tuple[str, int]:
    """Return host and port of a server."""
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 6379


def connect(url: str) -> socket.socket:
    """Return a plain connection."""
    sock = socket.create_connection(address(url))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


Pair = tuple[Callable[[], bytes], bytes]
"""The request that acquires, made anew each time because it has a rising number, and the one that releases."""


def plain(key: str) -> Pair:
    """Return the textbook's requests."""
    sha = hashlib.sha1(COMPARE_AND_DELETE).hexdigest()
    token = "0123456789abcdef" * 2
    acquire = pack("SET", key, token, "NX", "PX", "30000")
    return lambda: acquire, pack("EVALSHA", sha, "1", key, token)


def same(urls: list[str]) -> Pair:
    """Return the requests that this library sends, with a fencing token of its own each time."""
    for url in urls:
        manager_of([url]).lock(LOCK.decode(), wait=0).acquire().release()  # now this server knows the scripts
    with Tap(urls[0]) as tap:
        manager = ours(f"floor-{address(tap.url)[1]}", [tap.url])
        manager.lock(LOCK.decode(), wait=0).acquire().release()
        tap.taken()
        lease = manager.lock(LOCK.decode(), wait=0).acquire()
        acquire = tap.taken()
        lease.release()
        release = tap.taken()
        manager.close()
    head, found, tail = acquire.partition(str(lease.fencing_token).encode())
    assert found, "the fencing token is no longer part of the request: see to tests/lab/benchmarks/floors.py"
    return lambda: b"%b%d%b" % (head, time.time_ns() // 1000, tail), release


class Tap:
    """A relay in front of a server that keeps the scripts its clients call."""

    def __init__(self, target: str) -> None:
        self._target = address(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self._said = bytearray()
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def __enter__(self) -> "Tap":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        for each in self._sockets:
            with suppress(OSError):  # a connection that its other end closed
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def taken(self) -> bytes:
        """Return the scripts called since the last call of this method, as they were sent."""
        said, self._said = bytes(self._said), bytearray()
        calls = [each for each in commands(said) if b"EVAL" in each[:20]]
        return b"".join(calls)

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            node = socket.create_connection(self._target)
            self._sockets += [client, node]
            threading.Thread(target=self._carry, args=(client, node, True), daemon=True).start()
            threading.Thread(target=self._carry, args=(node, client, False), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(65536):
                if keep:
                    self._said += data
                target.sendall(data)
        except OSError:
            pass  # closed at the end


def commands(said: bytes) -> list[bytes]:
    """Split a stream of requests into commands, each as it was sent."""
    found = []
    at = 0
    while at < len(said):
        start, (count, at) = at, _length(said, at)
        for _ in range(count):
            size, at = _length(said, at)
            at += size + 2
        found.append(said[start:at])
    return found


def _length(said: bytes, at: int) -> tuple[int, int]:
    end = said.index(b"\r\n", at)
    return int(said[at + 1 : end]), end + 2


@contextmanager
def blocking(name: str, urls: list[str], pair: Pair, *, wait: bool = True) -> Iterator[Contender]:
    """
    Give the floor of blocking code: write to all, read from all.

    Args:
        name: The contender's name.
        urls: The servers.
        pair: The requests.
        wait: Whether to wait for the replies to the release; otherwise they are read with the next replies.
    """
    acquire, release = pair
    with ExitStack() as stack:
        sockets = [stack.enter_context(connect(url)) for url in urls]
        for sock in sockets:
            _teach(sock)

        def send(request: bytes) -> None:
            for sock in sockets:
                sock.send(request)

        def receive(lines: int = 0) -> None:
            for sock in sockets:
                check(reply := sock.recv(4096))
                while reply.count(b"\n") < lines:
                    reply += sock.recv(4096)

        def once() -> None:
            send(acquire())
            receive()
            send(release)
            receive()

        def sent() -> None:
            send(acquire())
            receive(both)
            send(release)

        if not wait:
            both = sum(_reply_lines(urls[0], acquire(), release))
            send(release)
        yield Contender(name, once if wait else sent)


def _teach(sock: socket.socket) -> None:
    """Let a server learn the textbook's script; it has learned our scripts from the library."""
    sock.send(pack("SCRIPT", "LOAD", COMPARE_AND_DELETE))
    check(sock.recv(4096))


def check(reply: bytes) -> None:
    """Stop if a server refused a request, because the times would then mean nothing."""
    if reply[:1] in (b"-", b"_", b"") or reply[:2] == b"$-" or b"BUSY" in reply:
        raise RuntimeError(f"the server replied {reply!r}")


class _Node(asyncio.Protocol):
    """
    The connection of an event loop to one node, shared by all tasks.

    The requests of one turn of the loop are written at once. Replies are counted by their lines, because no reply to
    our requests contains a line break in its text.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._requests: list[bytes] = []
        self._due: deque[tuple[int, _Round]] = deque()
        self._lines = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, reply_lines: int, round: "_Round") -> None:
        if not self._requests:
            asyncio.get_running_loop().call_soon(self._flush)
        self._requests.append(request)
        self._due.append((reply_lines, round))

    def _flush(self) -> None:
        self.transport.write(b"".join(self._requests))
        self._requests.clear()

    def data_received(self, data: bytes) -> None:
        check(data)
        self._lines += data.count(b"\n")
        while self._due and self._lines >= self._due[0][0]:
            lines, round = self._due.popleft()
            self._lines -= lines
            round.replied()


class _Round:
    """One exchange with all nodes."""

    def __init__(self, nodes: int) -> None:
        self._missing = nodes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def replied(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.done.set_result(None)


@asynccontextmanager
async def without_blocking(
    name: str, urls: list[str], pair: Pair, tasks: int = 1
) -> AsyncIterator[list[AsyncContender]]:
    """Give the floor of an event loop for some *tasks*, each with a lock of its own: one future per exchange."""
    acquire, release = pair
    for url in urls:
        with connect(url) as sock:
            _teach(sock)
    reply_lines = _reply_lines(urls[0], acquire(), release)
    loop = asyncio.get_running_loop()
    nodes = [(await loop.create_connection(_Node, *address(url)))[1] for url in urls]

    async def exchange(request: bytes, lines: int) -> None:
        round = _Round(len(nodes))
        for node in nodes:
            node.send(request, lines, round)
        await round.done

    def contender(number: int) -> AsyncContender:
        own = b"%0*d" % (len(LOCK), number)  # a name of the same length

        async def once() -> None:
            await exchange(acquire().replace(LOCK, own), reply_lines[0])
            await exchange(release.replace(LOCK, own), reply_lines[1])

        return AsyncContender(name, once)

    yield [contender(number) for number in range(tasks)]
    for node in nodes:
        node.transport.abort()
    await asyncio.sleep(0)  # let the aborted transports close their sockets


def _reply_lines(url: str, *requests: bytes) -> list[int]:
    with connect(url) as sock:
        counts = []
        for request in requests:
            sock.send(request)
            counts.append(sock.recv(4096).count(b"\n"))
        return counts
