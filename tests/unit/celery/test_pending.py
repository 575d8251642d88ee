"""The pending call: messages that end without a run, calls that find a revoked one, nodes that disagree."""

from functools import partial

import pytest

from django_redlock import QuorumUnavailableError
from django_redlock.core.names import Owner, encode
from django_redlock.core.protocol import Failure, Release
from django_redlock.engine.manager import fresh_secret
from django_redlock.nodes.base import LinkError
from django_redlock.singleton.driver import Nodes
from django_redlock.singleton.pending import begin, look_up
from django_redlock.singleton.slot import Record, Seen

from .slots import ticket_in

# Revoked before its time


# Nodes that disagree, because they were away at different times


# A key that is not a string


@pytest.mark.parametrize(
    ("number", "counts"), [("1", True), ("999999999", True), ("1000000000", False), ("²", False), ("-1", False)]
)
def test_number_of_a_record_has_nine_digits_at_most(number, counts):
    """What is no number of a message, or one that nobody reaches, describes no pending call."""
    value = encode(fresh_secret(), Owner(kind="task", label="shop.sync", ref="id", call=f"{number}.0123456789"))

    assert Seen(value, 5.0, 3).record == (Record("id", "0123456789", int(number), "shop.sync") if counts else None)


def test_error_about_a_record_says_what_each_node_has(make, worker, memory_nodes, monkeypatch):
    """A record that cannot be freed when its message begins, or stays split when another call comes, is an error."""
    task = make(on_duplicate="replace", on_unavailable={"enqueue": "raise"})
    call = task.delay(7, "first")
    nodes, ticket = Nodes("default", task.name), ticket_in(worker.headers[0])

    def execute(request, *mark, execute):
        if isinstance(request, Release):
            raise LinkError(Failure.REFUSED)
        return execute(request, *mark)

    for node in memory_nodes[1:]:
        monkeypatch.setattr(node, "execute", partial(execute, execute=node.execute))

    with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer") as caught:
        nodes.run(begin(nodes.run(look_up(ticket)), task.singleton_options))
    still = f"queued as task {call.id}"
    assert caught.value.nodes == {"a": "free", "b": still, "c": still}
    memory_nodes[2].down = True
    with pytest.raises(QuorumUnavailableError, match="2 of 3 nodes must answer") as caught:
        task.delay(7, "second")
    assert caught.value.nodes == {"a": "free", "b": still, "c": "refused"}
