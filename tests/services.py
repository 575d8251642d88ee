"""
Real PostgreSQL, MariaDB, RabbitMQ, etcd and ZooKeeper for the tests, which stop, kill and freeze them.

Each uses a private temporary folder and a free port, and does not outlive the process that started it.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from pathlib import Path
from subprocess import DEVNULL, Popen
from time import monotonic, sleep
from typing import Any, ClassVar, Self

from django.db import connections

from django_redlock.testing.servers import reserve_port, spawn
from tests import drivers
from tests.waiting import wait_until

START_TIMEOUT = 120.0  # seconds; RabbitMQ takes 10 on a busy machine
STOP_TIMEOUT = 20.0
APART = 60  # seconds between the clocks of two members of a cluster


class ServiceMissingError(RuntimeError):
    """The program is not installed; the message says what to type."""


class Service:
    """One server, which a ``with`` block starts."""

    scheme: ClassVar[str]
    program: ClassVar[str]
    remedy: ClassVar[str]
    user: ClassVar[str]  # the user that runs it when root runs the tests

    def __init__(self) -> None:
        self._process: Popen[bytes] | None = None
        self.find()
        self.port = reserve_port(self)
        self.url = self.private_url()
        self.folder = Path(tempfile.mkdtemp(prefix=f"redlock-{self.scheme}-"))
        self.account = self.user if os.getuid() == 0 else ""
        if self.account:
            shutil.chown(self.folder, self.account)
        self._discard = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.kill()  # a proper shutdown takes RabbitMQ five seconds, and there is no data to keep
        self._end()
        self._discard()

    @classmethod
    def find(cls) -> str:
        """Return the path of the program; raise ServiceMissingError if there is none."""
        found = shutil.which(cls.program) or next(iter(sorted(glob(cls.program), reverse=True)), None)
        if not found:
            raise ServiceMissingError(cls.remedy)
        return found

    @property
    def running(self) -> bool:
        """Whether the process exists; it does when frozen."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the running server."""
        assert self._process is not None, f"{self.scheme} is not running"
        return self._process.pid

    def start(self) -> Self:
        """Start it unless it is running, and return when it answers."""
        self.begin()
        self._wait_until_ready()
        return self

    def begin(self) -> None:
        """Start it unless it is running, without waiting: a member of a cluster may need the others to answer."""
        if self.running:
            self.thaw()
        else:
            if not any(self.folder.iterdir()):
                self.prepare()
            self._process = self.launch()

    def stop(self) -> None:
        """Shut it down properly, frozen or not; its data stay."""
        if self.running:
            self.thaw()
            os.kill(self.pid, self.polite_signal)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)  # type: ignore[union-attr]
        self.kill()

    def kill(self) -> None:
        """End it and its children with SIGKILL, as a crash would; ``start()`` brings it back with its data."""
        family = self.family()
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        for pid in family:  # PostgreSQL does not start while a process of an earlier one has its shared memory
            wait_until(partial(ended, pid))

    def wipe(self) -> None:
        """Kill it and remove its data."""
        self.kill()
        self.run("rm", "-rf", str(self.folder / "data"))

    def freeze(self) -> None:
        """Stop it and its children (SIGSTOP): it accepts connections and bytes, and sends no reply, from now on."""
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                wait_until(partial(stopped, pid), despite=OSError)

    def thaw(self) -> None:
        """Let it continue (SIGCONT)."""
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def family(self) -> list[int]:
        """Return the process ids of the server and of all its descendants, the server first."""
        return family(self.pid) if self.running else []

    def run(self, *command: str) -> None:
        """Run a command of its preparation, as the server's user."""
        done = subprocess.run(
            command,
            user=self.account or None,
            cwd=self.folder,
            env=self._surroundings(),
            stdin=DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout}{done.stderr}")

    def spawn(self, *command: str, **environment: str) -> Popen[bytes]:
        """Start a program that ends with this process; its output goes to the file ``log``."""
        with (self.folder / "log").open("ab") as log:
            return spawn(
                command,
                user=self.account,
                cwd=self.folder,
                env=self._surroundings() | environment,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _surroundings(self) -> dict[str, str]:
        return os.environ | {"HOME": str(self.folder), "TMPDIR": str(self.folder)}

    def _wait_until_ready(self) -> None:
        deadline = monotonic() + START_TIMEOUT
        while True:
            try:
                return self.ping()
            except Exception:  # each driver has its own
                if not self.running or monotonic() > deadline:
                    self.kill()
                    raise RuntimeError(f"{self.scheme} did not start:\n{(self.folder / 'log').read_text()}") from None
            sleep(0.05)

    def _end(self) -> None:
        """End the server's helpers."""

    # The parts that differ between kinds

    polite_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def private_url(self) -> str:
        """Return the address at which the server listens."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Fill the empty folder."""

    def launch(self) -> Popen[bytes]:
        """Start the process."""
        raise NotImplementedError

    def ping(self) -> None:
        """Raise unless the server accepts connections."""
        raise NotImplementedError

    def clear(self) -> None:
        """Delete what a test has left; tests of a database have one of their own."""


class Members:
    """The members of a store that elects a leader; each has a property ``leads``."""

    def __init__(self, members: list[Any]) -> None:
        self.members = members

    @property
    def url(self) -> str:
        """The URL of the node, with all members."""
        return f"{self.members[0].scheme}://" + ",".join(f"127.0.0.1:{member.port}" for member in self.members)

    def leader(self) -> Any:
        """Wait until there is a leader, and return it; members that are frozen or dead are left out."""

        def elected() -> Any:
            for member in self.members:
                with suppress(OSError):
                    if member.leads:
                        return member
            return None

        return wait_until(elected)


def stopped(pid: int) -> bool:
    """Return whether all threads of a process have stopped; after the signal, they may run on for a moment."""
    return all(
        stat.read_text().rpartition(")")[2].split()[0] in "TtZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat")
    )


