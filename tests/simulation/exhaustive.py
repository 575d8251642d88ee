"""
Every schedule of the token core for a few nodes and two clients, breadth first.

The client is the production :class:`~django_redlock.core.acquisition.Acquisition`, run again from its beginning for
every possible history of replies. The nodes are the production node in memory. Time is left out: a key may have expired
whenever a request finds it, a round may time out at any moment, any reply may be lost, and a request in flight may be
executed at any later time, also after its client gave up. This includes everything that a release could do, so none is
sent. Only the order and uniqueness of tokens are checked, which need no clock.

Some reductions keep the number of states small and lose no behaviour. A reply is heard when it is given or never,
because the client's next request may still take any time to arrive, and its next attempt may begin any time later.
Whether a key expired, or a third client has one instead, is decided when a request finds it. A refusal counts as
silence, because a round may time out anyway. States that differ only by a renumbering of the nodes are one state.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from django_redlock.core.acquisition import Acquisition, Pause
from django_redlock.core.attempt import GRANTS, HighestToken
from django_redlock.core.names import SECRET_SIZE, Owner, slug
from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import Instant, Kind, Raise, Reply, Request
from django_redlock.core.rules import Rules, Wanted
from tests.lab.tables import heads, row

NAME = "a"
SLUG = slug(NAME)
TTL = 10.0
START = 1_000.0  # the time on all clocks, all the time
TIMEOUT = "timeout"
STRANGER = "s" * SECRET_SIZE

History = tuple[Any, ...]


class Cell(NamedTuple):
    """One node: its holder, and the highest number it accepted (or its counter)."""

    holder: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    key: Hashable = None
    asks: dict[int, Any] = field(default_factory=dict)
    said: dict[int, Hashable] = field(default_factory=dict)
    highest: int = 0
    token: int | None = None
    done: bool = False


IDLE = Phase()


def secret(client: int, attempt: int) -> str:
    return f"{client}{attempt}".rjust(SECRET_SIZE, "x")


class Production:
    """The protocol of this package. Requests and replies are numbers in a list, so that states are quick to compare."""

    def __init__(self, nodes: int = 3, quorum: int | None = None, walls: tuple[int, ...] = (2, 2)) -> None:
        self.nodes = nodes
        self.rules = Rules(nodes, quorum, ttl=TTL, max_ttl=TTL)
        self.walls = walls
        self.phase = cache(self._phase)
        self.execute = cache(self._execute)
        self._messages: list[Request | Reply] = []
        self._numbers: dict[Request | Reply, int] = {}

    def secret_of(self, request: Any) -> str:
        message = self._messages[request]
        return message.secret if isinstance(message, Raise) else ""

    def show(self, reply: Any) -> str:
        said = self._messages[reply]
        assert isinstance(said, Reply)
        return f"{said.kind.value} ({said.fence})"

    def _number(self, message: Request | Reply) -> int:
        if message not in self._numbers:
            self._numbers[message] = len(self._messages)
            self._messages.append(message)
        return self._numbers[message]

    def _phase(self, client: int, attempt: int, highest: int, history: History) -> Phase:
        seen = HighestToken()
        seen.lift([SLUG], highest)
        wanted = Wanted((NAME,), TTL, 0.0, Owner())
        acquisition = Acquisition(wanted, self.rules, seen, lambda: secret(client, attempt), lambda: 0.5)
        at = Instant(START, self.walls[client])
        steps = acquisition.steps(at)
        step: Any = next(steps)
        rounds = 1
        try:
            for event in history:
                if event == TIMEOUT:
                    for node in step.requests.keys() - step.replies.keys():
                        step.receive(node, Reply(Kind.UNKNOWN))
                else:
                    step.receive(event[0], self._messages[event[1]])
                if step.closed:
                    rounds += 1
                    step = steps.send(at)
                    if isinstance(step, Pause) or step.cleanup:  # this attempt failed
                        return Phase(highest=seen.of([SLUG]), done=True)
        except StopIteration as stop:
            return Phase(highest=seen.of([SLUG]), token=getattr(stop.value, "fencing_token", None), done=True)
        asks = {node: self._number(request) for node, request in step.requests.items()}
        said = {node: reply.kind.value for node, reply in step.replies.items() if reply.kind in GRANTS}
        return Phase((rounds, min(asks.values())), asks, said, seen.of([SLUG]))

    def _execute(self, cell: Cell, request: int) -> tuple[int, Cell]:
        store = NodeState(lambda: START)
        if cell.holder:
            store.put(SLUG, cell.holder, TTL)
        if cell.number:
            store.records.write_fence((SLUG,), cell.number, None, START)
        reply = store.execute(self._messages[request])  # type: ignore[arg-type]
        after = Cell((store.records.holder(SLUG, START) or "")[:SECRET_SIZE], store.records.fence(SLUG, START))
        return self._number(reply._replace(time=0, left=0.0)), after


class Client(NamedTuple):
    """A client: its attempt, the highest number seen before it, and the replies heard in it; idle between attempts."""

    attempt: int
    highest: int
    history: History = ()
    after: int = 0  # the highest token that was complete when the attempt began
    idle: bool = True


class State(NamedTuple):
    """Everything at one moment. ``wires[client][node]`` is the request in flight."""

    cells: tuple[Cell, ...]
    clients: tuple[Client, ...]
    wires: tuple[tuple[Any, ...], ...]
    late: frozenset[tuple[int, Any]]  # requests whose client no longer waits for them
    tokens: tuple[int, ...]


Step = tuple[str, State, str]


class Search:
    """Search all states of a protocol."""

    def __init__(
        self,
        protocol: Production,
        attempts: tuple[int, ...] = (1, 1),
        numbers: tuple[int, ...] | None = None,
        limit: int = 300_000,
    ) -> None:
        self.protocol = protocol
        self.attempts = attempts
        self.numbers = numbers or (0,) * protocol.nodes
        self.states = 0
        self.won = 0
        self._limit = limit

    def run(self) -> list[str]:
        """Return the shortest path to a violation, step by step; nothing if there is none."""
        nodes, clients = self.protocol.nodes, len(self.attempts)
        cells = tuple(Cell(number=number) for number in self.numbers)
        first = State(cells, (Client(0, 0),) * clients, ((None,) * nodes,) * clients, frozenset(), ())
        parents: dict[Hashable, tuple[Hashable, str] | None] = {self._key(first): None}
        queue = deque([(self._key(first), first)])
        while queue:
            key, state = queue.popleft()
            for what, after, wrong in self._steps(state):
                if wrong:
                    return [*way(parents, key), what, wrong]
                known = self._key(after)
                if known not in parents:
                    parents[known] = (key, what)
                    queue.append((known, after))
            if len(parents) > self._limit:
                raise OverflowError(f"more than {self._limit} states")
        self.states = len(parents)
        return []

    def _steps(self, state: State) -> Iterator[Step]:
        """Yield the possible next steps: a description, the state afterwards, and its violation."""
        left = [allowed - me.attempt for allowed, me in zip(self.attempts, state.clients, strict=True)]
        if not any(left) or len(state.tokens) + sum(left) < 2:
            return  # no client can get a conflicting token any more
        for node, request in state.late:
            for _, cell in self._executions(state.cells[node], request):
                after = state._replace(cells=put(state.cells, node, cell), late=state.late - {(node, request)})
                yield f"node {node} executes a late request", after, ""
        for client, me in enumerate(state.clients):
            if not me.idle:
                yield from self._steps_of(state, client)
            elif me.attempt < self.attempts[client]:
                yield f"client {client} begins", self._begins(state, client), ""

    def _steps_of(self, state: State, client: int) -> Iterator[Step]:
        wires = state.wires[client]
        for node, request in enumerate(wires):
            if request is None:
                continue
            for reply, cell in self._executions(state.cells[node], request):
                after = state._replace(
                    cells=put(state.cells, node, cell), wires=put(state.wires, client, put(wires, node, None))
                )
                what = f"node {node} tells client {client} {self.protocol.show(reply)}"
                yield what, *self._hears(after, client, (node, reply))
                yield f"{what}, which is lost", after, ""
        yield f"client {client} waits no longer", *self._hears(state, client, TIMEOUT)

    def _executions(self, cell: Cell, request: Any) -> set[tuple[Any, Cell]]:
        """
        Return the possible results of a request: the key that it finds may have expired, and another client have come.
        """
        return {self.protocol.execute(cell._replace(holder=holder), request) for holder in (cell.holder, "", STRANGER)}

    def _begins(self, state: State, client: int) -> State:
        me = state.clients[client]._replace(idle=False, after=max(state.tokens, default=0))
        return self._ask(state._replace(clients=put(state.clients, client, me)), client)

    def _phase(self, state: State, client: int) -> Phase:
        me = state.clients[client]
        return IDLE if me.idle else self.protocol.phase(client, me.attempt, me.highest, me.history)

    def _ask(self, state: State, client: int) -> State:
        """Send the requests of a client's present round; requests that it still waited for become late."""
        late = state.late | {(node, old) for node, old in enumerate(state.wires[client]) if old is not None}
        asks = self._phase(state, client).asks
        wires = tuple(asks.get(node) for node in range(self.protocol.nodes))
        return state._replace(wires=put(state.wires, client, wires), late=late)

    def _hears(self, state: State, client: int, event: Any) -> tuple[State, str]:
        """Return the state after a step of a client, and its violation."""
        asked = self._phase(state, client).asks
        me = state.clients[client]
        me = me._replace(history=(*me.history, event))
        state = state._replace(clients=put(state.clients, client, me))
        phase = self._phase(state, client)
        if not phase.done:
            return (state if phase.asks == asked else self._ask(state, client)), ""
        wrong = ""
        if phase.token is not None:
            self.won += 1
            wrong = objection(state.tokens, me, phase.token)
            state = state._replace(tokens=tuple(sorted((*state.tokens, phase.token))))
        idle = Client(me.attempt + 1, phase.highest)
        return self._ask(state._replace(clients=put(state.clients, client, idle)), client), wrong

    def _key(self, state: State) -> Hashable:
        """Return a value that is equal for states with equal futures."""
        phases = [self._phase(state, client) for client in range(len(state.clients))]
        clients = tuple(
            me.attempt == allowed
            or (me.attempt, me.idle, me.after, me.highest if me.idle else phase.highest, phase.key)
            for me, phase, allowed in zip(state.clients, phases, self.attempts, strict=True)
        )
        columns = []
        for node, cell in enumerate(state.cells):
            late = frozenset(request for sent, request in state.late if sent == node)
            asked = [wires[node] for wires in state.wires]
            said = [phase.said.get(node) for phase in phases]
            # A key makes a difference only to its holder, and only if the holder may still come back to it.
            back = {self.protocol.secret_of(request) for request in (*asked, *late) if request is not None}
            back |= {secret(client, me.attempt) for client, me in enumerate(state.clients) if said[client] is not None}
            holder = cell.holder if cell.holder in back else ""
            columns.append((holder, cell.number, tuple(asked), tuple(said), late))
        return clients, state.tokens, tuple(sorted(columns, key=hash))


