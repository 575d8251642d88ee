"""When a message comes back that waits for its slot, and when it waits in its process."""

from threading import Thread

import pytest

from django_redlock.singleton.line import FRESH, LAST, Expected, Lengths, Wait, read_length, write_length

NOBODY = None  # no run, or none whose beginning is known


@pytest.mark.parametrize(
    ("ahead", "length", "lasted", "pause"),
    [
        (0, 20.0, 5.0, 14.75),  # it is next
        (3, 20.0, 5.0, 14.75 + 3 * 20.035),  # three runs come before its own
        (3, 20.0, NOBODY, 3 * 20.035 - 0.25),  # the slot is free for the first of them
        (0, 20.0, 21.0, 5.25),  # the run takes longer than the last one
        (500, 3600.0, 5.0, 600.0),
        (0, 0.02, 0.01, 0.1),
        (5, 0.2, NOBODY, 5 * 0.235 - 0.235 / 2),  # runs are short
    ],
)
def test_message_comes_back_when_it_is_its_turn(ahead: int, length: float, lasted: float | None, pause: float) -> None:
    """A quarter of a second before, to wait in a process; half the time between two turns if that is shorter."""
    assert Wait(length, ahead, 30.0, lasted).pause == pytest.approx(pause)


@pytest.mark.parametrize(
    ("ahead", "waited", "lasted", "pause"),
    [
        (0, 0.0, 2.0, 0.5),
        (3, 0.0, 2.0, 2.0),
        (3, 0.0, 60.0, 10.0),
        (0, 8.0, NOBODY, 2.0),
        (0, 600.0, NOBODY, 10.0),
        (30, 1.5, NOBODY, 1.05),  # though others come first: their runs may be short
        (100, 0.0, 0.01, 3.5),  # they take some time, however short they are
    ],
)
def test_message_that_nobody_tells_comes_back_soon(
    ahead: int, waited: float, lasted: float | None, pause: float
) -> None:
    """After a quarter of the time for which the run has lasted, for each run before its own; ten seconds at most."""
    assert Wait(0.0, ahead, waited, lasted).pause == pytest.approx(pause)


@pytest.mark.parametrize(
    ("ahead", "length", "lasted", "waits"),
    [
        (0, 20.0, 19.6, True),
        (0, 20.0, 19.0, False),
        (0, 20.0, 21.0, False),  # longer than the last one: nobody knows when it ends
        (0, 0.0, 0.3, True),
        (0, 0.0, 3.0, False),
        (1, 0.02, 0.01, True),  # its turn comes in a tenth of a second
        (2, 0.1, 0.01, False),
        (1, 0.0, 0.01, False),
    ],
)
def test_the_next_message_waits_in_its_process(ahead: int, length: float, lasted: float, waits: bool) -> None:
    """For half a second at most; a message that has others before it waits for a tenth."""
    assert Wait(length, ahead, 30.0, lasted).is_short is waits


@pytest.mark.parametrize(
    ("ahead", "length", "lasted", "pause"),
    [
        (50, 0.2, 0.0, (0.2 + 50 * 0.235) / 2),  # half of the time until its turn
        (1, 8.0, 1.0, (7.0 + 8.035) / 2),
        (1, 8.0, 0.0, (8.0 + 8.035) / 2),
        (0, 8.0, 1.0, 6.75),  # nobody can have the slot before the present run ends
        (50, 8.0, 0.0, 50.0),  # a second for each run
        (5, 8.0, 0.0, 16.0),  # the present run, and one more
        (20, 1.0, 0.0, 10.85),
        (10, 2.0, 0.0, 10.0),
        (2, 2.0, 0.0, 3.035),
        (0, 8.0, 0.0, 7.75),
        (500, 3600.0, 0.0, 600.0),
    ],
)
def test_message_counts_on_few_runs_until_enough_have_told(
    ahead: int, length: float, lasted: float, pause: float
) -> None:
    """The only run that has told may have been a long one: it counts for a second, and the message looks again soon."""
    assert Wait(length, ahead, 0.0, lasted, sure=False).pause == pytest.approx(pause)


