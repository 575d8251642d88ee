"""
The doctor's checks of a single node, based on what the node reports about itself (internal).

Each finding has a stable name, one cause, and a remedy that can be typed.
"""

from collections.abc import Callable, Iterator
from math import ceil

from ..core.protocol import Failure
from ..core.rules import EXPIRY_ROUNDING, Rules
from ..nodes.inspection import Finding, Inspection, Level, error, note, warning
from .model import typed


def severity(level: Level | None) -> int:
    """Return how bad a level is, which is also the exit code of the doctor: 0 without a finding or for a note."""
    return tuple(Level).index(level) if level else 0


OLDEST = {"Redis": (6, 2), "Valkey": (8, 0)}
FULL = 0.9  # share of the memory above which a node is nearly full


def _unreachable(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.detail:
        votes = "1 vote" if rules.needed == 1 else f"{rules.needed} votes"
        why = f"It cannot be reached ({node.detail}): it gives no vote, and locks need {votes}."
        yield warning("unreachable", why, remedy_of(node.failure))


def remedy_of(failure: Failure | None) -> str:
    """Return what to do about a node that cannot be reached."""
    return REMEDIES.get(failure, OTHERWISE) if failure else OTHERWISE


OTHERWISE = "Check that the address in NODES is that of the server, and check its log."
REMEDIES = {
    Failure.REFUSED: "Start the server; check that its port and `bind` are those of NODES, and that no "
    "firewall blocks it.",
    Failure.TIMEOUT: "Check whether the host is up, whether a firewall drops packets, whether the scheme in NODES is "
    "that of the server (with or without TLS), and whether something blocks the server; on Redis, `redis-cli "
    "--latency` and `SLOWLOG GET` show that.",
    **dict.fromkeys(
        (Failure.RESET, Failure.CLOSED),
        "Check that the address and the scheme in NODES are those of the server: it ends connections that do not speak "
        "its protocol, or speak it without TLS. If they are, check its log. If there is a proxy in between, such as "
        "HAProxy, check whether the server behind it is up: a proxy accepts connections all the same, and ends them.",
    ),
    Failure.UNKNOWN_HOST: "Correct the host's name in NODES, or in your DNS. If members or sentinels gave the name, "
    "correct what they announce: `cluster-announce-hostname`, `cluster-announce-ip`, `sentinel announce-ip`.",
    Failure.NOAUTH: "Put the password into the URL or the node's OPTIONS.",
    Failure.WRONGPASS: "Correct the user and the password in the URL or the node's OPTIONS.",
    Failure.NO_PASSWORD: "Take the password out of the URL, or set one on the server: `requirepass` on Redis, `etcdctl "
    "auth enable` on etcd.",
    Failure.NOPERM: "Give the user the rights that the documentation lists under Security.",
    Failure.NO_COMMAND: "Take the rename-command out of the server's configuration.",
    Failure.CERTIFICATE_EXPIRED: "Renew the server's certificate.",
    Failure.CERTIFICATE_REFUSED: "Put the authority's certificate into the node's OPTIONS as 'ssl_ca_certs'; "
    "if it is there, check the reason given and this machine's clock.",
    Failure.WRONG_CERTIFICATE: "Use the name in the certificate as the host in NODES.",
    Failure.NO_CLIENT_CERTIFICATE: "Put 'ssl_certfile' and 'ssl_keyfile' into the node's OPTIONS.",
    Failure.TLS_FAILED: "Check that the server speaks TLS on this port, or write the scheme without TLS, such as "
    "redis:// or etcd://.",
    Failure.LOADING: "Wait: it loads its data.",
    Failure.WRONG_MODE: "Write redis+cluster:// for a cluster, and redis:// for any other server; a sentinel belongs "
    "into SENTINELS.",
    Failure.MAX_CLIENTS: "Raise `maxclients`, or find the clients that keep connections open (`CLIENT LIST`).",
    Failure.NO_SUCH_DATABASE: "Use a database number that the server has (`databases`).",
    Failure.NO_TABLE: "Run the command that it names; a router of DATABASE_ROUTERS may have kept the table out.",
    Failure.DISK: "Check the disk of the database, its file system and its log; if the file is damaged, restore it.",
    Failure.DISK_FULL: "Make room on the disk of the database.",
    Failure.IN_MEMORY: "Use a file or a server: other processes cannot see a database in this one's memory.",
    Failure.SENTINEL: "Check that the sentinels run and know the service: `redis-cli -p 26379 SENTINEL MASTER name`.",
    Failure.NO_SUCH_FILE: "Check that the socket's path in NODES is that of `unixsocket`.",
}


def _silent(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.known and not node.detail and not node.info and rules.guards_restarts:
        yield error(
            "no-info",
            "It refuses INFO, so it is unknown when it restarted, and it gives no vote.",
            f"{_grant(node, '+info')} Or OPTIONS['restart_guard'] = False.",
        )


def _role(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.info.get("role") == "slave":
        yield error(
            "replica",
            "It is a replica: it takes no locks, and after a promotion it may lack the latest ones.",
            "List its master in NODES, or make it one: REPLICAOF NO ONE.",
        )
    mode = node.info.get("redis_mode", node.info.get("server_mode", "standalone"))
    if node.info and mode != node.mode:
        yield error(
            "mode",
            f"It runs in {mode} mode: it gives no vote.",
            "List standalone masters, or all members of a cluster as one node: redis+cluster://host-1,host-2.",
        )
    if node.number("connected_slaves") and not node.guide:
        yield note(
            "has-replicas",
            f"It has replicas ({node.number('connected_slaves')}): if one replaces it, the latest locks are missing.",
            "Use a master without replicas, or make failovers visible, with a node of Redis Sentinel.",
        )


def _version(node: Inspection, rules: Rules) -> Iterator[Finding]:
    version = tuple(int(part) for part in node.version.split(".")[:2] if part.isdigit())
    if node.info and len(version) == 2 and version < OLDEST[node.server]:
        oldest = ".".join(map(str, OLDEST[node.server]))
        yield warning(
            "version",
            f"It is version {node.version}; the oldest that is supported is {oldest}.",
            f"Upgrade it to {oldest} or later.",
        )


def _speed(node: Inspection, rules: Rules) -> Iterator[Finding]:
    timeout = rules.timeout(rules.ttl)
    if node.round_trip > timeout / 2:
        enough = 4 * node.round_trip
        ttl = (2 * enough + EXPIRY_ROUNDING) / (0.5 - rules.drift_factor)  # room for two rounds in half of it
        too = "" if ttl <= rules.ttl else f", and OPTIONS['ttl'] to {ceil(ttl)}"
        yield Finding(
            "slow",
            Level.ERROR if node.round_trip > timeout else Level.WARNING,
            f"The shortest of a few round trips took {node.round_trip * 1000:.0f} ms, and a round waits "
            f"{timeout * 1000:.0f} ms: its votes come late, or too late.",
            f"Use a nearer server, or raise OPTIONS['node_timeout'] to {enough:.2f}{too}.",
        )


def _memory(node: Inspection, rules: Rules) -> Iterator[Finding]:
    limit, policy = node.number("maxmemory"), node.info.get("maxmemory_policy", "noeviction")
    if limit and policy != "noeviction":
        allowed = node.name in rules.allow_evicting
        yield Finding(
            "evicts",
            Level.WARNING if allowed else Level.ERROR,
            f"Its maxmemory-policy is {policy}: when its memory is full it may drop held locks"
            + (", as OPTIONS['allow_evicting'] accepts." if allowed else ". It gives no vote."),
            "CONFIG SET maxmemory-policy noeviction, and in redis.conf; or use a separate server for the locks.",
        )
    if node.number("evicted_keys"):
        yield warning(
            "evicted",
            f"It has evicted {node.number('evicted_keys')} keys since it started; locks may have been among them.",
            "CONFIG SET maxmemory-policy noeviction and a larger maxmemory; CONFIG RESETSTAT sets the count to 0.",
        )
    used = node.number("used_memory") / limit if limit else 0.0
    if used > FULL:
        refuses = used >= 1 and policy == "noeviction"
        yield Finding(
            "memory-full",
            Level.ERROR if refuses else Level.WARNING,
            f"{used:.0%} of its maxmemory is used: "
            + ("it refuses to take locks (OOM)." if refuses else "when it is full, it refuses to take locks (OOM)."),
            "Raise maxmemory, or find what fills it: redis-cli --bigkeys.",
        )


def _persistence(node: Inspection, rules: Rules) -> Iterator[Finding]:
    appends = node.info.get("aof_enabled") == "1"
    if not node.info:
        return
    if node.name in rules.durable and not appends:
        yield error(
            "not-durable",
            "OPTIONS['durable'] names it, but it keeps no append-only file: after a restart it votes at once, has "
            "forgotten its locks, and two callers may hold the same one.",
            "CONFIG SET appendonly yes and appendfsync always, and in redis.conf; or remove it from "
            "OPTIONS['durable'].",
        )
    elif not appends and not rules.guards_restarts:
        yield warning(
            "forgets",
            "It keeps no append-only file, and restarts are not guarded: after a restart it has forgotten its locks "
            "and votes at once.",
            "Set OPTIONS['restart_guard'] = True, or appendonly yes with appendfsync always.",
        )
    broken = [what for what in WRITES if node.info.get(what) == "err"]
    if broken:
        yield warning(
            "cannot-save",
            f"It cannot write its data to disk ({', '.join(broken)}): it may refuse every lock (MISCONF).",
            "Check its log and its disk; CONFIG SET stop-writes-on-bgsave-error no lets it go on meanwhile.",
        )


WRITES = ("rdb_last_bgsave_status", "aof_last_bgrewrite_status", "aof_last_write_status")


def _restarted(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if not node.info or not rules.guards_restarts or node.name in rules.durable:
        return
    if any(finding.level is Level.ERROR for finding in _role(node, rules)):
        return  # such a node records nothing, and would not vote if it did
    if node.age is None:
        yield warning(
            "no-age",
            "It does not report since when it has served these locks: it gives no vote to any process until that "
            f"process has known it for {rules.guard:.0f} s.",
            "See the other findings about it: its user may lack a right.",
        )
    elif (left := rules.guard - node.age) > 0:
        yield warning(
            "restarted",
            f"It has served these locks for {node.age:.0f} s and may lack earlier ones: it gives no vote for "
            f"{left:.0f} s. It restarted, took the place of another server, was emptied, or is new.",
            "Wait; every earlier lease has ended by then. Unless it is new, find out what happened (its log, dmesg).",
        )


def _rights(node: Inspection, rules: Rules) -> Iterator[Finding]:
    for right in node.refused:
        if right == "+info":
            continue  # where this right matters, it has a finding of its own
        yield error(
            "right",
            f"Its user lacks the right {right}: requests fail with NOPERM.",
            f"{_grant(node, right)} The documentation lists all rights under Security.",
        )


def _grant(node: Inspection, right: str) -> str:
    return f"ACL SETUSER {typed(node.user)} {right}, then ACL SAVE, or CONFIG REWRITE if the server has no aclfile."


GUIDES = {
    "sentinel": "Check that it runs and knows the service: redis-cli -p 26379 SENTINEL MASTER name.",
    "member": "Check that it runs and is in the cluster: redis-cli -h host CLUSTER SLOTS.",
}
"""The remedy if a sentinel or a member of the cluster does not name the master."""


def _guides(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.deaf:
        yield warning(
            node.guide,
            f"Not every {node.guide} reports where the master is: {', '.join(node.deaf)}. Another one does; if none "
            "does, the node cannot be found.",
            f"{GUIDES[node.guide]} Or remove it from the list.",
        )


def _transport(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.known and not node.encrypted and not node.local:
        yield warning(
            "no-tls",
            "The connection is not encrypted: anyone who can listen can read names, and forge and end locks.",
            "Write rediss:// and give the server a certificate; or, if the network is trusted, put 'redlock.no-tls' "
            "into SILENCED_SYSTEM_CHECKS.",
        )
    if node.ignored:
        yield note(
            "ignored-options",
            f"Its URL sets {', '.join(node.ignored)}, which locks do not use: a request that is sent twice "
            "could take a lock twice, so there are no retries, and timeouts come from OPTIONS['node_timeout'].",
            "Take them out.",
        )


CHECKS: tuple[Callable[[Inspection, Rules], Iterator[Finding]], ...] = (
    *(_unreachable, _guides, _silent, _role, _version, _speed, _memory, _persistence, _restarted, _rights),
    _transport,
)


def check(node: Inspection, rules: Rules) -> Iterator[Finding]:
    """Yield what is wrong with a node, also what only its kind can have."""
    for each in (*CHECKS, *node.checks):
        yield from each(node, rules)
