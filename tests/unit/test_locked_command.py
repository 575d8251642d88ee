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
from django_redlock.management.locked import leases_of
from django_redlock.testing import Simulation
from tests.shop.helpers import in_thread, is_free, lose


class Import(BaseCommand):
    """The command that the tests decorate; does what the test sets."""

    action = staticmethod(lambda command: None)

    def add_arguments(self, parser):
        parser.add_argument("--supplier")
        parser.add_argument("--parts", nargs="*")

    def handle(self, **options):
        return self.action(self)


def command(decorate, action=lambda command: None):
    return decorate(type("Command", (Import,), {"handle": Import.handle, "action": staticmethod(action)}))()


NAME = "command:test_locked_command"


class Decorated(Import):
    """Locked by the decorator of its ``handle()``."""

    @locked_command("base")
    def handle(self, **options):
        return super().handle(**options)


@locked_command("base")
class WholeClass(Import):
    """Locked by the decorator of the class."""


@pytest.mark.parametrize("base", [Decorated, WholeClass])
def test_subclass_that_overrides_handle_is_locked(base):
    """Its lock is that of its base, once for both methods, and free afterwards."""
    leases = []

    class Command(base):
        action = staticmethod(lambda self: leases.append(None if is_free("command:base") else self.lease))

        def handle(self, **options):
            self.action(self)
            return super().handle(**options)

    call_command(Command())

    assert leases[0]
    assert leases == [leases[0]] * 2
    assert is_free("command:base")
    with lock("command:base"), pytest.raises(CommandError, match="Skipped"):
        call_command(Command())


@pytest.mark.parametrize("base", [Decorated, WholeClass])
@pytest.mark.parametrize("whole", [True, False])
def test_subclass_may_have_another_lock(base, whole):
    """A decorator of its own counts instead; the lock of the base is taken where its ``handle()`` is called."""
    free = []

    class Command(base):
        def handle(self, **options):
            free.append([is_free(f"command:{name}") for name in ("own", "base")])

        if not whole:
            handle = locked_command("own")(handle)

    call_command((locked_command("own")(Command) if whole else Command)())

    assert free == [[False, True]]


class Below(Import):
    """Another decorator below that of the lock, which hides the name and the module of ``handle()``."""

    @locked_command
    @no_translations
    def handle(self, **options):
        return self.action(self)


class BelowWithOptions(Import):
    @locked_command(wait=0)
    @no_translations
    def handle(self, **options):
        return self.action(self)


@locked_command
class OnClass(Import):
    @no_translations
    def handle(self, **options):
        return self.action(self)


@pytest.mark.parametrize("base", [Below, BelowWithOptions, OnClass])
@pytest.mark.parametrize("overrides", [True, False])
def test_decorator_below_the_lock_works(base, overrides):
    """The lock has the command's name, although ``no_translations`` hides it, and so has that of a subclass."""
    found = []

    class Command(base):
        action = staticmethod(lambda self: found.append((holder_of(NAME), self.lease.name, translation.get_language())))

        if overrides:

            @no_translations
            def handle(self, **options):
                return self.action(self)

    call_command(Command())

    ((holder, name, language),) = found
    assert (holder["label"], name, language) == ("test_locked_command", NAME, None)
    assert is_free(NAME)


@pytest.mark.django_db
@pytest.mark.parametrize("above", [no_translations, transaction.atomic])
@pytest.mark.parametrize("decorate", [locked_command, locked_command(), locked_command("nightly")])
def test_decorator_above_the_lock_is_refused(above, decorate):
    """It would work without the lock, and ``atomic`` would commit after it; the error says what to write."""

    class Command(Import):
        @above
        @decorate
        def handle(self, **options):
            return self.action(self)

    command = Command()
    command.action = lambda self: pytest.fail("ran")
    with pytest.raises(TypeError, match=r"@locked_command decorates .* Write it above all other decorators of handle"):
        call_command(command)


def test_handle_that_cannot_be_locked_is_refused():
    """A subclass whose ``handle()`` is no function would work without the lock of its base."""
    with pytest.raises(TypeError, match=r"@locked_command decorates .* not functools\.partialmethod"):

        class Command(WholeClass):
            handle = partialmethod(Import.handle, supplier="7")


class Mixin:
    """Has a ``handle()`` that does not call that of the command behind it."""

    def handle(self, **options):
        return self.action(self)


