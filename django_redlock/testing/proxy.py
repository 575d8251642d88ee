"""
Put a bad network between a client and a node.

A :class:`FaultProxy` forwards bytes until a test makes it delay them, hold them
back, lose a reply or break the connections. TCP neither loses bytes from the
middle of a stream nor changes their order, and no fault here does. So everything
that a test sees can really happen.

    with FaultProxy(server.url) as proxy:
        proxy.black_hole("replies")
"""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from socket import SO_LINGER, SOL_SOCKET
from threading import Thread
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from .servers import reserve_port

Direction = Literal["requests", "replies", "both"]
Underway: TypeAlias = "asyncio.Queue[tuple[float, asyncio.Event, bytes]]"
"""Bytes, when they are due, and what makes them due earlier."""

THREAD_TIMEOUT = 60.0  # seconds to wait for the proxy's own thread, which may be slow on a busy machine
BACKLOG = 100  # connections that wait to be accepted
CHUNK = 65536  # bytes read at once
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # linger for 0 s: close() sends RST, not FIN


class FaultProxy:
    """
    A TCP proxy on 127.0.0.1 for one node, with faults to switch on and off.

    A fault affects open and future connections, and is in effect when the method returns. Any thread may set one, while
    the proxy runs. In a ``with`` block the proxy starts on entry and stops on exit.

    Args:
        target: URL of the node; only its host and port matter, so any server will do.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.port = reserve_port(self)
        self._requests = _Line()
        self._replies = _Line()
        self._connections: set[asyncio.Task[None]] = set()
        self._running = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL of the node, through the proxy."""
        parts = urlsplit(self.target)
        login, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{login}{at}127.0.0.1:{self.port}").geturl()

    @property
    def dropped(self) -> int:
        """How many replies ``drop_next_reply`` has swallowed since the start."""
        return self._replies.dropped

    def start(self) -> Self:
        """Accept connections without faults, on the same port every time; do nothing if the proxy already runs."""
        if not self._running:
            self._requests, self._replies = _Line(), _Line()
            self._loop = asyncio.SelectorEventLoop()  # on Windows, the usual one watches no socket
            self._loop.set_debug(False)  # Python's development mode would make the network ten times slower
            self._thread = Thread(target=self._loop.run_forever, name="redlock-proxy", daemon=True)
            self._thread.start()
            self._running = True
            self._run(self._listen())
        return self

    def stop(self) -> None:
        """Reset all connections and refuse new ones, as a node that is down does."""
        if self._running:
            self._run(self._hang_up())
            self._running = False
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(THREAD_TIMEOUT)
            self._loop.close()

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Delay bytes that are sent from now on by *seconds*; with "both", a round trip takes twice that."""
        for line in self._lines(direction):
            line.delay = seconds

    def black_hole(self, direction: Direction = "both") -> None:
        """
        Let nothing through; connections are still accepted.

        Bytes sent meanwhile arrive after ``heal()``, even if the client has given up and closed, because TCP sends
        unacknowledged bytes again. After ``reset()`` they never arrive.
        """
        for line in self._lines(direction):
            self._run(line.block())

    def drop_next_reply(self, *, reset: bool = False) -> None:
        """
        Let the node execute the next request, but never deliver the reply to the client.

        A new connection begins with requests of the client library (``HELLO``).
        To lose the reply to a later request, let the client connect first.

        Args:
            reset: Break that connection instead of replying. Otherwise the
                connection stays open, but silent for good.
        """
        self._replies.drop = "reset" if reset else "silence"

    def reset(self) -> None:
        """Break all connections at both ends, with RST; bytes in flight are lost."""
        self._run(self._reset())

    def cut(self) -> None:
        """
        Let nothing through on the connections that are open, as a firewall that has forgotten them; new ones work.

        Neither end learns of it. Bytes that are sent from now on are lost.
        """
        for line in self._lines("both"):
            line.cuts += 1

    def heal(self) -> None:
        """End all faults; bytes that were held back arrive now."""
        for line in self._lines("both"):
            self._run(line.heal())

    def _run(self, action: Coroutine[Any, Any, None]) -> None:
        """Run *action* in the proxy's thread and wait until it returns."""
        done = asyncio.run_coroutine_threadsafe(action, self._loop)
        try:
            done.result(THREAD_TIMEOUT)
        except TimeoutError:
            raise TimeoutError(
                f"The proxy's thread has had no time for {THREAD_TIMEOUT:g} s: the machine is overloaded."
            ) from None

    def _lines(self, direction: Direction) -> list["_Line"]:
        lines = {"requests": [self._requests], "replies": [self._replies]}
        return lines.get(direction, [self._requests, self._replies])

    async def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=BACKLOG)
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    async def _hang_up(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        await self._reset()

    async def _reset(self) -> None:
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # a connection that was being opened is closed in the loop's next turn

    def _accept(self) -> None:
        # asyncio's server is not used: nothing owns a connection that it has accepted until the connection's task
        # begins. If the proxy stopped before that, the connection would stay open.
        with suppress(OSError):  # closed already
            client, _ = self._listener.accept()
            client.setblocking(False)
            connection = asyncio.get_running_loop().create_task(self._serve(client))
            self._connections.add(connection)
            connection.add_done_callback(self._connections.discard)
            connection.add_done_callback(lambda _: client.close())  # for a task that is cancelled before it begins

    async def _serve(self, client: socket.socket) -> None:
        with suppress(asyncio.CancelledError):  # by a reset
            try:
                await self._relay(*await asyncio.open_connection(sock=client))
            except* (_BrokenError, OSError):
                pass  # both ends are closed, and the result is no longer needed

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry bytes both ways until both sides have ended, or break the connection."""
        async with _reset_on_error(writer):
            target = urlsplit(self.target)
            node_reader, node_writer = await asyncio.open_connection(target.hostname, target.port or 6379)
            async with _reset_on_error(node_writer):
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._requests.carry(reader, node_writer))
                    both.create_task(self._replies.carry(node_reader, writer))


class _BrokenError(Exception):
    """A fault broke this connection."""


class _Line:
    """The faults for the bytes of all connections in one direction."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.drop: Literal["", "silence", "reset"] = ""
        self.dropped = 0
        self.cuts = 0
        self._passing = asyncio.Event()
        self._passing.set()
        self._healed = asyncio.Event()  # ends the delays of the bytes that are underway

    async def block(self) -> None:
        self._passing.clear()

    async def heal(self) -> None:
        self.delay, self.drop = 0.0, ""
        self._passing.set()
        self._healed.set()
        self._healed = asyncio.Event()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry the bytes of one connection, and then the end of its stream."""
        underway: Underway = asyncio.Queue()
        async with asyncio.TaskGroup() as both:
            both.create_task(self._collect(reader, underway))
            both.create_task(self._deliver(underway, writer))

    async def _collect(self, reader: asyncio.StreamReader, underway: Underway) -> None:
        silent, cuts = False, self.cuts
        clock = asyncio.get_running_loop().time
        with suppress(OSError):  # a connection that its owner broke has ended
            while data := await reader.read(CHUNK):
                silent = silent or cuts != self.cuts or self._drops()
                if not silent:
                    underway.put_nowait((clock() + self.delay, self._healed, data))
        underway.put_nowait((clock() + self.delay, self._healed, b""))

    async def _deliver(self, underway: Underway, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        data = b"any"
        while data:
            due, healed, data = await underway.get()
            if (left := due - clock()) > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await healed.wait()
            await self._passing.wait()
            writer.write(data)
        with suppress(OSError):  # the other side may be closed by now
            writer.write_eof()

    def _drops(self) -> bool:
        """Return whether to lose the bytes that just arrived, and with them the rest of the stream."""
        drop, self.drop = self.drop, ""
        self.dropped += bool(drop)
        if drop == "reset":
            raise _BrokenError
        return bool(drop)


@asynccontextmanager
async def _reset_on_error(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Close the connection and wait until it is closed: properly after a proper end, with RST otherwise."""
    try:
        yield
        writer.close()
        await writer.wait_closed()
    except BaseException:
        with suppress(OSError):  # closed already
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, RESET_ON_CLOSE)
        writer.transport.abort()
        with suppress(OSError):  # the error that broke it
            await writer.wait_closed()
        raise
