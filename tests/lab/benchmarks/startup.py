"""
The cost of importing the package, and the first lock of a process.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator

from .bench import Bench
from .report import Figure, Section, Target

BASE = "import django.conf, django.core.exceptions, django.core.signals, redis, asyncio"
IMPORT = """
import json, sys, time
{before}
start = time.perf_counter()
from django_redlock import lock
took = time.perf_counter() - start
print(json.dumps([took, [name for name in ("celery", "kombu", "redis", "asyncio") if name in sys.modules]]))
"""
SETTINGS = """
import json, sys
import django.conf
print(json.dumps([0.0, [name for name in ("asyncio",) if name in sys.modules]]))
"""
FIRST = """
import json, sys, time
from tests.lab.benchmarks.bench import ours, set_up
set_up()
manager = ours("first", sys.argv[1:])
import redis
start = time.perf_counter()
lease = manager.lock("first", wait=0).acquire()
print(json.dumps([time.perf_counter() - start, []]))
lease.release()
"""
RAW = """
import json, socket, sys, time
from urllib.parse import urlsplit
from django_redlock.core.protocol import Acquire
from django_redlock.nodes.redis.wire import Encoder
encoder, secret = Encoder("raw-first:"), "0123456789abcdef" * 2
first = Acquire(("{first}",), secret, secret + "{}", 30.0, time.time_ns() // 1000, None, 30.0)
request = encoder.greeting + encoder.pack(first, {}, in_full=True)
addresses = [(urlsplit(url).hostname, urlsplit(url).port) for url in sys.argv[1:]]
start = time.perf_counter()
sockets = [socket.create_connection(address) for address in addresses]
for sock in sockets:
    sock.send(request)
for sock in sockets:
    reply = sock.recv(65536)
    while b"ACCEPTED" not in reply:
        reply += sock.recv(65536)
took = time.perf_counter() - start
for sock in sockets:
    sock.send(b"DEL raw-first:{first}:h\\r\\n")
    sock.recv(100)
print(json.dumps([took, []]))
"""


def run(bench: Bench) -> Iterator[Section]:
    """Measure both in fresh processes."""
    section = Section("startup", "importing the package, and the first lock of a process, N = 5")
    times = bench.rounds(30, 8)
    after, _ = _median(IMPORT.format(before=BASE), times)
    alone, loaded = _median(IMPORT.format(before=""), times)
    first, _ = _median(FIRST, times, *bench.urls(5))
    raw, _ = _median(RAW, times, *bench.urls(5))
    _, by_django = _child(SETTINGS)  # every project that can read its settings has these
    section.figures = [
        Figure("import, after Django and redis-py", after * 1e3, "ms"),
        Figure("import, with all that it imports", alone * 1e3, "ms"),
        Figure("first lock, with its connections", first * 1e3, "ms"),
        Figure("raw sockets, the same requests", raw * 1e3, "ms"),
    ]
    section.targets = [
        Target("import, after Django and redis-py", after * 1e3, 30, "ms"),
        Target("first lock, with its connections", first * 1e3, 3.5, "ms", floor=raw * 1e3),
        Target("Celery imported by it", len({"celery", "kombu"} & set(loaded)), 0, ""),
        Target(
            "asyncio imported by it, and not by django.conf", len({"asyncio"} & set(loaded) - set(by_django)), 0, ""
        ),
    ]
    yield section


def _median(code: str, times: int, *args: str) -> tuple[float, list[str]]:
    results = [_child(code, *args) for _ in range(times + 1)][1:]
    return statistics.median(took for took, _ in results), results[-1][1]


def _child(code: str, *args: str) -> tuple[float, list[str]]:
    child = subprocess.run([sys.executable, "-c", code, *args], check=True, capture_output=True, text=True)
    took, loaded = json.loads(child.stdout)
    return took, loaded
