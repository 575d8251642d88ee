"""Bursts of requests to a web server with more to do than its processors can: no request is refused without need."""

import asyncio
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("gunicorn", reason="needs gunicorn: pip install gunicorn")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install uvicorn")

from django_redlock.testing import Servers

from .conftest import PATIENCE, Live
from .test_requests import GUNICORN, UVICORN, serving

BURST = 400
THREADED = [*GUNICORN[:-3], "--threads=100", *GUNICORN[-2:]]
LOOPS = [*UVICORN, "--workers=2"]


async def statuses(port: int, paths: list[str]) -> "Counter[str]":
    """Send requests at the same moment, each over a connection of its own; return the first lines of the answers."""

    async def post(path: str) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            return (await reader.read()).decode().partition("\r\n")[0]

    async with asyncio.timeout(2 * PATIENCE):
        return Counter(await asyncio.gather(*map(post, paths)))


SITES = {
    "gunicorn": (THREADED, "/busy/{}/"),
    "uvicorn": (LOOPS, "/busy/{}/"),
    "uvicorn, asynchronous": (LOOPS, "/abusy/{}/"),
}


@pytest.mark.parametrize(
    ("site", "size", "bursts"),
    [
        ("gunicorn", 1, 1),
        ("uvicorn, asynchronous", 3, 1),
        *(pytest.param(site, size, 5, marks=pytest.mark.endurance) for site in SITES for size in (1, 3)),
    ],
)
def test_no_request_is_refused_while_the_nodes_answer(
    live: Live, nodes: Servers, site: str, size: int, bursts: int, tmp_path: Path
):
    """A process that gets too little processor time is late, and blames neither its requests nor its nodes for it."""
    live.env |= {"LIVE_NODES": ",".join(nodes.urls[:size]), "LIVE_DEFAULTS": "1", "LIVE_TTL": "30"}
    said, seen, (command, path) = tmp_path / "stderr", Counter[str](), SITES[site]

    with said.open("w") as stderr, serving(live, command, stderr=stderr) as port:  # nobody would read a pipe
        for burst in range(bursts):
            paths = [path.format(burst * BURST + number) for number in range(BURST)]
            seen += asyncio.run(statuses(port, paths))

    assert seen == {"HTTP/1.1 200 OK": bursts * BURST}, said.read_text()