@pytest.mark.parametrize("base", [Decorated, WholeClass])
def test_mixin_in_front_does_not_drop_the_lock(base):
    """Its ``handle()`` runs under the lock of the command, once, or under that of the class if it has its own."""
    names = []

    class Command(Mixin, base):
        action = staticmethod(lambda self: names.append([each.name for each in leases_of(self)]))

    class Below(Command):
        pass

    @locked_command("own")
    class Own(Mixin, base):
        action = staticmethod(Command.action)

    for each in (Command, Below, Own):
        call_command(each())

    assert names == [["command:base"], ["command:base"], ["command:own"]]
    assert vars(Mixin)["handle"](Command()) is None
    assert names[3] == []  # the mixin itself stays as it is


def test_subclass_has_the_nearest_lock():
    """A subclass of a command with a lock of its own has that one, also if it takes a ``handle()`` from elsewhere."""
    names = []

    @locked_command("own")
    class Own(Decorated):
        action = staticmethod(
            lambda self: names.append([each.name.removeprefix("command:") for each in leases_of(self)])
        )

    class Overriding(Own):
        def handle(self, **options):
            return self.action(self)

    class Borrowing(Own):
        handle = WholeClass.handle

    @locked_command("last")
    class Last(Overriding):
        pass

    for each in (Overriding, Borrowing, Last):
        call_command(each())

    assert names == [["own"], ["own", "base"], ["last", "own"]]


def test_subclass_of_a_command_with_two_locks_has_both():
    """A command decorated twice takes two locks, and so does a subclass that overrides its ``handle()``."""
    names = []

    @locked_command("outer")
    class Twice(Decorated):
        @locked_command("inner")
        def handle(self, **options):
            raise NotImplementedError

    class Command(Twice):
        def handle(self, **options):
            names.extend(each.name for each in leases_of(self))

    call_command(Command())

    assert names == ["command:outer", "command:inner"]


@pytest.mark.parametrize("overrides", [True, False])
def test_two_bases_with_locks_are_refused(overrides):
    """``self.lease`` can be only one of the two; the error names both classes and says what to write."""
    body = {"handle": Import.handle} if overrides else {}

    with pytest.raises(
        TypeError, match=r"\.Decorated and .*\.WholeClass.*write @locked_command\(\.\.\.\) above its own"
    ):
        type("Command", (Decorated, WholeClass), body)


def test_two_bases_with_locks_and_a_lock_of_its_own():
    """What the error about two bases advises works; two bases with the lock of one class are no problem."""
    names = []

    class First(Decorated):
        pass

    class Second(Decorated):
        pass

    class One(First, Second):
        def handle(self, **options):
            names.append(self.lease.name)

    class Own(One, WholeClass):
        @locked_command("own")
        def handle(self, **options):
            names.append(self.lease.name)
            super().handle(**options)

    call_command(One())
    call_command(Own())

    assert names == ["command:base", "command:own", "command:base"]


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


def test_awaitable_is_no_result():
    """A decorator below may hide that ``handle()`` is a coroutine function: the run fails, and its lock is free."""

    class Command(Import):
        handle = locked_command("nightly")(no_translations(coroutine))

    with pytest.raises(TypeError, match=r"returned an awaitable.*async with lock\(\.\.\.\)"):
        call_command(Command())

    assert is_free("command:nightly")


def test_wrapper_that_copies_the_marks_of_a_locked_handle_is_locked():
    """A subclass may write ``functools.wraps()`` of its base's ``handle()`` without losing the lock."""

    class Middle(WholeClass):
        def handle(self, **options):
            raise NotImplementedError

    class Command(Middle):
        @wraps(Middle.handle)
        def handle(self, **options):
            return self.action(self)

    free = []
    Command.action = lambda self, _: free.append(is_free("command:base"))
    call_command(Command())

    assert free == [False]


def test_instance_in_two_threads_runs_once():
    """The second thread is skipped, although the command itself may call its ``handle()`` while it has the lock."""
    entered = []

    def work(self):
        entered.append(self)
        in_thread(lambda: call_command(self))

    shared = command(locked_command("nightly"), work)

    with pytest.raises(CommandError, match="Skipped") as skipped:
        call_command(shared)

    assert (len(entered), skipped.value.returncode) == (1, 75)
    assert is_free("command:nightly")


def test_instance_has_the_lease_of_one_thread():
    """A second thread that gets a lock with the same instance is refused: ``self.lease`` would be that of the first."""

    def work(self):
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


def test_outer_lease_is_back_after_an_inner_run():
    """A command that calls that of its base, with another lock, checks its own lease before and after that call."""
    names = []

    @locked_command("own")
    class Command(Decorated):
        def handle(self, **options):
            names.append(self.lease.name.removeprefix("command:"))
            super().handle(**options)
            names.append(self.lease.name.removeprefix("command:"))
            self.lease.ensure()

        def action(self, _):
            names.append(self.lease.name.removeprefix("command:"))
            if len(names) == 2:
                call_command(self)  # it has both locks

    call_command(Command())

    assert names == ["own", "base", "own", "base", "own", "own"]


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


