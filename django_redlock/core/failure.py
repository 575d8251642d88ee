"""Why a node gave no vote (internal)."""

from enum import Enum


class Failure(Enum):
    """
    Why a node did not carry out a request, or cannot be asked at all. The value is the text for people.

    Details, such as the mode of a server, are kept apart from the failure, because no decision compares texts.
    """

    # The way to the node
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    UNKNOWN_HOST = "unknown host"
    NO_SUCH_FILE = "no such file"
    RESET = "reset"
    CLOSED = "closed"
    INTERRUPTED = "interrupted"
    TLS_FAILED = "TLS failed"
    CERTIFICATE_EXPIRED = "certificate refused, certificate has expired"
    CERTIFICATE_REFUSED = "certificate refused"
    WRONG_CERTIFICATE = "has a certificate for another host"
    NO_CLIENT_CERTIFICATE = "wants a client certificate"
    SENTINEL = "sentinel"
    UNKNOWN_TO_SENTINEL = "is unknown to the sentinel"

    # What this process did not do
    LATE = "this process was late"
    NOT_CONNECTED = "not connected"
    FAILED_LATELY = "failed lately"
    BACKLOG = "backlog"
    NO_THREAD = "no thread"
    DOES_NOT_NOTIFY = "does not notify waiters"

    # What the node replied
    NOAUTH = "NOAUTH"
    WRONGPASS = "WRONGPASS"
    NO_PASSWORD = "has no password"
    NOPERM = "NOPERM"
    NO_SUCH_DATABASE = "no such database"
    MAX_CLIENTS = "max clients"
    LOADING = "LOADING"
    READONLY = "READONLY"
    MASTERDOWN = "MASTERDOWN"
    CLUSTERDOWN = "CLUSTERDOWN"
    CROSSSLOT = "CROSSSLOT"
    TRYAGAIN = "TRYAGAIN"
    MOVED = "MOVED"
    ASK = "ASK"
    OOM = "OOM"
    BUSY = "BUSY"
    MISCONF = "MISCONF"
    NOREPLICAS = "NOREPLICAS"
    WRONGTYPE = "WRONGTYPE"
    NOSCRIPT = "NOSCRIPT"
    ERROR_REPLY = "error reply"
    MALFORMED = "malformed reply"
    INCOMPLETE = "incomplete"
    ABSURD_TOKEN = "has an absurd fencing token for this lock (redlock_clear repairs it)"

    # What the node is
    REPLICA = "is a replica"
    FAILING_OVER = "no master at present"
    MIGRATING = "its hash slot moves to another shard"
    WRONG_MODE = "runs in another mode"
    TWO_SERVERS = "answers as two servers"
    RESTARTED = "restarted"

    # Stores that are replicated
    NO_LEADER = "has no leader at present"
    LEADER_CHANGED = "has changed its leader"
    NO_SPACE = "is out of space"

    # Databases
    LOCKED = "locked"
    CONTENDED = "contended"
    IN_MEMORY = "is in memory, where no other process finds a lock"
    NO_TABLE = "lacks its table"
    UNKNOWN_ALIAS = "is unknown to DATABASES"
    UNUSABLE = "cannot be used"
    OWN_TRANSACTION = (
        "is locked by this thread's own transaction (take the lock before atomic(), or give the locks a database file "
        "of their own or a database server)"
    )

    __hash__ = object.__hash__  # each member exists once; Enum's own hash runs in Python, on the name

    @property
    def lasting(self) -> bool:
        """Whether the node gives no vote until the server or the settings change, however long the caller waits."""
        return self in LASTING


LASTING = frozenset(
    {
        *(Failure.NOPERM, Failure.NOAUTH, Failure.WRONGPASS, Failure.NO_PASSWORD, Failure.NO_SUCH_DATABASE),
        *(Failure.READONLY, Failure.MASTERDOWN, Failure.CLUSTERDOWN, Failure.CROSSSLOT, Failure.TRYAGAIN),
        *(Failure.MOVED, Failure.ASK, Failure.WRONG_MODE, Failure.REPLICA, Failure.UNKNOWN_TO_SENTINEL),
        *(Failure.NO_TABLE, Failure.IN_MEMORY, Failure.UNKNOWN_ALIAS, Failure.UNUSABLE, Failure.OWN_TRANSACTION),
        Failure.NO_SPACE,
        *(Failure.CERTIFICATE_EXPIRED, Failure.CERTIFICATE_REFUSED, Failure.WRONG_CERTIFICATE),
        *(Failure.NO_CLIENT_CERTIFICATE, Failure.ABSURD_TOKEN),
    }
)
