"""``locked_command``: one run at a time of a command. With real processes: ``tests/server/live/test_run.py``."""

import re
from contextlib import nullcontext
from functools import partialmethod, wraps

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import BaseCommand, CommandError, call_command
from django.core.management.base import no_translations
from django.db import transaction
from django.utils import translation

from django_redlock import LockLostError, LockTakenError, lock, locked_command, locks
from django_redlock.inventory import ask_to_stop, find_lock, force_release
from django_redlock.testing import Simulation
from tests.shop.helpers import in_thread, is_free, lose

noted: list[str] = []


def note(command):
    """Note which locks are taken; that of the command's lease comes last."""
    lease = getattr(command, "lease", None)
    taken = [name for name in ("last", "outer", "inner", "own", "base") if not is_free(f"command:{name}")]
    noted.append(" ".join(sorted(taken, key=lambda name: lease is not None and lease.name == f"command:{name}")))


class Import(BaseCommand):
    """The command that the tests decorate; does what the test sets."""

    action = staticmethod(note)

    def add_arguments(self, parser):
        parser.add_argument("--supplier")
        parser.add_argument("--parts", nargs="*")

    def handle(self, **options):
        return self.action(self)


def command(decorate, action=lambda command: None):
    return decorate(type("Command", (Import,), {"handle": Import.handle, "action": staticmethod(action)}))()


def noted_by(kind):
    """Run a command; return the locks that are taken whenever it notes them. All are free afterwards."""
    noted.clear()
    call_command(kind())
    found = list(noted)
    noted.clear()
    note(kind())
    assert noted == [""]
    return found


NAME = "command:test_locked_command"


class Decorated(Import):
    """Locked by the decorator of its ``handle()``."""

    @locked_command("base")
    def handle(self, **options):
        return super().handle(**options)


@locked_command("base")
class WholeClass(Import):
    """Locked by the decorator of the class."""


class Mixin:
    """Has a ``handle()`` that does not call that of the command behind it."""

    def handle(self, **options):
        return self.action(self)


# Subclasses


@pytest.mark.parametrize("base", [Decorated, WholeClass])
def test_subclass_has_the_lock_of_its_base(base):
    """Also with a ``handle()`` of its own, of a mixin in front, or with the marks of its base's, and once for all."""

    class Overriding(base):
        def handle(self, **options):
            note(self)
            return super().handle(**options)

    class Wrapping(Overriding):
        @wraps(Overriding.handle)
        def handle(self, **options):
            note(self)

    class Mixed(Mixin, base): ...

    class Below(Mixed): ...

    kinds = (Overriding, Wrapping, Mixed, Below)
    assert [noted_by(kind) for kind in kinds] == [["base", "base"], ["base"], ["base"], ["base"]]
    for kind in kinds:
        with lock("command:base"), pytest.raises(CommandError, match="Skipped"):
            call_command(kind())
    noted.clear()
    Mixin.handle(Mixed())
    assert noted == [""]  # the mixin itself stays as it is


@pytest.mark.parametrize("base", [Decorated, WholeClass])
def test_subclass_may_have_another_lock(base):
    """The nearest lock counts; that of the base is taken where its ``handle()`` is called."""

    class Own(base):
        @locked_command("own")
        def handle(self, **options):
            note(self)

    @locked_command("own")
    class WholeOwn(base):
        def handle(self, **options):
            note(self)

    @locked_command("own")
    class Mixed(Mixin, base): ...

    @locked_command("own")
    class Around(base): ...

    class Overriding(Around):
        def handle(self, **options):
            note(self)

    class Borrowing(Around):
        handle = WholeClass.handle

    @locked_command("last")
    class Last(Overriding): ...

    assert [noted_by(kind) for kind in (Own, WholeOwn, Mixed, Overriding)] == [["own"]] * 4
    assert [noted_by(kind) for kind in (Borrowing, Last)] == [["own base"], ["last own"]]


def test_subclass_of_a_command_with_two_locks_has_both():
    """A command decorated twice takes two locks, and so does a subclass that overrides its ``handle()``."""

    @locked_command("outer")
    class Twice(Decorated):
        @locked_command("inner")
        def handle(self, **options):
            raise NotImplementedError

    class Command(Twice):
        def handle(self, **options):
            note(self)

    assert noted_by(Command) == ["outer inner"]