def test_run_that_gets_no_lock_has_an_exit_code():
    """A run without the lock does not begin; its exit code says whether the lock is taken or nobody can tell."""

    def ended(message, **options):
        with pytest.raises(CommandError, match=message) as error:
            call_command(command(locked_command("nightly", **options), lambda self: pytest.fail("ran")))
        return error.value.returncode

    with lock("command:nightly", label="the other"):
        codes = [ended(r"Skipped.*the other"), ended("Skipped", skip_exit_code=3)]
        call_command(command(locked_command("nightly", skip_exit_code=0), lambda self: pytest.fail("ran")))
    for node in locks["default"].nodes[:2]:
        node.down = True
    codes.append(ended("must answer in time"))

    assert codes == [75, 3, 69]


@pytest.mark.parametrize(("level", "events"), [("INFO", []), ("DEBUG", ["command_skipped"] * 2)])
def test_skipped_run_says_why_once(caplog, level, events):
    """The error says it, and the log only if it shows everything; so a skip with the exit code 0 prints nothing."""
    with lock("command:nightly"), caplog.at_level(level, "django_redlock"):
        with pytest.raises(CommandError, match="Skipped"):
            call_command(command(locked_command("nightly")))
        call_command(command(locked_command("nightly", skip_exit_code=0)))

    assert [record.event for record in caplog.records if record.name == "django_redlock"] == events


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
@pytest.mark.parametrize("fails", [True, False])
def test_minimum_hold_keeps_the_next_host_out(fails, options):
    """The lock stays taken for ``hold_for`` from its start, also if the command fails, unless that is switched off."""

    def work(self):
        if fails:
            raise ZeroDivisionError

    with Simulation(ttl=10) as sim:
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            call_command(command(locked_command("nightly", hold_for=50, **options), work))
        sim.advance(49)

        assert is_free("command:nightly") is (fails and bool(options))
        if not (fails and options):
            with pytest.raises(CommandError, match=r"Skipped.*held by command test_locked_command \(held\)") as error:
                call_command(command(locked_command("nightly", hold_for=50), lambda self: pytest.fail("ran")))
            assert error.value.returncode == 75
        sim.advance(2)
        assert is_free("command:nightly")


@pytest.mark.parametrize(
    ("key", "options", "message"),
    [
        ("{supplier}", {}, r"\{supplier\} has no value for this run: it is empty"),
        ("{suplier}", {}, r"\{suplier\} has no value for this run: there is no 'suplier', only .*supplier"),
        ("{region}", {}, r"\{region\} has no value for this run: there is no 'region'"),
        ("{parts}", {"parts": ["a"]}, "a list cannot be part of a lock's name"),
        (lambda **options: None, {}, "the callable has no value for this run"),
    ],
)
def test_missing_value_is_an_error_and_never_a_shared_lock(key, options, message):
    """A run without a value for the key fails, and names the command and the key."""
    with pytest.raises(CommandError, match=rf"@locked_command on tests\.unit\.test_locked_command.*{message}"):
        call_command(command(locked_command(key), lambda self: pytest.fail("ran")), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "{supplier}"}, "has characters that UTF-8 cannot encode"),
        ({"using": "nope"}, "REDLOCK has no alias 'nope'"),
        ({"ttl": 1e6}, r"ttl must be from 0\.1 to 60 seconds"),
    ],
)
def test_lock_that_cannot_be_named_or_configured_is_no_traceback(options, message):
    """The shell passes bytes that are not UTF-8 as half of a surrogate pair; settings may lack the alias."""
    with pytest.raises(CommandError, match=message):
        call_command(command(locked_command(**options), lambda self: pytest.fail("ran")), supplier="\udcff")


@pytest.mark.parametrize("key", ["{supplier", "{0}", "{supplier[0]}", "", 7])
def test_key_that_can_never_be_resolved_is_refused_at_once(key):
    """A mistake, in ``wait`` as well, is an error at import; the hint for a key names options, and no request."""
    with pytest.raises(ImproperlyConfigured, match=r"@locked_command on tests\.unit\.test_locked_command") as refused:
        command(locked_command(key))

    assert "{supplier}" in str(refused.value) or key in ("", 7)
    assert not re.search("{pk}|request", str(refused.value))
    with pytest.raises(ValueError, match="wait"):
        locked_command("nightly", wait=-1)


@pytest.mark.parametrize("target", [Import(), object, "nightly"])
def test_only_commands_can_be_decorated(target):
    with pytest.raises(TypeError, match="decorates a BaseCommand or its handle"):
        locked_command("nightly")(target)
