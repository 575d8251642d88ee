"""
The benchmark runs and reports what it measured. The figures are not tested, because times depend on the machine.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from django_redlock.testing import Servers
from tests.lab.benchmarks import against, distance, floors, free, kinds, pages, plots
from tests.lab.benchmarks.bench import Bench
from tests.lab.benchmarks.measure import AsyncContender, Contender, ainterleave, interleave, per_second
from tests.lab.benchmarks.relays import relays
from tests.lab.benchmarks.report import Figure, Section, Target, dump, lines, load
from tests.lab.benchmarks.waiting import Turn, jain, overtaking
from tests.services import ServiceMissingError


@pytest.fixture
def section() -> Section:
    """A lock that is faster than its floor, and slower than its target."""
    section = Section("free", "a <free> lock", [Figure("floor", 100.0, "µs", {"p95": 120.0})])
    section.figures.append(Figure("django_redlock", 150.0, "µs"))
    section.compare("against the floor", "floor", 1.2)
    section.left_out.append("pottery: it is not installed")
    return section


def test_contenders_take_turns():
    """
    Contenders are called in turn, so that other load on the machine affects all of them alike.
    """
    called: list[str] = []
    contenders = [Contender(name, lambda name=name: called.append(name)) for name in "AB"]

    times = interleave(contenders, 2, batch=2, warm_up=1)

    assert "".join(called) == "AB" + "AABB" + "AABB"
    assert [len(times[name].walls) for name in "AB"] == [4, 4]


async def test_contenders_take_turns_in_an_event_loop():
    """
    The same with asyncio; a very slow contender skips most rounds.
    """
    called: list[str] = []

    async def once(name: str) -> None:
        called.append(name)

    contenders = [AsyncContender("A", lambda: once("A")), AsyncContender("B", lambda: once("B"), share=0.5)]
    await ainterleave(contenders, 4, batch=1)

    assert "".join(called[10:]) == "AB" + "A" + "AB" + "A"


def test_floor_sends_what_the_library_sends(nodes: Servers):
    """
    Real servers grant the floor's requests, each time anew, and no key is left behind.
    """
    with floors.blocking("floor", nodes.urls, floors.same(nodes.urls)) as contender:
        contender.once()
        contender.once()

    with nodes[0].client() as client:
        assert not list(client.scan_iter("*:h"))
        assert list(client.scan_iter("floor*:f"))


def test_floor_that_only_sends_its_release_reads_each_reply_once(nodes: Servers):
    """
    The reply to a release is read together with the reply to the next acquire, and the lock is free in between.
    """
    with floors.blocking(floors.SENT, nodes.urls, floors.same(nodes.urls), wait=False) as contender:
        for _ in range(5):
            contender.once()

    with nodes[0].client() as client:
        assert not list(client.scan_iter("*:h"))


async def test_asyncio_floor_completes(nodes: Servers):
    """
    The floor of an event loop counts the replies of all nodes, for one task and for many at once.
    """
    async with floors.without_blocking("floor", nodes.urls, floors.plain("floor")) as (contender,):
        await contender.once()
        await contender.once()
    pair = await asyncio.to_thread(floors.same, nodes.urls)
    for tasks in (1, 50):
        async with floors.without_blocking("floor", nodes.urls, pair, tasks) as contenders:
            assert len(contenders) == tasks
            assert await per_second([each.once for each in contenders], 5) > 0

    with nodes[0].client() as client:
        assert not list(client.scan_iter("*:h"))
        assert list(client.scan_iter("*{00049}:f"))


def test_relay_holds_every_byte_back(nodes: Servers):
    """
    A round trip through a relay takes at least the time asked for, and the bytes arrive.
    """
    with relays(nodes.urls[:1], 0.05) as urls, free.ping("far", urls[0]) as contender:
        times = interleave([contender], 1, batch=3, warm_up=0)

    assert min(times["far"].walls) >= 0.05


def test_distances_are_measured_one_after_the_other(nodes: Servers):
    """
    A section has the same contenders at every distance, each time through relays of its own, and names what is missing.
    """
    seen: list[list[str]] = []

    def measure(far: Bench) -> Section:
        seen.append(far.urls(2))
        return Section("free", "a free lock", [Figure("django_redlock", 1.0, "µs")], left_out=["pottery"])

    section = distance._everywhere(Bench(nodes, True, 1.0), "free", measure)

    assert section.key == "distance-free"
    assert [figure.name for figure in section.figures] == [
        f"django_redlock, {label}" for label in ("no delay", "0.5 ms", "2 ms")
    ]
    assert section.left_out == ["pottery"]
    assert len({url for urls in seen for url in urls}) == 6
    assert not {url for urls in seen for url in urls} & set(nodes.urls)


def test_kinds_of_nodes_take_turns_and_missing_ones_are_named(
    nodes: Servers, settings: Any, monkeypatch: pytest.MonkeyPatch
):
    """
    Each kind that can be started is measured for one caller and for many, and a kind without its server is left out
    with what to install.
    """

    def missing(bench: Bench) -> Any:
        raise ServiceMissingError("apt-get install zookeeper")

    settings.REDLOCK = {}
    found = [("memory", kinds.in_memory), ("two", partial(kinds.redis, 2)), ("ZooKeeper", missing)]
    monkeypatch.setattr(kinds, "kinds", lambda: found)
    monkeypatch.setattr(kinds, "THREADS", 2)

    latency, throughput = kinds.run(Bench(nodes, True, 1.0))

    assert [figure.name for figure in latency.figures] == ["memory", "two"]
    assert [figure.unit for figure in throughput.figures] == ["/s", "/s"]
    assert latency.left_out == ["ZooKeeper: apt-get install zookeeper"]


@pytest.mark.parametrize("case", ["free-n1", "publishing-n1", "publishing-replace-n5", "duplicates-n5"])
def test_another_version_is_measured_in_a_process_of_its_own(nodes: Servers, tmp_path: Path, case: str):
    """
    The child refuses to measure a version that it was not asked for.
    """
    cpu, rate = against._measure(case, against.ROOT, list(nodes.urls))

    assert min(cpu, rate) > 0
    with pytest.raises(AssertionError, match="another version"):
        against._child(str(tmp_path), "free-n1", nodes.urls[:1])


def test_overtaking_is_counted():
    """
    A process that is served before an earlier queued process has gone past it.
    """
    turns = [Turn(0.0, 0.1, 3.0, 3.1), Turn(1.0, 1.1, 2.0, 2.1), Turn(1.001, 1.1, 1.5, 1.6)]

    assert overtaking(turns) == (2 / 3, 1)
    assert jain([turns, turns]) == 1.0
    assert jain([turns, []]) == 0.5


def test_targets_show_what_was_missed(section):
    """
    The table shows the target, the result, and what could not be measured.
    """
    printed = "\n".join(lines(section))

    assert "short against the floor" in printed
    assert "asked ≤ 1.20 ×" in printed
    assert "left out: pottery: it is not installed" in printed
    assert Target("", 5.0, 3.5, least=True).kept


def test_targets_show_the_floor():
    """
    A target that compares ours with another library says what raw sockets reach in the same comparison.
    """
    figures = [Figure("django_redlock", 300.0, "µs"), Figure("other", 200.0, "µs"), Figure("raw", 100.0, "µs")]
    section = Section("free", "a free lock", figures)
    section.compare("against other", "other", 1.2, floor="raw")
    section.compare("against other", "other", 3, faster=True, floor="raw")
    section.compare("against other", "other", 1.2, floor="not measured")

    assert [target.floor for target in section.targets] == [0.5, 2.0, None]
    assert "asked ≤ 1.20 ×, floor 0.50" in "\n".join(lines(section))
    assert "| against other | ≤ 1.20 × | 0.50 | 1.50 × | short |" in "\n".join(pages._targets([section]))


def test_figures_survive_their_file(section, tmp_path):
    """
    The figures that are read back are the figures that were measured.
    """
    dump([section], "bench", tmp_path / "run.json")
    sections, run = load(tmp_path / "run.json")

    assert sections == [section]
    assert run["command"] == "bench"
    assert run["environment"]["redis"]


def test_plot_escapes_and_marks_ours(section):
    """
    A chart is well-formed whatever the names are, and highlights our bar.
    """
    drawn = plots.draw(section)

    assert "a &lt;free&gt; lock" in drawn
    assert drawn.count('class="ours"') == 1


def test_page_takes_the_figures(section):
    """
    The tables of the page are replaced, and nothing else changes.
    """
    page = "before\n<!-- figures: free -->\nold\n<!-- end -->\nafter\n<!-- figures: gone -->\n<!-- end -->\n"

    rendered = pages.render(page, [section], {})

    assert rendered.startswith("before\n")
    assert "\nafter\n" in rendered
    assert "old" not in rendered
    assert "| django_redlock | 150 µs | 1.50 |" in rendered
    assert "(not measured in this run)" in rendered
    assert pages.render(rendered, [section], {}) == rendered


def test_pages_show_the_committed_run():
    """
    The figures in the documentation are those of the JSON beside it, and every section is on one page.
    """
    if not pages.STORED.exists():
        pytest.skip("needs the stored run: tox run -e bench -- --json docs/trust/benchmarks.json --write-docs")
    texts = [page.read_text("utf-8") for page in pages.PAGES]
    sections, run = load(pages.STORED)

    assert [pages.render(text, sections, run) for text in texts] == texts
    assert [each.key for each in sections if "".join(texts).count(f"<!-- figures: {each.key} -->") != 1] == []
