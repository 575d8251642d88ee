"""The clock of a leader that may change: its bounds, and its eras."""

from django_redlock.contrib.consensus.clock import Era, EraClock
from django_redlock.nodes.records.record import Moment


class Clock:
    """A clock that tests move."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_readings_in_whole_seconds_narrow_the_bounds():
    """A store that counts whole seconds is known to a few milliseconds after some readings."""
    here = Clock()
    clock = EraClock(here)
    for _ in range(40):
        here.now += 0.37
        shown = int(here.now - 990.123)
        clock.observe(Era("a"), shown, shown + 1.0, sent=here.now)

    low, high = clock.bounds()
    assert low <= here.now - 990.123 <= high
    assert high - low < 0.1


def test_clock_that_was_set_begins_another_era():
    """No hold is compared with a clock that jumped; whoever notices has everything counted anew."""
    here = Clock()
    clock, era = EraClock(here), Era("a", first=0.0)
    clock.observe(era, 5.0, 5.0, sent=here.now)
    assert clock.correction(era, "a") is None

    clock.observe(era, 65.0, 65.0, sent=here.now)

    assert clock.correction(era, "a") == Era("a", 1)


def test_era_begins_when_its_record_is_there():
    """The first reading counts only if it was taken after the record, and the record of another leader is replaced."""
    here = Clock()
    clock = EraClock(here)

    assert clock.correction(None, "a", "lease") == Era("a", source="lease")
    assert clock.correction(Era("b", 3, 9.0), "a") == Era("a")
    assert clock.correction(Era("a"), "a") is None
    assert clock.moment(Era("a")) is None
    clock.observe(Era("a"), 5.0, 6.0, sent=here.now)
    corrected = clock.correction(Era("a"), "a")
    assert corrected == Era("a", first=6.0)
    assert clock.moment(corrected) == Moment(5.0, 6.0, "a/0", 6.0)
    assert Era.load(corrected.dump()) == corrected
    assert Era.load({"name": 1}) is None


def test_record_from_the_future_begins_another_era():
    """The clock was set back before this process knew it, or the era is that of a restored backup."""
    here = Clock()
    clock, era = EraClock(here), Era("a", first=0.0)
    clock.observe(era, 5.0, 6.0, sent=here.now)
    moment = clock.moment(era)
    assert moment is not None
    records = [{"era": "a/0", "written": 6.0}, {"era": "b/0", "written": 900.0}, {"era": "a/0"}, {}]
    assert clock.check(moment, records)
    assert clock.correction(era, "a") is None

    assert not clock.check(moment, [{"era": "a/0", "written": 7.0}])

    assert clock.correction(era, "a") == Era("a", 1)