@pytest.mark.parametrize("body", [{"handle": Import.handle}, {}])
def test_two_bases_with_locks_need_a_lock_of_their_own(body):
    """``self.lease`` can be only one of two; what the error says to write works. Bases with one lock are no problem."""
    with pytest.raises(
        TypeError, match=r"\.Decorated and .*\.WholeClass.*write @locked_command\(\.\.\.\) above its own"
    ):
        type("Command", (Decorated, WholeClass), body)

    class One(type("First", (Decorated,), {}), type("Second", (Decorated,), {})):
        def handle(self, **options):
            note(self)

    class Own(One, WholeClass):
        @locked_command("own")
        def handle(self, **options):
            note(self)
            super().handle(**options)

    assert (noted_by(One), noted_by(Own)) == (["base"], ["own", "own base"])


def test_outer_lease_is_back_after_an_inner_run():
    """A command that calls that of its base, with another lock, checks its own lease before and after that call."""

    @locked_command("own")
    class Command(Decorated):
        def handle(self, **options):
            note(self)
            super().handle(**options)
            note(self)
            self.lease.ensure()

        def action(self, _):
            note(self)
            if len(noted) == 2:
                call_command(self)  # it has both locks

    assert noted_by(Command) == ["own", "own base", "base own", "own base", "base own", "own"]


# Other decorators, and what cannot be locked

WITHOUT = no_translations(Import.handle)  # a decorator that hides the name and the module of handle()


@pytest.mark.parametrize(
    "base",
    [
        type("Command", (Import,), {"handle": locked_command(WITHOUT)}),
        type("Command", (Import,), {"handle": locked_command(wait=0)(WITHOUT)}),
        locked_command(type("Command", (Import,), {"handle": WITHOUT})),
    ],
)
@pytest.mark.parametrize("overriding", [{"handle": WITHOUT}, {}])
def test_decorator_below_the_lock_works(base, overriding):
    """The lock has the command's name, although ``no_translations`` hides it, and so has that of a subclass."""
    found = []

    def look(command):
        found.append((holder_of(NAME)["label"], command.lease.name, translation.get_language()))

    call_command(type("Command", (base,), {"action": staticmethod(look), **overriding})())

    assert found == [("test_locked_command", NAME, None)]
    assert is_free(NAME)


@pytest.mark.django_db
@pytest.mark.parametrize("above", [no_translations, transaction.atomic])
@pytest.mark.parametrize("decorate", [locked_command, locked_command(), locked_command("nightly")])
def test_decorator_above_the_lock_is_refused(above, decorate):
    """It would work without the lock, and ``atomic`` would commit after it; the error says what to write."""
    command = type("Command", (Import,), {"handle": above(decorate(Import.handle))})()
    command.action = lambda self: pytest.fail("ran")

    with pytest.raises(TypeError, match=r"@locked_command decorates .* Write it above all other decorators of handle"):
        call_command(command)


async def coroutine(self, **options):
    pytest.fail("ran")


async def agenerator(self, **options):
    yield pytest.fail("ran")


def generator(self, **options):
    yield pytest.fail("ran")


@pytest.mark.parametrize("handle", [coroutine, agenerator, generator])
def test_handle_whose_body_runs_later_is_refused(handle):
    """Its body would run after the release; the error comes where it is written, and says what to write instead."""
    refused = pytest.raises(TypeError, match=r"body runs after the call.*asyncio\.run\(\).*async with lock\(\.\.\.\)")
    with refused:
        locked_command("nightly")(handle)
    with refused:
        locked_command(type("Command", (Import,), {"handle": handle}))
    with refused:
        type("Command", (WholeClass,), {"handle": handle})


@pytest.mark.parametrize(("handle", "what"), [(coroutine, "an awaitable"), (generator, "a generator")])
def test_work_that_is_left_is_no_result(handle, what):
    """A decorator below may hide that the body of ``handle()`` runs later: the run fails, and its lock is free."""
    hidden = type("Command", (Import,), {"handle": locked_command("nightly")(no_translations(handle))})

    with pytest.raises(TypeError, match=rf"returned {what}.*async with lock\(\.\.\.\)"):
        call_command(hidden())

    assert is_free("command:nightly")