def children(pid: int) -> list[int]:
    """Return the process ids of the children of a process."""
    found: list[int] = []
    for path in glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):
            found += map(int, Path(path).read_text().split())
    return found


def family(pid: int) -> list[int]:
    """Return the process ids of a process and of all its descendants, the process first."""
    found = [pid]
    for parent in found:
        found += children(parent)
    return found


def state_of(pid: int) -> str:
    """Return the letter with which ``ps`` shows the state of a process, such as T for stopped; X if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def ended(pid: int) -> bool:
    """Return whether a process has ended, reaped or not."""
    return state_of(pid) in "ZX"


class Database(Service):
    """A service that Django can use; every test gets a database of its own in it."""

    engine: ClassVar[str]
    administrator: ClassVar[str]

    def settings(self, name: str, **entry: Any) -> dict[str, Any]:
        """Return an entry for ``DATABASES``: the database *name* in this server."""
        return {
            "ENGINE": self.engine,
            "NAME": name,
            "USER": self.administrator,
            "HOST": "127.0.0.1",
            "PORT": self.port,
            **entry,
        }

    @contextmanager
    def database(self) -> Iterator[str]:
        """Create an empty database, yield its name, and drop it at the end if the server is still running."""
        name = f"redlock_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name}")
        try:
            yield name
        finally:
            with suppress(Exception):
                self.execute(self.drop.format(name))

    drop: ClassVar[str] = "DROP DATABASE {}"

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """Execute a statement as the server's administrator, outside any transaction; return its rows."""
        raise NotImplementedError

    def ping(self) -> None:
        self.execute("SELECT 1")


class SQLite:
    """The database of a server for tests, with files in a folder instead."""

    scheme = "sqlite"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def database(self) -> Iterator[str]:
        """Return the path of a file that does not exist yet."""
        yield str(self.folder / f"{uuid.uuid4().hex[:12]}.sqlite3")

    def settings(self, name: str, **entry: Any) -> dict[str, Any]:
        """Return an entry for ``DATABASES``: the file *name*, whose writers wait for each other."""
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": {"timeout": 30}, **entry}


