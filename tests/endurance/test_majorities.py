"""All nodes of a majority of several kinds give the same replies."""

import time
from contextlib import closing
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import Request, believable
from django_redlock.core.round import survey_round
from django_redlock.testing import Servers
from tests.managers import connect, real_manager
from tests.server.locking.test_differential import requests
from tests.service.locking.test_replicated import comparable


@pytest.fixture(params=["cluster", "etcd", "zookeeper"])
def urls(request: pytest.FixtureRequest, nodes: Servers) -> list[str]:
    """Two Redis servers and a replicated store."""
    if request.param == "cluster":
        return [*nodes.urls[:2], request.getfixturevalue("cluster_urls")[0]]
    return [*nodes.urls[:2], request.getfixturevalue(request.param).url]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=st.lists(requests, min_size=1, max_size=25))
def test_nodes_of_a_mixed_majority_answer_alike(urls: list[str], sequence: list[Request]):
    """Whatever rounds come in whatever order, each node answers as the node in memory does."""
    store = NodeState(time.time)
    with closing(real_manager(urls, f"{uuid4()}:", node_timeout=10.0, ttl=60.0)) as manager:
        connect(manager)
        for request in sequence:
            expected = comparable(believable(store.execute(request)))
            round = survey_round(manager.rules, {"count": 1})
            round.requests = dict.fromkeys(range(len(urls)), request)
            manager.ask(round)
            assert {node: comparable(reply) for node, reply in round.replies.items()} == dict.fromkeys(
                range(len(urls)), expected
            ), request