@pytest.mark.parametrize("target", [Import(), object, "nightly"])
def test_only_commands_and_functions_can_be_locked(target):
    """A subclass whose ``handle()`` is no function would work without the lock of its base."""
    with pytest.raises(TypeError, match="decorates a BaseCommand or its handle"):
        locked_command("nightly")(target)
    with pytest.raises(TypeError, match=r"@locked_command decorates .* not functools\.partialmethod"):
        type("Command", (WholeClass,), {"handle": partialmethod(Import.handle, supplier="7")})


# A run


def test_instance_has_the_lease_of_one_thread():
    """A second thread with the same instance is skipped or, with another lock, refused: there is one ``self.lease``."""

    def work(self):
        with pytest.raises(CommandError, match="Skipped") as skipped:
            in_thread(lambda: call_command(self, supplier="1"))
        assert skipped.value.returncode == 75
        with pytest.raises(CommandError, match=r"works in another thread.*make an instance for each"):
            in_thread(lambda: call_command(self, supplier="2"))
        assert is_free("command:import:2")
        self.lease.ensure()
        lose(self.lease)
        with pytest.raises(CommandError, match="works in another thread"):
            in_thread(lambda: call_command(self, supplier="1"))
        assert self.lease.name == "command:import:1"

    shared = command(locked_command("import:{supplier}"), work)
    with pytest.raises(CommandError, match="Done, but the lock 'command:import:1' was lost"):
        call_command(shared, supplier="1")
    shared.action = lambda self: None
    in_thread(lambda: call_command(shared, supplier="2"))


def test_run_that_is_refused_leaves_no_minimum_hold():
    """Its work did not begin, so another run may do it at once."""

    def work(self):
        with pytest.raises(CommandError, match="works in another thread"):
            in_thread(lambda: call_command(self, supplier="2"))

    shared = command(locked_command("import:{supplier}", hold_for=50), work)

    call_command(shared, supplier="1")

    assert is_free("command:import:2")
    assert not is_free("command:import:1")


def holder_of(name):
    with pytest.raises(LockTakenError) as taken:
        lock(name, wait=0).acquire()
    return taken.value.holder


@pytest.mark.parametrize(
    ("decorate", "name"),
    [
        (locked_command, "command:test_locked_command"),
        (locked_command(), "command:test_locked_command"),
        (locked_command("user"), "command:user"),
        (locked_command(["import", "{supplier}"]), "command:import:7%3Aa"),
        (locked_command(lambda supplier, **options: f"import-{supplier}"), "command:import-7:a"),
    ],
)
def test_command_is_locked_while_it_runs(decorate, name):
    """The lock's name is the command's own, a text, or made of the options, and the lock is free afterwards."""
    holders = []

    call_command(command(decorate, lambda self: holders.append((holder_of(name), self.lease.names))), supplier="7:a")

    assert (holders[0][0]["kind"], holders[0][0]["label"]) == ("command", "test_locked_command")
    assert holders[0][1] == (name,)
    assert is_free(name)


@pytest.mark.parametrize(("level", "events"), [("INFO", []), ("DEBUG", ["command_skipped"] * 3)])
def test_run_that_gets_no_lock_has_an_exit_code(caplog, level, events):
    """The code says whether the lock is taken or nobody can tell. So does the error; the log has it at DEBUG only."""

    def ended(message, **options):
        with pytest.raises(CommandError, match=message) as error:
            call_command(command(locked_command("nightly", **options), lambda self: pytest.fail("ran")))
        return error.value.returncode

    with lock("command:nightly", label="the other"), caplog.at_level(level, "django_redlock"):
        codes = [ended(r"Skipped.*the other"), ended("Skipped", skip_exit_code=3)]
        call_command(command(locked_command("nightly", skip_exit_code=0), lambda self: pytest.fail("ran")))
    assert [record.event for record in caplog.records if record.name == "django_redlock"] == events
    for node in locks["default"].nodes[:2]:
        node.down = True

    assert [*codes, ended("must answer in time")] == [75, 3, 69]