@pytest.mark.parametrize(("ahead", "waited"), [(50, 0.1), (51, 0.0)])
def test_message_looks_again_at_half_of_its_wait_once_and_behind_few_others(ahead: int, waited: float) -> None:
    """Each look costs the broker a message, and one with many before it comes back early in any case."""
    assert Wait(0.2, ahead, waited, 0.0, sure=False).pause == pytest.approx(0.2 + ahead * 0.235 - 0.235 / 2)


def test_turn_comes_with_the_permit_that_is_free_first() -> None:
    """If a message has looked at one of three, the first of them is probably free in half of the time."""
    assert Wait(30.0, 5, 0.0, 0.0, limit=3, looked=3).turn == pytest.approx(30.0 + 5 * 30.035 / 3)
    assert Wait(30.0, 5, 0.0, 0.0, limit=3).turn == pytest.approx(30.0 / 2 + 5 * 30.035 / 3)


def test_slot_that_is_kept_after_a_run_is_free_at_a_known_time() -> None:
    assert Wait(1.0, 0, 0.0, NOBODY, left=40.0).pause == 39.75
    assert Wait(0.0, 0, 0.0, NOBODY, left=0.4).is_short


def test_run_tells_how_long_runs_take() -> None:
    """Anybody can have written what a run tells, so nothing but a number of seconds counts."""
    assert (read_length(write_length(1.5)), read_length(write_length(0.0))) == (1.5, 0.0)
    assert [read_length(text) for text in ("", "soon", "nan", "inf", "-1", "7.abc")] == [0.0] * 6


@pytest.fixture
def lengths() -> Lengths:
    return Lengths()


def test_median_of_the_last_lengths_counts(lengths: Lengths) -> None:
    """So a long run keeps nobody away for long; of those that the process has measured, and that runs have told."""
    assert lengths.expected("a", 0.0, 0.0, 0.0) == Expected(0.0, sure=False)
    for seconds in (0.3, 8.0):
        lengths.measure("a", seconds, 0.0)
    assert lengths.expected("a", 0.0, 0.0, 0.0) == Expected(0.3, sure=False)
    assert lengths.expected("a", 0.5, 9.0, 0.0) == Expected(0.5, sure=True)
    for _ in range(LAST):
        lengths.measure("a", 2.0, 0.0)
    assert lengths.expected("a", 0.0, 0.0, 0.0).seconds == 2.0


def test_a_run_that_tells_many_messages_counts_once(lengths: Lengths) -> None:
    """Also if several run at once."""
    for told, since in ((8.0, 1.0), (0.2, 2.0), (8.0, 1.0), (0.2, 2.0)):
        expected = lengths.expected("a", told, since, 0.0)
    assert expected == Expected(0.2, sure=False)
    assert lengths.expected("a", 0.2, 3.0, 0.0) == Expected(0.2, sure=True)


def test_lengths_are_known_for_a_time(lengths: Lengths) -> None:
    lengths.measure("a", 6.0, 0.0)
    lengths.expected("a", 5.0, 9.0, 1.0)
    assert [lengths.expected("a", 0.0, 0.0, at).seconds for at in (FRESH - 1, FRESH, FRESH + 1)] == [5.0, 5.0, 0.0]


def test_run_tells_what_its_process_has_measured_last(lengths: Lengths) -> None:
    """Never what other runs have told: otherwise, one long run would stay known for ever."""
    lengths.expected("a", 8.0, 9.0, 0.0)
    assert lengths.measured("a", 0.0) == 0.0
    lengths.measure("a", 1.0, 0.0)
    lengths.measure("a", 2.0, 0.0)
    assert lengths.measured("a", 0.0) == 2.0


def test_process_remembers_the_lengths_of_a_number_of_slots(lengths: Lengths) -> None:
    for number in range(1001):
        lengths.measure(str(number), 1.0, 0.0)
    assert [lengths.measured(slot, 0.0) for slot in ("0", "1000")] == [0.0, 1.0]


@pytest.mark.usefixtures("short_turns")
def test_threads_note_and_read_lengths_at_once() -> None:
    """No thread of a pool meets what another one is changing."""
    lengths, over = Lengths(), []

    def note() -> None:
        moment = 0.0
        while not over:
            moment += 1.0
            lengths.measure("a", 0.1, moment)

    notes = Thread(target=note)
    notes.start()
    try:
        for _ in range(20_000):
            lengths.expected("a", 0.0, 0.0, 0.0)
    finally:
        over.append(True)
        notes.join()