def objection(tokens: tuple[int, ...], client: Client, token: int) -> str:
    if token in tokens:
        return f"token {token} was given before"
    return f"token {token} after {client.after}" if token <= client.after else ""


def way(parents: dict[Hashable, tuple[Hashable, str] | None], key: Hashable) -> list[str]:
    steps: list[str] = []
    while (step := parents[key]) is not None:
        key, what = step
        steps.append(what)
    return steps[::-1]


def put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    """Return *items* with one of them replaced."""
    return (*items[:index], item, *items[index + 1 :])


CONFIGURATIONS = {
    "both propose the same number": ((2, 2), (0, 0, 0)),
    "failed attempts left different numbers, one of them above a proposal": ((3, 2), (2, 1, 0)),
    "only a minority knows of a number that is above both proposals": ((2, 2), (4, 1, 1)),
}
"""Walls of the two clients, and the numbers that the three nodes have accepted before."""


def table() -> str:
    lines = [heads(("three nodes, two clients", "states", "acquisitions", "violations"), numbers=True)]
    for name, (walls, numbers) in CONFIGURATIONS.items():
        search = Search(Production(walls=walls), numbers=numbers)
        violations = int(bool(search.run()))
        lines.append(row((name, f"{search.states:,}", f"{search.won:,}", violations)))
    return "\n".join(lines)