def test_lost_lock_is_reported_at_the_end():
    """A run that lost its lock unnoticed, also to an operator, exits with 76; one that checks gets LockLostError."""

    def ended(work):
        with pytest.raises(CommandError, match=r"Done, but the lock 'command:nightly' was lost") as error:
            call_command(command(locked_command("nightly"), work))
        return error.value.returncode, str(error.value)

    def operate(self, end, extend=True):
        held = find_lock("command:nightly")
        end(held, held.fingerprint)
        assert not extend or not self.lease.extend()

    code, said = ended(lambda self: lose(self.lease))
    assert (code, "tried to take it since" in said) == (76, True)
    for operation in ((force_release,), (ask_to_stop,), (force_release, False)):
        code, said = ended(lambda self, operation=operation: operate(self, *operation))
        assert (code, "an operator took it away, or asked its holder to stop" in said) == (76, True)
    with pytest.raises(LockLostError):
        call_command(command(locked_command("nightly"), lambda self: lose(self.lease) or self.lease.ensure()))


def test_exception_of_the_command_releases():
    """A command that fails frees the lock, and its own error is raised, even if it is about another lock."""

    def work(self):
        assert self.lease.hold._max_hold == 7200
        lock("other", wait=0).acquire()

    with lock("other"), pytest.raises(LockTakenError, match="other"):
        call_command(command(locked_command("nightly", max_hold=7200), work))

    assert is_free("command:nightly")


@pytest.mark.parametrize("options", [{}, {"hold_on_error": False}])
@pytest.mark.parametrize(
    "end", [None, ZeroDivisionError(), SystemExit(3), SystemExit("no"), SystemExit(0), SystemExit()]
)
def test_minimum_hold_keeps_the_next_host_out(end, options):
    """
    The lock stays taken for ``hold_for`` from its start, also if the command fails, unless that is switched off.

    As for a program, a command that exits with code 0 has not failed.
    """
    fails = bool(end) and getattr(end, "code", 1) not in (None, 0)

    def work(self):
        if end:
            raise end

    with Simulation(ttl=10) as sim:
        with pytest.raises(type(end)) if end else nullcontext():
            call_command(command(locked_command("nightly", hold_for=50, **options), work))
        sim.advance(49)

        assert is_free("command:nightly") is (fails and bool(options))
        if not (fails and options):
            with pytest.raises(CommandError, match=r"Skipped.*held by command test_locked_command \(held\)") as error:
                call_command(command(locked_command("nightly", hold_for=50), lambda self: pytest.fail("ran")))
            assert error.value.returncode == 75
        sim.advance(2)
        assert is_free("command:nightly")


WHERE = r"@locked_command on tests\.unit\.test_locked_command.*"


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"key": "{supplier}"}, {}, WHERE + r"\{supplier\} has no value for this run: it is empty"),
        ({"key": "{suplier}"}, {}, WHERE + r"\{suplier\} has no value .*: there is no 'suplier', only .*supplier"),
        ({"key": "{region}"}, {}, WHERE + r"\{region\} has no value for this run: there is no 'region'"),
        ({"key": "{parts}"}, {"parts": ["a"]}, WHERE + "a list cannot be part of a lock's name"),
        ({"key": lambda **options: None}, {}, WHERE + "the callable has no value for this run"),
        ({"key": "{supplier}"}, {"supplier": "\udcff"}, "has characters that UTF-8 cannot encode"),  # no UTF-8
        ({"using": "nope"}, {}, "REDLOCK has no alias 'nope'"),
        ({"ttl": 1e6}, {}, r"ttl must be from 0\.1 to 60 seconds"),
    ],
)
def test_run_whose_lock_has_no_name_or_settings_fails(options, given, message):
    """It never takes a lock that others share, and the error names the command and the key, without a traceback."""
    with pytest.raises(CommandError, match=message):
        call_command(command(locked_command(**options), lambda self: pytest.fail("ran")), **given)


@pytest.mark.parametrize("key", ["{supplier", "{0}", "{supplier[0]}", "", 7])
def test_key_that_can_never_be_resolved_is_refused_at_once(key):
    """A mistake, in ``wait`` as well, is an error at import; the hint for a key names options, and no request."""
    with pytest.raises(ImproperlyConfigured, match=r"@locked_command on tests\.unit\.test_locked_command") as refused:
        command(locked_command(key))

    assert "{supplier}" in str(refused.value) or key in ("", 7)
    assert not re.search("{pk}|request", str(refused.value))
    with pytest.raises(ValueError, match="wait"):
        locked_command("nightly", wait=-1)