@contextmanager
def django_database(alias: str, entry: dict[str, Any]) -> Iterator[str]:
    """Make *entry* available to Django as the database *alias*; other threads close their own connections to it."""
    connections.settings[alias] = connections.configure_settings({"default": {}, alias: dict(entry)})[alias]
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


class PostgreSQL(Database):
    """A private PostgreSQL."""

    scheme = "postgresql"
    program = "/usr/lib/postgresql/*/bin/postgres"
    remedy = "apt-get install postgresql"
    user = "postgres"
    engine = "django.db.backends.postgresql"
    administrator = "redlock"
    polite_signal = signal.SIGINT  # its "fast" shutdown: does not wait for clients
    drop = "DROP DATABASE {} WITH (FORCE)"

    def private_url(self) -> str:
        return f"postgresql://redlock@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> None:
        initdb = str(Path(self.find()).with_name("initdb"))
        data = str(self.folder / "data")
        self.run(initdb, "-D", data, "-U", "redlock", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-sync")

    def launch(self) -> Popen[bytes]:
        (self.folder / "data/postmaster.pid").unlink(missing_ok=True)  # of a killed server; its id may be reused
        options = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
            "shared_buffers": "32MB",
            "max_connections": 200,
            "log_min_messages": "fatal",
        }
        told = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        return self.spawn(self.find(), "-D", str(self.folder / "data"), *told)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self.url, connect_timeout=5, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []


class MariaDB(Database):
    """A private MariaDB."""

    scheme = "mariadb"
    program = "/usr/sbin/mariadbd"
    remedy = "apt-get install mariadb-server"
    user = "mysql"
    engine = "django.db.backends.mysql"
    administrator = "root"

    def private_url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/mysql"

    def options(self) -> list[str]:
        """Return the options for the server and for the program that makes its folder."""
        return [
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=8M",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-flush-method=nosync",
            "--innodb-use-native-aio=0",
        ]

    def prepare(self) -> None:
        told = ["--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve"]
        self.run("mariadb-install-db", *self.options(), *told)

    def launch(self) -> Popen[bytes]:
        return self.spawn(
            self.find(),
            *self.options(),
            f"--port={self.port}",
            f"--socket={self.folder / 'socket'}",
            f"--pid-file={self.folder / 'pid'}",
            "--bind-address=127.0.0.1",
            "--skip-name-resolve",
            "--character-set-server=utf8mb4",
            "--max-connections=300",
        )

    def settings(self, name: str, **entry: Any) -> dict[str, Any]:
        drivers.install_mysql()
        return super().settings(name, **entry)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        import pymysql

        login = {"host": "127.0.0.1", "port": self.port, "user": "root"}
        with (
            pymysql.connect(**login, connect_timeout=5, autocommit=True) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement)
            return list(cursor.fetchall())


class RabbitMQ(Service):
    """A private RabbitMQ, with an epmd of its own."""

    scheme = "amqp"
    program = "/usr/lib/rabbitmq/bin/rabbitmq-server"
    remedy = "apt-get install rabbitmq-server"
    user = "rabbitmq"

    _epmd: Popen[bytes] | None = None

    def private_url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def prepare(self) -> None:
        self._epmd_port, self._distribution_port = reserve_port(self), reserve_port(self)
        (self.folder / "enabled_plugins").write_text("[].")
        (self.folder / "rabbitmq.conf").write_text("disk_free_limit.absolute = 1MB\n")

    def launch(self) -> Popen[bytes]:
        # Otherwise the server starts one in the background, which stays behind.
        if self._epmd is None or self._epmd.poll() is not None:
            self._epmd = self.spawn("epmd", "-port", str(self._epmd_port), "-address", "127.0.0.1")
        environment = {
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"redlock{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            # Its script then turns into the server, instead of starting it as a child that outlives it.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-noinput +S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
        }
        return self.spawn(self.find(), **environment)

    def ping(self) -> None:
        from amqp import Connection

        connection = Connection(f"127.0.0.1:{self.port}", connect_timeout=5, read_timeout=30)
        try:
            connection.connect()
        finally:
            connection.close()

    def _end(self) -> None:
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait()
