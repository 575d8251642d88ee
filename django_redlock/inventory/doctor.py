"""
What is wrong with the nodes of an alias, what can come of it, and what to do.

Each finding has a name that stays the same, one cause, and a remedy that can be typed. Nothing is changed on a node
but keys of the doctor's own, which are gone a second later.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from django.conf import settings
from django.core.checks import ERROR

from ..checks import check_settings
from ..conf import DEFAULT_ALIAS
from ..core.admission import MAX_SKEW
from ..core.failure import Failure
from ..core.rules import Rules
from ..engine.manager import LockManager
from ..exceptions import RedlockError
from ..handler import locks
from ..nodes.base import Node
from ..nodes.redis.inspect import Inspection, inspect_all
from . import absurd_tokens, held_locks, name_of, printable

LEVELS = ("note", "warning", "error")
OLDEST = {"redis_version": (6, 2), "valkey_version": (8, 0)}
CLOCKS_APART = 0.1  # seconds, from which on tokens may need a second round trip
FULL = 0.9  # share of the memory


class Finding(NamedTuple):
    """
    One thing that is wrong.

    Args:
        id: Its name, which stays the same; that of a system check for what the settings alone show.
        level: ``note``, ``warning`` (it will surprise) or ``error`` (locks fail, or may be held twice).
        node: The node's display name; empty if it is about all of them.
        text: What is wrong and what can come of it.
        remedy: What to do.
    """

    id: str
    level: str
    node: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """
    What the doctor found at one alias.

    Args:
        alias: The alias in ``REDLOCK``.
        rules: Its numbers.
        nodes: What each node says of itself.
        findings: What is wrong, the worst first.
    """

    alias: str
    rules: Rules
    nodes: tuple[Inspection, ...]
    findings: tuple[Finding, ...]

    @property
    def level(self) -> str:
        """The worst level found; empty if nothing is wrong."""
        return max((finding.level for finding in self.findings), key=LEVELS.index, default="")


def diagnose(using: str = DEFAULT_ALIAS, *, timeout: float = 1.0) -> Diagnosis:
    """
    Examine the nodes of an alias, and take, extend and release a lock of the doctor's own on each of them.

    Args:
        using: The alias in ``REDLOCK``.
        timeout: Seconds to wait for each answer of a node.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    manager = locks[using]
    said = inspect_all(manager.nodes, timeout)
    found = [
        *_settings(using),
        *_quorum(said, manager.rules),
        *(finding for node in said for check in CHECKS for finding in check(node, manager.rules)),
        *_duplicates(said),
        *_clocks(said),
        *_tokens(using),
    ]
    explained = {finding.node for finding in found if finding.level == "error"}
    found += [finding for finding in _trials(manager, said, timeout) if finding.node not in explained]
    told = [finding for finding in found if f"redlock.{finding.id}" not in settings.SILENCED_SYSTEM_CHECKS]
    worst_first = sorted(told, key=lambda finding: -LEVELS.index(finding.level))
    return Diagnosis(using, manager.rules, tuple(said), tuple(worst_first))


def _settings(alias: str) -> Iterator[Finding]:
    """Yield what the system checks say of this alias, and which nodes other parts of the project use."""
    for message in check_settings():
        if f"REDLOCK[{alias!r}]" in message.msg and not message.is_silenced():
            level = "error" if message.level >= ERROR else "warning"
            yield Finding(str(message.id), level, "", message.msg, str(message.hint or ""))


# One node


