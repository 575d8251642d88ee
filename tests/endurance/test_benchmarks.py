"""The benchmark runs and reports what it measured. The figures are not tested, because times depend on the machine."""

import asyncio
from pathlib import Path

import pytest

from django_redlock.testing import Servers
from tests.lab.benchmarks import against, contenders
from tests.lab.benchmarks.measure import Contender, interleave, tasks_per_second, threads_per_second
from tests.lab.benchmarks.report import OURS, THEIRS, Figure, Section, lines, render
from tests.lab.benchmarks.waiting import Turn, jain, overtaking


@pytest.fixture
def section() -> Section:
    """A lock that is slower than it should be."""
    section = Section("free", "a free lock", [Figure(OURS, 150.0, "µs", {"CPU": 90.0})])
    section.figures.append(Figure(THEIRS, 100.0, "µs", {"CPU": 60.0}))
    section.compare(THEIRS, 1.2)
    section.compare(THEIRS, 2.0, cpu=True)
    section.compare("not measured", 1.2)
    section.left_out.append("pottery: it is not installed")
    return section


def test_contenders_take_turns():
    """Contenders are called in turn, blocking ones and those of an event loop; a very slow one skips most rounds."""
    called: list[str] = []
    loop = asyncio.new_event_loop()

    async def later() -> None:
        called.append("B")

    running = [
        Contender("A", lambda: called.append("A")),
        Contender("B", later, loop=loop),
        Contender("C", lambda: called.append("C"), share=0.5),
    ]
    times = interleave(running, 3, batch=2, warm_up=1)

    assert "".join(called) == "ABC" + "AABBCC" + "AABB" + "AABBCC"
    assert [len(times[name].walls) for name in "ABC"] == [6, 6, 4]

    async def once(name: str) -> None:
        await asyncio.sleep(0)

    assert threads_per_second(len, 2, 5) > 0
    assert loop.run_until_complete(tasks_per_second(once, 2, 5)) > 0
    loop.close()


def test_raw_sockets_send_what_the_package_sends(nodes: Servers):
    """Real servers grant the recorded requests, each time anew, and no key is left behind."""
    with contenders.raw_sockets("floor", nodes.urls, contenders.recorded_pair(nodes.urls)) as floor:
        floor.once()
        floor.once()

    with nodes[0].client() as client:
        assert not list(client.scan_iter("*:h"))
        assert list(client.scan_iter("floor*:f"))


@pytest.mark.parametrize("case", ["free-n1", "duplicates-n5"])
def test_another_version_is_measured_in_a_process_of_its_own(nodes: Servers, tmp_path: Path, case: str):
    """The child refuses to measure a version that it was not asked for."""
    cpu, rate = against.measure(case, against.ROOT, list(nodes.urls))

    assert min(cpu, rate) > 0
    with pytest.raises(AssertionError, match="another version"):
        against._child(str(tmp_path), "free-n1", nodes.urls[:1])


def test_overtaking_is_counted():
    """A process that is served before one that has waited for a while has gone past it."""
    turns = [Turn(0.0, 3.0, 3.1), Turn(1.0, 2.0, 2.1), Turn(1.01, 1.5, 1.6)]

    assert overtaking(turns) == 2 / 3
    assert jain([turns, turns]) == 1.0
    assert jain([turns, []]) == 0.5


def test_tables_show_what_is_asked_and_what_is_missing(section: Section):
    """The printed table and the page show the same rows; a section that was not measured stays as it is."""
    printed = "\n".join(lines(section))
    page = "<!-- figures: free -->\nold\n<!-- end -->\nafter\n<!-- figures: other -->\nkept\n<!-- end -->\n"
    rendered = render(page, [section])

    assert f"| {OURS} | 150 µs | 1 | 90 |  |" in rendered
    assert f"| {OURS}, against {THEIRS} | 1.50 × |  |  | ≤ 1.20: short |" in rendered
    assert f"| {OURS}, against {THEIRS}, CPU | 1.50 × |  |  | ≤ 2: ok |" in rendered
    assert "≤ 1.20: short" in printed
    assert "left out: pottery: it is not installed" in printed
    assert "after\n<!-- figures: other -->\nkept\n" in rendered
    assert "old" not in rendered
