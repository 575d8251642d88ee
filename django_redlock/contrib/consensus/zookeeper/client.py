"""
Talk to one member of a ZooKeeper ensemble (internal).

kazoo implements the protocol and keeps the session alive. By default, it would also reconnect to any member and send
what it had not sent before. Here a broken connection is not replaced, so a request is sent at most once, and its
outcome is unknown if there is no reply.
"""

import atexit
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from math import inf
from typing import Any, ClassVar, NamedTuple

from kazoo.client import KazooClient, KazooState, KeeperState
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    ZookeeperError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.serialization import GetChildren, Transaction, int_struct, read_string
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from ....core.protocol import Failure
from ....nodes.base import LinkError, address
from ....nodes.records.table import AnswerError
from ....runtime.clock import steady
from ....runtime.threads import new_event
from ..bounded import LARGEST, BoundedSocket, connected
from ..place import Place

SESSION = 10.0  # seconds of the session that is requested; kazoo keeps it alive
LAST_REPLY = 0.5  # seconds for which closing a connection waits for the member
NOT_SERVING = "has no leader at present, or too many connections"
SILENT = logging.Logger("kazoo", logging.CRITICAL + 1)  # at level DEBUG, kazoo would log passwords

LARGEST_LISTING = 16 * 2**20  # bytes of the listings that are requested together
LONGEST_WRITTEN = 65_536  # bytes of the reply to a transaction, which has about 80 for each of 400 writes
SHORTEST_NAME = 8  # bytes of a name in a listing, with its length

OVERTAKEN = (BadVersionError, NodeExistsError, NoNodeError)
CONSEQUENCES = (RolledBackError, RuntimeInconsistency)


class Znode(NamedTuple):
    """The content of a znode; ``zxid`` and ``time`` (milliseconds) are those of its last write."""

    data: bytes
    version: int
    zxid: int
    time: int
    children: int


class ZnodeChange(NamedTuple):
    """
    One operation of a transaction.

    Args:
        path: The path of the znode.
        data: The new content; None only compares the version.
        version: The version that the znode must have; -1 means any version, None that it must not exist.
        delete: Whether to delete the znode instead.
    """

    path: str
    data: bytes | None
    version: int | None
    delete: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """
    A request for the first names in a folder, which may have a hundred thousand names.

    Args:
        path: The path of the folder.
        after: The name after which the names are wanted.
        most: How many names are wanted.
    """

    path: str
    after: str
    most: int

    type: ClassVar[int] = GetChildren.type

    def serialize(self) -> Any:
        """Return the bytes of the request."""
        return GetChildren(self.path, None).serialize()

    def deserialize(self, data: bytes, offset: int) -> list[str]:
        """Return the names, sorted."""
        (count,) = int_struct.unpack_from(data, offset)
        if count > len(data) // SHORTEST_NAME:
            raise ValueError

        def names(offset: int) -> Iterator[str]:
            for _ in range(count):
                name, offset = read_string(data, offset)
                if name > self.after:
                    yield name

        return nsmallest(self.most, names(offset + int_struct.size))


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """
    The threads and the socket of one connection.

    Args:
        connect: Connects to an address, with the certificates from the settings.
        ended: Called when a thread has ended.
    """

    def __init__(self, connect: Callable[[tuple[str, int]], BoundedSocket], ended: Callable[[], object]) -> None:
        super().__init__()
        self.connection: BoundedSocket | None = None
        self.error: OSError | None = None
        self.closing = False
        self._connect = connect
        self._ended = ended

    def start(self) -> None:
        """Start the threads; the end of the process needs them to release locks."""
        super().start()
        atexit.unregister(self.stop)

    def spawn(self, func: Callable[..., object], *args: Any, **options: Any) -> threading.Thread:
        """Start a thread; its end is visible in the state of the client."""

        def run() -> None:
            with suppress(Exception):
                func(*args, **options)
            self._ended()

        thread = threading.Thread(target=run, name="django_redlock zookeeper", daemon=True)
        thread.start()
        return thread

    def create_connection(self, address: tuple[str, int], **options: Any) -> BoundedSocket:
        """Connect; if that fails, remember why."""
        try:
            self.connection = self._connect(address)
        except OSError as error:
            self.error = error
            raise
        if self.closing:
            raise ConnectionAbortedError
        return self.connection

    def select(self, reading: Sequence[Any], writing: Sequence[Any], failing: Sequence[Any], timeout: float) -> Any:
        """Wait for sockets; data that TLS has already decrypted does not make them readable."""
        if decrypted := [one for one in reading if isinstance(one, ssl.SSLSocket) and one.pending()]:
            return decrypted, [], []
        left = self.connection.until - steady() if self.connection else inf
        found = super().select(reading, writing, failing, min(timeout, max(0.0, left)))
        if left <= 0 and not any(found):  # what has arrived is read even if this thread had no turn until now
            raise TimeoutError
        return found