def _unreachable(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.detail:
        why = f"It cannot be reached ({node.detail}): it gives no vote, and one more that fails may stop all locks."
        yield Finding("unreachable", "warning", node.name, why, remedy_of(node.failure))


def remedy_of(failure: Failure | None) -> str:
    """Return what to do about a node that cannot be reached."""
    return REMEDIES.get(failure, OTHERWISE) if failure else OTHERWISE


OTHERWISE = "See that the address in NODES is that of the server, and what its log says."
REMEDIES = {
    Failure.REFUSED: "Start the server; see that its port and `bind` are those of NODES, and that no "
    "firewall is between.",
    Failure.TIMEOUT: "See whether the host is up, whether a firewall drops packets, and what `redis-cli --latency` and "
    "`SLOWLOG GET` say: something may block the server.",
    Failure.UNKNOWN_HOST: "Correct the host's name in NODES, or in your DNS.",
    Failure.NOAUTH: "Put the password into the URL or the node's OPTIONS.",
    Failure.WRONGPASS: "Correct the user and the password in the URL or the node's OPTIONS.",
    Failure.NO_PASSWORD: "Take the password out of the URL, or set `requirepass` on the server.",
    Failure.NOPERM: "Give the user the rights that the documentation lists under Security.",
    Failure.CERTIFICATE_EXPIRED: "Renew the server's certificate.",
    Failure.CERTIFICATE_REFUSED: "Put the authority's certificate into the node's OPTIONS as 'ssl_ca_certs'; "
    "if it is there, see the reason, and this machine's clock.",
    Failure.WRONG_CERTIFICATE: "Use the name in the certificate as the host in NODES.",
    Failure.NO_CLIENT_CERTIFICATE: "Put 'ssl_certfile' and 'ssl_keyfile' into the node's OPTIONS.",
    Failure.TLS_FAILED: "See that the server speaks TLS on this port, or write redis:// instead of rediss://.",
    Failure.LOADING: "Wait: it loads its data.",
    Failure.MAX_CLIENTS: "Raise `maxclients`, or look for what keeps so many connections open (`CLIENT LIST`).",
    Failure.NO_SUCH_DATABASE: "Use a database number that the server has (`databases`).",
    Failure.NO_TABLE: "Run the command that it names; a router of DATABASE_ROUTERS may have kept the table out.",
    Failure.IN_MEMORY: "Use a file or a server: no other process finds what is in this one's memory.",
    Failure.SENTINEL: "See that the sentinels run and know the service: `redis-cli -p 26379 SENTINEL MASTER name`.",
    Failure.NO_SUCH_FILE: "See that the socket's path in NODES is that of `unixsocket`.",
}


def _silent(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.known and not node.detail and not node.info and rules.guards_restarts:
        yield Finding(
            "no-info",
            "error",
            node.name,
            "It refuses INFO, so nobody knows when it restarted: it gives no vote.",
            f"{_grant(node, '+info')} Or OPTIONS['restart_guard'] = False.",
        )


def _role(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.info.get("role") == "slave":
        yield Finding(
            "replica",
            "error",
            node.name,
            "It is a replica: it takes no locks, and one that is promoted may not have the last ones.",
            "List its master in NODES, or make it one: REPLICAOF NO ONE.",
        )
    mode = node.info.get("redis_mode", node.info.get("server_mode", "standalone"))
    if mode != "standalone":
        yield Finding(
            "mode",
            "error",
            node.name,
            f"It runs in {mode} mode: it gives no vote.",
            "List standalone masters: a cluster is one logical node whose failovers lose locks.",
        )
    if node.number("connected_slaves"):
        yield Finding(
            "has-replicas",
            "note",
            node.name,
            f"It has replicas ({node.number('connected_slaves')}): if one takes its place, the last locks are missing.",
            "Use a master without replicas, or let failovers be known: a node of Redis Sentinel.",
        )


def _version(node: Inspection, rules: Rules) -> Iterator[Finding]:
    field = "valkey_version" if "valkey_version" in node.info else "redis_version"
    said = node.info.get(field, "")
    version = tuple(int(part) for part in said.split(".")[:2] if part.isdigit())
    if len(version) == 2 and version < OLDEST[field]:
        oldest = ".".join(map(str, OLDEST[field]))
        yield Finding(
            "version",
            "warning",
            node.name,
            f"It is version {said}; the oldest that is supported is {oldest}.",
            f"Upgrade it to {oldest} or later.",
        )


def _speed(node: Inspection, rules: Rules) -> Iterator[Finding]:
    timeout = rules.timeout(rules.ttl)
    if node.round_trip > timeout / 2:
        yield Finding(
            "slow",
            "error" if node.round_trip > timeout else "warning",
            node.name,
            f"The shortest of a few round trips took {node.round_trip * 1000:.0f} ms, and a round waits "
            f"{timeout * 1000:.0f} ms: its votes come late, or too late.",
            f"Use a server nearer by, or raise OPTIONS['node_timeout'] to {4 * node.round_trip:.2f} and ttl with it.",
        )


def _memory(node: Inspection, rules: Rules) -> Iterator[Finding]:
    limit, policy = node.number("maxmemory"), node.info.get("maxmemory_policy", "noeviction")
    if limit and policy != "noeviction":
        allowed = node.name in rules.allow_evicting
        yield Finding(
            "evicts",
            "warning" if allowed else "error",
            node.name,
            f"Its maxmemory-policy is {policy}: when its memory is full it may drop held locks"
            + (", as OPTIONS['allow_evicting'] accepts." if allowed else ". It gives no vote."),
            "CONFIG SET maxmemory-policy noeviction, and in redis.conf; or a server of its own for the locks.",
        )
    if node.number("evicted_keys"):
        yield Finding(
            "evicted",
            "warning",
            node.name,
            f"It has evicted {node.number('evicted_keys')} keys since it started; locks may have been among them.",
            "CONFIG SET maxmemory-policy noeviction and a larger maxmemory; CONFIG RESETSTAT sets the count to 0.",
        )
    used = node.number("used_memory") / limit if limit else 0.0
    if used > FULL:
        refuses = used >= 1 and policy == "noeviction"
        yield Finding(
            "memory-full",
            "error" if refuses else "warning",
            node.name,
            f"{used:.0%} of its maxmemory is used: "
            + ("it refuses to take locks (OOM)." if refuses else "when it is full, it refuses to take locks (OOM)."),
            "Raise maxmemory, or find what fills it: redis-cli --bigkeys.",
        )


def _persistence(node: Inspection, rules: Rules) -> Iterator[Finding]:
    appends = node.info.get("aof_enabled") == "1"
    if not node.info:
        return
    if node.name in rules.durable and not appends:
        yield Finding(
            "not-durable",
            "error",
            node.name,
            "OPTIONS['durable'] names it, and it keeps no append-only file: after a restart it votes at once and has "
            "forgotten its locks, so that two may hold one.",
            "CONFIG SET appendonly yes and appendfsync always, and in redis.conf; or take it off OPTIONS['durable'].",
        )
    elif not appends and not rules.guards_restarts:
        yield Finding(
            "forgets",
            "warning",
            node.name,
            "It keeps no append-only file, and restarts are not guarded: one that restarts forgets its locks and "
            "votes at once.",
            "OPTIONS['restart_guard'] = True, or appendonly yes with appendfsync always.",
        )
    broken = [what for what in WRITES if node.info.get(what) == "err"]
    if broken:
        yield Finding(
            "cannot-save",
            "warning",
            node.name,
            f"It cannot write its data to disk ({', '.join(broken)}): it may refuse every lock (MISCONF).",
            "See its log and its disk; CONFIG SET stop-writes-on-bgsave-error no lets it go on meanwhile.",
        )


WRITES = ("rdb_last_bgsave_status", "aof_last_bgrewrite_status", "aof_last_write_status")


def _restarted(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if not node.info or not rules.guards_restarts or node.name in rules.durable:
        return
    if node.age is None:
        yield Finding(
            "no-age",
            "warning",
            node.name,
            "It does not say since when it has served these locks: it gives no vote to any process until that process "
            f"has known it for {rules.guard:.0f} s.",
            "See the other findings about it: it may be full, or its user may lack a right.",
        )
    elif (left := rules.guard - node.age) > 0:
        yield Finding(
            "restarted",
            "warning",
            node.name,
            f"It has served these locks for {node.age:.0f} s and may lack earlier ones: it gives no vote for "
            f"{left:.0f} s. It restarted, took the place of another server, was emptied, or is new.",
            "Wait; every earlier lease has ended by then. Unless it is new, find out what happened (its log, dmesg).",
        )


def _rights(node: Inspection, rules: Rules) -> Iterator[Finding]:
    for right in node.refused:
        if right == "+info":
            continue  # where that matters it is a finding of its own
        yield Finding(
            "right",
            "error",
            node.name,
            f"Its user lacks the right {right}: requests fail with NOPERM.",
            f"{_grant(node, right)} The documentation lists all rights under Security.",
        )


def _grant(node: Inspection, right: str) -> str:
    return f"ACL SETUSER {node.user} {right}, then ACL SAVE, or CONFIG REWRITE if the server has no aclfile."


def _sentinels(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.deaf:
        yield Finding(
            "sentinel",
            "warning",
            node.name,
            f"Not every sentinel says where the master is: {', '.join(node.deaf)}. Another one does; when none does, "
            "the node cannot be found.",
            "See that it runs and knows the service: redis-cli -p 26379 SENTINEL MASTER name. Or take it off the list.",
        )


def _transport(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if node.known and not node.encrypted and not node.local:
        yield Finding(
            "no-tls",
            "warning",
            node.name,
            "The connection is not encrypted: who can listen can read names, and forge and end locks.",
            "Write rediss:// and give the server a certificate; or, if the network is trusted, put 'redlock.no-tls' "
            "into SILENCED_SYSTEM_CHECKS.",
        )
    if node.ignored:
        yield Finding(
            "ignored-options",
            "note",
            node.name,
            f"Its OPTIONS or URL set {', '.join(node.ignored)}, which locks do not use: a request that is sent twice "
            "could take a lock twice, so there are no retries, and timeouts come from OPTIONS['node_timeout'].",
            "Take them out.",
        )


CHECKS: tuple[Callable[[Inspection, Rules], Iterator[Finding]], ...] = (
    *(_unreachable, _sentinels, _silent, _role, _version, _speed, _memory, _persistence, _restarted, _rights),
    _transport,
)


# All nodes together


def _quorum(said: list[Inspection], rules: Rules) -> Iterator[Finding]:
    reached = sum(not node.detail for node in said)
    if reached < rules.needed:
        yield Finding(
            "no-quorum",
            "error",
            "",
            f"{reached} of {rules.nodes} nodes can be reached, and {rules.needed} are needed: no lock can be taken.",
            "Bring nodes back; what each of them lacks is below.",
        )


def _duplicates(said: list[Inspection]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for node in said:
        run_id = node.info.get("run_id", "")
        if run_id and first.setdefault(run_id, node.name) != node.name:
            yield Finding(
                "duplicate",
                "error",
                node.name,
                f"It is the same server as {first[run_id]}: one server has one vote, however often it is listed.",
                "List independent servers in NODES.",
            )


def _clocks(said: list[Inspection]) -> Iterator[Finding]:
    known = [node for node in said if node.round_trip]
    if len(known) < 2:
        return
    middle = median(node.ahead for node in known)
    for node in known:
        apart = abs(node.ahead - middle) - node.round_trip / 2
        if apart > CLOCKS_APART:
            doubted = apart > MAX_SKEW
            yield Finding(
                "clock",
                "error" if doubted else "warning",
                node.name,
                f"Its clock is {apart:.1f} s {'ahead of' if node.ahead > middle else 'behind'} the others': "
                + ("it gives no vote." if doubted else "fencing tokens may cost a second round trip."),
                "Run NTP on its host (chronyc tracking, timedatectl), and do not set clocks by hand.",
            )
    if abs(middle) > MAX_SKEW:
        yield Finding(
            "own-clock",
            "warning",
            "",
            f"The clock of this machine is {abs(middle):.1f} s {'behind' if middle > 0 else 'ahead of'} the nodes': "
            "tokens cost a second round trip, and ages are shown wrong.",
            "Run NTP on this host.",
        )


def _tokens(alias: str) -> Iterator[Finding]:
    """Yield the nodes that have no vote on a lock because of what is under its fence."""
    absurd = {**held_locks(alias).absurd, **absurd_tokens(alias).absurd}
    for slug, nodes in sorted(absurd.items()):
        name = printable(name_of(slug))
        for node in nodes:
            yield Finding(
                "absurd-token",
                "error",
                node,
                f"Its fencing token for the lock {name!r} is absurd, so it gives no vote on this lock.",
                f"manage.py redlock_clear --using {alias}, or with --name for this lock alone; find out what wrote it.",
            )


def _trials(manager: LockManager, said: list[Inspection], timeout: float) -> Iterator[Finding]:
    """Take, extend and release a lock on each node that can be reached, as if it were the only one."""
    for node, inspected in zip(manager.nodes, said, strict=True):
        if inspected.detail:
            continue
        problem = _trial(node, manager.rules, timeout)
        if problem:
            yield Finding(
                "trial",
                "error",
                node.name,
                f"A lock of the doctor's own could not be taken, extended and released on it: {problem}",
                "See the other findings about it, its log, and what the documentation of settings says of these words.",
            )


def _trial(node: Node, rules: Rules, timeout: float) -> str:
    ttl = max(60.0, 5 * timeout)  # more than a few rounds take
    alone = Rules(
        nodes=1,
        ttl=ttl,
        max_ttl=max(ttl, rules.max_ttl),
        node_timeout=timeout,
        fence_keep=60.0,
        restart_guard=False,
        clock_guard=False,
        allow_evicting=(node.name,),
    )
    manager = LockManager([node], alone, alias="doctor")
    try:
        lease = manager.claim(
            f"doctor:{os.urandom(8).hex()}", wait=0, renew=False, kind="command", label="doctor"
        ).acquire()
        extended = lease.extend()
        outcome = lease.release()
        return "" if extended and outcome == "released" else f"extended: {extended}, release: {outcome}."
    except RedlockError as error:
        return str(error)
    finally:
        manager.close()
