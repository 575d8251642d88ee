"""Callers in several processes that call at the same moment, some nodes being silent."""

import json
import subprocess
import sys
from typing import Any

import pytest

from django_redlock.testing import Servers

PATIENCE = 550.0  # seconds

Situation = tuple[int, int, int, int]


def rounds_of(what: str, callers: int, rounds: int, nodes: list[str], broker: str = "") -> list[list[Any]]:
    """Let callers call at the same moment, again and again; return their answers in each round."""
    order = {"what": what, "callers": callers, "rounds": rounds, "nodes": nodes, "broker": broker}
    command = [sys.executable, "-m", "tests.server.callers", json.dumps(order)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return json.loads(ended.stdout)  # type: ignore[no-any-return]


def freeze(nodes: Servers, silent: int, size: int) -> list[str]:
    """Make some of the nodes silent; return the URLs of all."""
    for number in range(silent):
        nodes[size - 1 - number].freeze()
    return nodes.urls[:size]


FEW = [(2, 3, 1, 20), (8, 3, 1, 5), (3, 5, 2, 6), (4, 3, 0, 15)]
MANY = [(2, 3, 1, 300), (4, 3, 1, 150), (8, 3, 1, 100), (2, 5, 2, 150), (8, 5, 2, 100), (5, 5, 1, 100), (8, 3, 0, 100)]


def situations(few: list[Situation], many: list[Situation]) -> pytest.MarkDecorator:
    """Test each of a few situations, and others for long: how many callers, nodes, silent nodes and rounds."""
    lasting = [pytest.param(*situation, marks=pytest.mark.endurance) for situation in many]
    return pytest.mark.parametrize(("callers", "size", "silent", "rounds"), [*few, *lasting])


@situations(FEW, MANY)
def test_one_of_several_callers_gets_a_free_lock(
    nodes: Servers, callers: int, size: int, silent: int, rounds: int
) -> None:
    """With ``wait=0``, a job that every server starts at the same moment runs on one of them."""
    answers = rounds_of("lock", callers, rounds, freeze(nodes, silent, size))

    assert [said.count("won") for said in answers] == [1] * rounds


@situations([(8, 3, 1, 5), (3, 5, 2, 6)], [(2, 3, 1, 40), (8, 3, 1, 8), (3, 5, 2, 15), (4, 3, 0, 15)])
def test_one_of_several_callers_sends_a_message(
    nodes: Servers, callers: int, size: int, silent: int, rounds: int
) -> None:
    """The others are answered with the id of a call whose message was sent."""
    urls = freeze(nodes, silent, size)

    answers = rounds_of("publish", callers, rounds, urls, broker=nodes.urls[0])

    sent = [{task_id for task_id, accepted in said if accepted} for said in answers]
    told = [{task_id for task_id, accepted in said if not accepted} for said in answers]
    assert all(sent)
    assert [ids - known for ids, known in zip(told, sent, strict=True) if ids - known] == []
