"""The hazards of a schedule, and the oracles that must hold despite them."""

from dataclasses import dataclass, replace

from tests import consensus
from tests.machine.network import Hazards

TTL = 1.0  # seconds; node_timeout is then 0.05 s and the guard time 1.012 s


@dataclass(frozen=True, slots=True)
class Profile(Hazards):
    """The hazards of a schedule of locks."""

    name: str
    # Numbers of nodes and quorums (None: the majority) to draw from.
    sizes: tuple[tuple[int, int | None], ...] = ((3, None), (3, None), (3, None), (5, None))
    block: float = 0.0  # rate at which one client is cut off from one node for a while
    freeze: float = 0.0  # rate at which a node stops for a while
    skew: float = 0.0  # maximum error of the clients' clocks, in seconds; that of nodes is up to 0.2
    rate: float = 0.0  # how much faster or slower a clock may run
    crash: float = 0.0  # rate of node crashes
    forget: float = 0.0  # chance that a crashed node comes back empty
    failover: float = 0.0  # rate at which a replica that lacks the last writes takes a node's place
    amnesia: float = 0.0  # rate at which a node loses its memory without the end of a connection
    demote: float = 0.0  # rate at which a node is demoted, emptied and promoted again, likewise
    policy: float = 0.0  # rate at which the policy of a node changes to one that evicts, and back
    busy: float = 1.0  # how many times longer than others such a schedule lasts
    step: float = 0.0  # rate at which a node's clock steps away; it comes back within two leases
    together: tuple[int, ...] = (1,)  # how many clocks may be wrong, or have just been, at one time
    wall_step: float = 0.0  # rate at which a client's wall clock steps
    die: float = 0.0  # rate at which clients are killed
    slow: float = 0.0  # chance that a step of the database takes up to several leases
    cancel: float = 0.05  # chance that an acquisition is cancelled at some moment
    stores: tuple[int, ...] = (0,)  # how many of the nodes are replicated stores of records, to draw from
    elect: float = 0.0  # rate at which the leader of such a store changes
    # Maximum difference between the clocks of two leaders, in seconds; 0 if each begins to count anew.
    apart: float = 0.0
    holds: bool = False  # whether its locks have minimum holds


ANY_SIZE: tuple[tuple[int, int | None], ...] = (*((nodes, None) for nodes in (1, 2, 3, 3, 4, 5)), (5, 4))
GUARDED: tuple[tuple[int, int | None], ...] = ((3, None), (3, None), (4, None), (5, None), (5, 4))

CALM = Profile("calm", ANY_SIZE)
NET = Profile(
    "net",
    ANY_SIZE,
    cut=0.01,
    reset=0.01,
    spike=0.03,
    repeat=0.02,
    hush=0.2,
    block=0.3,
    freeze=0.2,
)
PAUSE = Profile("pause", ANY_SIZE, stall=0.03, die=0.1, spike=0.005)
SKEW = Profile("skew", ANY_SIZE, skew=0.2, rate=0.003)
SLOW = Profile("slow database", slow=0.1)
CRASH = Profile("crash with data", ANY_SIZE, crash=0.3, cut=0.005)
LOSS = Profile("crash without data", GUARDED, crash=0.3, forget=1.0, cut=0.005)
FAILOVER = Profile("failover", GUARDED, failover=0.5, cut=0.01, die=0.2)
FORGETFUL = Profile("memory lost", GUARDED, amnesia=0.4, cut=0.005, die=0.1)
PROMOTED = Profile("demoted and promoted", GUARDED, demote=0.4, cut=0.005, die=0.1)
POLICY = Profile("policy changed", ANY_SIZE, policy=0.05, busy=15.0, share=0.1, cut=0.005)
KEEPING = replace(
    NET,
    name="keeps data and clocks",
    stall=0.02,
    die=0.05,
    skew=0.2,
    rate=0.003,
    slow=0.03,
    crash=0.15,
)
WITHIN = replace(
    KEEPING, name="loses data", sizes=GUARDED, forget=0.5, skew=0.1, amnesia=0.05, demote=0.05
)  # clocks are within the guard
STEPS = Profile("clock steps", GUARDED, cut=0.02, step=0.3, wall_step=0.2)  # one clock at a time
LEADERS = Profile(
    "leaders",
    ((1, None), (1, None), (3, None)),
    stores=(1, 2, 3),
    share=0.2,
    elect=1.0,
    rate=0.0004,
    cut=0.01,
    reset=0.01,
    spike=0.02,
    hush=0.2,
    block=0.2,
    stall=0.01,
    freeze=0.2,
    die=0.1,
)
APART = replace(LEADERS, name="leaders apart", apart=60.0)
MIXED = replace(
    LEADERS,
    name="mixed majority",
    sizes=((3, None), (3, None), (4, None), (5, None)),
    stores=(1, 1, 2),
    repeat=0.02,
    skew=0.1,
    crash=0.15,
    forget=0.5,
)
EVERYTHING = replace(
    WITHIN,
    name="everything",
    skew=2.0,
    step=0.1,
    together=(1, 1, 2),
    wall_step=0.1,
    tolerated=frozenset({"overlap", "token", "votes", "heal", "ghost"}),
)

# Without requests that are executed twice, which no connection does: the second time, a request to take a lock may end
# its minimum hold earlier on that node. The exclusion of holders does not depend on that.
HOLDS = replace(KEEPING, name="minimum holds", holds=True, repeat=0.0, die=0.3, busy=3.0, share=0.3)

LEARNED = (FORGETFUL, PROMOTED, POLICY)
USUAL = (CALM, NET, PAUSE, SKEW, SLOW, CRASH, LOSS, FAILOVER, *LEARNED, KEEPING, WITHIN, STEPS, HOLDS)
OF_STORES = (LEADERS, APART, MIXED) if consensus.PRESENT else ()
PROFILES = {profile.name: profile for profile in (*USUAL, *OF_STORES, EVERYTHING)}
