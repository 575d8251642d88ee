"""
Every schedule of the token core for three nodes and two clients that try once, breadth first.

The client is the production :class:`~django_redlock.core.acquisition.Acquisition`, run again from its beginning for
every possible history of replies. The nodes are the production node in memory. Time is left out: a key may have expired
whenever a request finds it, a round may time out at any moment, any reply may be lost, and a request in flight may be
executed at any later time, also after its client gave up. This includes everything that a release could do, so none is
sent. Only the order and uniqueness of tokens are checked, which need no clock.

Some reductions keep the number of states small and lose no behaviour. A reply is heard when it is given or never,
because the client's next request may still take any time to arrive. Whether a key expired, or a third client has one
instead, is decided when a request finds it. A refusal counts as silence, because a round may time out anyway. States
that differ only by a renumbering of the nodes are one state.
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from django_redlock.core.acquisition import Acquisition, Pause
from django_redlock.core.attempt import HighestToken
from django_redlock.core.names import SECRET_SIZE, Owner, slug
from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import Instant, Kind, Raise, Reply, Request
from django_redlock.core.rules import Rules, Wanted
from django_redlock.core.votes import GRANTS

SLUG = slug("a")
TTL = 10.0
WANTED = Wanted(("a",), TTL, 0.0, Owner())
START = 1_000.0  # the time on all clocks, all the time
TIMEOUT = "timeout"
SECRETS = tuple(f"{client}".rjust(SECRET_SIZE, "x") for client in range(2))
STRANGER = "s" * SECRET_SIZE

History = tuple[Any, ...]


class Cell(NamedTuple):
    """One node: its holder, and the highest number it accepted."""

    holder: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """The requests of a client that has heard some replies, or its token at the end."""

    key: Hashable = None
    asks: dict[int, Any] = field(default_factory=dict)
    said: dict[int, Hashable] = field(default_factory=dict)
    highest: int = 0
    token: int | None = None
    done: bool = False


IDLE = Phase()


class Client(NamedTuple):
    """A client: the replies that it has heard, None before it begins, and what it does then."""

    history: History | None = None
    phase: Phase = IDLE
    after: int = 0  # the highest token that was complete when it began


class State(NamedTuple):
    """Everything at one moment. ``wires[client][node]`` is the request in flight."""

    cells: tuple[Cell, ...]
    clients: tuple[Client, ...]
    wires: tuple[tuple[Request | None, ...], ...]
    late: frozenset[tuple[int, Request]]  # requests whose client no longer waits for them
    tokens: tuple[int, ...]


Step = tuple[str, State, str]


class Search:
    """
    Search all states.

    Args:
        walls: The wall clocks of the two clients.
        numbers: The tokens that the three nodes have accepted before.
    """

    def __init__(self, walls: tuple[int, int] = (2, 2), numbers: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.states = 0
        self.won = 0
        self._walls = walls
        self._rules = Rules(3, ttl=TTL, max_ttl=TTL)
        self._first = State(
            tuple(Cell(number=number) for number in numbers), (Client(),) * 2, ((None,) * 3,) * 2, frozenset(), ()
        )
        self._play = cache(self._played)
        self._execute = cache(self._executed)

    def run(self) -> list[str]:
        """Return the shortest path to a violation, step by step; nothing if there is none."""
        parents: dict[Hashable, tuple[Hashable, str] | None] = {self._key(self._first): None}
        queue = deque([(self._key(self._first), self._first)])
        while queue:
            key, state = queue.popleft()
            for what, after, wrong in self._steps(state):
                if wrong:
                    return [*way(parents, key), what, wrong]
                known = self._key(after)
                if known not in parents:
                    parents[known] = (key, what)
                    queue.append((known, after))
        self.states = len(parents)
        return []

    def _steps(self, state: State) -> Iterator[Step]:
        """Yield the possible next steps: a description, the state afterwards, and its violation."""
        left = sum(not me.phase.done for me in state.clients)
        if not left or len(state.tokens) + left < 2:
            return  # no client can get a conflicting token any more
        for node, request in state.late:
            for _, cell in self._executions(state.cells[node], request):
                after = state._replace(cells=put(state.cells, node, cell), late=state.late - {(node, request)})
                yield f"node {node} executes a late request", after, ""
        for client, me in enumerate(state.clients):
            if me.history is None:
                begun = Client((), self._play(client, ()), max(state.tokens, default=0))
                after = self._ask(state._replace(clients=put(state.clients, client, begun)), client)
                yield f"client {client} begins", after, ""
            elif not me.phase.done:
                yield from self._steps_of(state, client)

    def _steps_of(self, state: State, client: int) -> Iterator[Step]:
        wires = state.wires[client]
        for node, request in enumerate(wires):
            if request is None:
                continue
            for reply, cell in self._executions(state.cells[node], request):
                after = state._replace(
                    cells=put(state.cells, node, cell), wires=put(state.wires, client, put(wires, node, None))
                )
                what = f"node {node} tells client {client} {reply.kind.value} ({reply.fence})"
                yield what, *self._hears(after, client, (node, reply))
                yield f"{what}, which is lost", after, ""
        yield f"client {client} waits no longer", *self._hears(state, client, TIMEOUT)

    def _executions(self, cell: Cell, request: Request) -> set[tuple[Reply, Cell]]:
        """Return the possible results: the key may have expired, and another client have come."""
        return {self._execute(cell._replace(holder=holder), request) for holder in (cell.holder, "", STRANGER)}

    def _executed(self, cell: Cell, request: Request) -> tuple[Reply, Cell]:
        store = NodeState(lambda: START)
        if cell.holder:
            store.put(SLUG, cell.holder, TTL)
        if cell.number:
            store.records.write_fence((SLUG,), cell.number, None, START)
        reply = store.execute(request)
        after = Cell((store.records.holder(SLUG, START) or "")[:SECRET_SIZE], store.records.fence(SLUG, START))
        return reply._replace(time=0, left=0.0), after

    def _played(self, client: int, history: History) -> Phase:
        """Run the acquisition of a client from its beginning."""
        seen = HighestToken()
        at = Instant(START, self._walls[client])
        steps = Acquisition(WANTED, self._rules, seen, lambda: SECRETS[client], lambda: 0.5).steps(at)
        step: Any = next(steps)
        rounds = 1
        try:
            for event in history:
                if event == TIMEOUT:
                    for node in step.requests.keys() - step.replies.keys():
                        step.receive(node, Reply(Kind.UNKNOWN))
                else:
                    step.receive(*event)
                if step.closed:
                    rounds += 1
                    step = steps.send(at)
                    if isinstance(step, Pause) or step.cleanup:  # the attempt failed
                        return Phase(done=True)
        except StopIteration as stop:
            return Phase(token=getattr(stop.value, "fencing_token", None), done=True)
        said = {node: reply.kind for node, reply in step.replies.items() if reply.kind in GRANTS}
        return Phase((rounds, frozenset(step.requests.values())), step.requests, said, seen.of([SLUG]))

    def _ask(self, state: State, client: int) -> State:
        """Send the requests of a client's present round; requests that it still waited for become late."""
        late = state.late | {(node, old) for node, old in enumerate(state.wires[client]) if old is not None}
        asks = state.clients[client].phase.asks
        wires = tuple(asks.get(node) for node in range(3))
        return state._replace(wires=put(state.wires, client, wires), late=late)

    def _hears(self, state: State, client: int, event: Any) -> tuple[State, str]:
        """Return the state after a step of a client, and its violation."""
        me = state.clients[client]
        history = (*(me.history or ()), event)
        phase = self._play(client, history)
        state = state._replace(clients=put(state.clients, client, Client(history, phase, me.after)))
        if not phase.done:
            return (state if phase.asks == me.phase.asks else self._ask(state, client)), ""
        wrong = ""
        if phase.token is not None:
            self.won += 1
            if phase.token in state.tokens or phase.token <= me.after:
                wrong = f"token {phase.token} after {me.after} and {state.tokens}"
            state = state._replace(tokens=tuple(sorted((*state.tokens, phase.token))))
        return self._ask(state, client), wrong

    def _key(self, state: State) -> Hashable:
        """Return a value that is equal for states with equal futures."""
        clients = tuple(
            me.phase.done or (me.history is None, me.after, me.phase.highest, me.phase.key) for me in state.clients
        )
        columns = []
        for node, cell in enumerate(state.cells):
            late = frozenset(request for sent, request in state.late if sent == node)
            asked = tuple(wires[node] for wires in state.wires)
            said = tuple(me.phase.said.get(node) for me in state.clients)
            # A key makes a difference only to its holder, and only if the holder may still come back to it.
            back = {request.secret for request in (*asked, *late) if isinstance(request, Raise)}
            back |= {SECRETS[client] for client in range(2) if said[client] is not None}
            columns.append((cell.holder if cell.holder in back else "", cell.number, asked, said, late))
        return clients, state.tokens, tuple(sorted(columns, key=hash))


def way(parents: dict[Hashable, tuple[Hashable, str] | None], key: Hashable) -> list[str]:
    steps: list[str] = []
    while (step := parents[key]) is not None:
        key, what = step
        steps.append(what)
    return steps[::-1]


def put(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    """Return *items* with one of them replaced."""
    return (*items[:index], item, *items[index + 1 :])