class ZookeeperClient:
    """
    A connection to one member, and its session; used by one thread at a time.

    Args:
        place: The ensemble.
        number: The index of the member.
        timeout: Seconds to wait for each reply.
    """

    def __init__(self, place: Place, number: int, timeout: float) -> None:
        host, port = place.members[number]
        self._place = place
        options = place.options
        login = [("digest", f"{options['username']}:{options['password']}")] if options.get("password") else []
        sasl: dict[str, str] | None = None
        if options.get("sasl_mechanism"):
            sasl = {name.removeprefix("sasl_"): value for name, value in options.items() if name.startswith("sasl_")}
            sasl |= {name: options[name] for name in ("username", "password") if options.get(name)}
        _ = place.context  # read here, so that an error in it is not raised in one of kazoo's threads
        self._timeout = timeout
        self._changed = new_event()
        self._refused = False
        self._handler = Handler(partial(connected, host=host, place=place, timeout=timeout), self._changed.set)
        self.acl = CREATOR_ALL_ACL if logs_in(place) else OPEN_ACL_UNSAFE
        self._kazoo = KazooClient(
            address(host, port),
            timeout=SESSION,
            handler=self._handler,
            connection_retry={"max_tries": 1, "sleep_func": self._handler.sleep_func},
            auth_data=[] if sasl else login,
            sasl_options=sasl,
            logger=SILENT,
        )
        self._kazoo.add_listener(self._on_state)

    def _on_state(self, state: str) -> None:
        if self._kazoo.client_state == KeeperState.AUTH_FAILED:
            self._refused = True
        self._changed.set()

    @property
    def ended(self) -> bool:
        """Whether there is no connection any more."""
        return not self._kazoo.connected

    def open(self) -> None:
        """Connect, and authenticate if there is a user."""
        try:
            self._kazoo.start_async()
        except RuntimeError:
            raise LinkError(Failure.NO_THREAD) from None
        ended = self._changed.wait(self._timeout)
        if self._kazoo.connected:
            return
        if self._refused:
            raise AnswerError(Failure.WRONGPASS)
        if error := self._handler.error:
            raise error
        if not ended:
            raise TimeoutError
        if self._handler.connection is None:  # kazoo found no address and did not connect
            raise socket.gaierror
        raise LinkError(Failure.NO_LEADER, NOT_SERVING)

    def when_lost(self, callback: Callable[[], object]) -> None:
        """Call *callback*, in any thread, when the connection is gone."""
        self._kazoo.add_listener(lambda state: state != KazooState.CONNECTED and callback())

    # Requests

    def get(self, paths: Iterable[str], *, sync: str = "", watch: Callable[[Any], object] | None = None) -> list[Any]:
        """
        Return the contents of some znodes; None for a znode that does not exist.

        Args:
            paths: The paths of the znodes.
            sync: A path; if given, the member first catches up with its leader.
            watch: Called in one of kazoo's threads after the next change of any of the znodes.
        """
        first = [self._kazoo.sync_async(sync)] if sync else []
        results = [*first, *(self._kazoo.get_async(path, watch) for path in paths)]
        found = self._wait(results)[len(first) :]
        return [one and Znode(one[0] or b"", *numbers(one[1])) for one in found]

    def children(self, listings: Sequence[Listing]) -> list[list[str]]:
        """Return the first names in some folders, sorted."""
        results = [self._send(listing) for listing in listings]
        return [found or [] for found in self._wait(results, LARGEST_LISTING)]

    def exists(self, paths: Iterable[str]) -> list[Znode | None]:
        """Return some znodes without their content, None for those that do not exist; this needs no rights."""
        return [one and Znode(b"", *numbers(one)) for one in self._wait(map(self._kazoo.exists_async, paths))]

    def write(self, changes: Iterable[ZnodeChange], *, fleeting: bool = False) -> Znode | None:
        """
        Carry out changes, all or none; *fleeting* creates znodes that end with the connection.

        Returns:
            The first znode that got new content, without that content. None if a version differed, a znode to create
            existed, or a znode to change did not exist.
        """
        transaction = self._kazoo.transaction()
        for path, data, version, delete in changes:
            if delete:
                transaction.delete(path, version)
            elif version is None:
                transaction.create(path, data, acl=self.acl, ephemeral=fleeting)
            elif data is None:
                transaction.check(path, version)
            else:
                transaction.set_data(path, data, version)
        (results,) = self._wait([self._send(Transaction(transaction.operations))], LONGEST_WRITTEN)
        errors = [each for each in results if isinstance(each, ZookeeperError) and not isinstance(each, CONSEQUENCES)]
        if errors and not isinstance(errors[0], OVERTAKEN):
            raise answer_error(errors[0], self._place)
        written = [each for each in results if hasattr(each, "mzxid")]
        return None if errors else Znode(b"", *numbers(written[0])) if written else Znode(b"", 0, 0, 0, 0)

    def _send(self, request: Any) -> Any:
        result = self._handler.async_result()
        self._kazoo._call(request, result)
        return result

    def _wait(self, results: Iterable[Any], largest: int = LARGEST) -> list[Any]:
        """Return the results of requests, None for a znode that does not exist; at most *largest* bytes may come."""
        until = steady() + self._timeout
        found = []
        if connection := self._handler.connection:
            connection.allow(largest)
        for result in list(results):  # all are sent before the first reply is waited for
            try:
                found.append(result.get(timeout=max(0.0, until - steady())))
            except NoNodeError:
                found.append(None)
            except KazooTimeoutError:
                raise TimeoutError from None
            except KazooException as error:
                raise answer_error(AuthFailedError() if self._refused else error, self._place) from None
            except Exception:  # kazoo could not read the reply
                raise AnswerError(Failure.MALFORMED) from None
        return found

    def wait(self, timeout: float) -> None:
        """Wait for at most the given seconds for each reply from now on."""
        self._timeout = timeout

    def close(self) -> None:
        """End the session and its threads, without waiting for a silent member."""
        self._handler.closing = True
        if connection := self._handler.connection:
            connection.allow(LARGEST, LAST_REPLY)
        if not self._kazoo.connected:  # kazoo may be waiting for the member to begin a session
            self.abort()
        for end in (self._kazoo.stop, self._kazoo.close):
            with suppress(Exception):  # the session has not begun, or some of its threads could not be started
                end()

    def abort(self) -> None:
        """Make a call that waits for the member fail at once; any thread may call this."""
        with suppress(OSError, AttributeError):  # it is not connected, or no longer connected
            self._handler.connection.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


def numbers(stat: Any) -> tuple[int, int, int, int]:
    """Return those numbers of a znode that are used here."""
    return stat.version, stat.mzxid, stat.mtime, stat.numChildren


def logs_in(place: Place) -> bool:
    """Return whether there is a password or a ticket."""
    return bool(place.options.get("password") or place.options.get("sasl_mechanism"))


def answer_error(error: KazooException, place: Place) -> AnswerError | OSError:
    """Return what an error of kazoo means; only this module knows its exceptions."""
    match error:
        case AuthFailedError():
            return AnswerError(Failure.WRONGPASS)
        case NoAuthError():
            return AnswerError(Failure.NOPERM if logs_in(place) else Failure.NOAUTH)
        case ConnectionLoss() | SessionExpiredError():
            return ConnectionResetError()
    return AnswerError(Failure.ERROR_REPLY if isinstance(error, ZookeeperError) else Failure.UNREACHABLE)
