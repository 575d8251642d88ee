"""A burst of messages of which one runs at a time, with short runs."""

import threading
import time
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

import pytest
from celery import signals
from celery.worker.state import revoked as revoked_tasks

from django_redlock import lock
from django_redlock.core.names import slug
from django_redlock.core.protocol import Acquire
from django_redlock.inventory import find_lock
from django_redlock.testing import Simulation
from tests.managers import wait_until

from .slots import HEADER, NAME, names, take_slot, ticket_in

SECRET = "a" * 32


@pytest.fixture
def serial(make, worker):
    """A serial task whose runs are known to be short in this process."""
    task = make(scope="until_and_while_executing")
    took = inf
    while took > 0.2:  # as on a machine with much else to do
        task.delay(7)
        began = time.monotonic()
        worker.run()
        took = time.monotonic() - began
    return task


@pytest.fixture
def other(serial):
    """The run of another message, in another process."""
    lease = take_slot(serial.singleton_ticket("other", (7,), {}))
    yield lease
    lease.release()


def waiting():
    """Return how many callers wait for the slot."""
    found = find_lock(NAME)
    return found.waiting if found else 0


@pytest.mark.server
def test_process_waits_for_the_end_of_a_short_run(serial, other, worker, memory_nodes, monkeypatch):
    """The next run follows at once: its process waits in the queue of the slot, and no message is put back."""
    call = serial.delay(7)
    last = memory_nodes[-1]
    execute = last.execute

    def execute_and_release(request, *mark):
        reply = execute(request, *mark)
        if isinstance(request, Acquire) and request.waiter and other.valid():
            other.release()
        return reply

    monkeypatch.setattr(last, "execute", execute_and_release)
    state = worker.run()

    assert (state, worker.ids[-1], worker.headers) == ("SUCCESS", call.id, [])
    assert names() == set()


@pytest.mark.server
def test_one_process_waits_and_others_go_on(serial, other, worker):
    """A process puts the message back at once if another one waits for the slot, so that other keys are served."""
    serial.delay(7)

    waiter = threading.Thread(target=lambda: lock(NAME, wait=60).acquire().release())
    waiter.start()
    wait_until(waiting)
    state = worker.run()
    still_waits = waiting()
    other.release()
    waiter.join()

    assert (state, still_waits, len(worker.headers)) == ("IGNORED", 2, 1)  # the message keeps its place, too


@pytest.mark.parametrize("end", ["is revoked", "expires", "is of an unknown task", "cannot be read"])
def test_message_that_never_comes_back_gives_up_its_place(make, worker, received, end):
    """
    At the moment at which a worker learns of it, so the messages behind it do not wait for it.

    In a rolling deploy, a worker may not know the task.
    """
    task = make(scope="while_executing")
    with lock(NAME):
        call = task.delay(7)
        worker.run()
        assert waiting() == 1

        message = worker.take()
        match end:
            case "is revoked":
                message.headers["expires"] = None
                revoked_tasks.add(call.id)
                assert (received(task, message).revoked(), call.state) == (True, "REVOKED")
                revoked_tasks.discard(call.id)
            case "expires":
                message.headers["expires"] = "2000-01-01T00:00:00+00:00"
                assert (received(task, message).revoked(), call.state) == (True, "REVOKED")
            case "is of an unknown task":
                signals.task_unknown.send(sender=None, message=message, name="shop.gone", id=call.id, exc=KeyError())
            case "cannot be read":
                message.headers["expires"] = "tomorrow"
                assert worker.run(message) == "FAILURE"

        assert waiting() == 0


def test_slot_for_which_others_wait_is_not_free(make, worker, memory_nodes):
    """A message that finds the slot free, but others in its queue, waits for it, whatever is done without nodes."""
    task = make(scope="while_executing", on_unavailable={"run": "run"})
    call = task.delay(7)
    with lock(NAME):
        for node in memory_nodes:
            node.execute(Acquire((slug(NAME),), SECRET, SECRET, 30.0, 1, 3600.0, 60.0, waiter="elsewhere|1", stamp=1))

    state = worker.run()

    assert (state, worker.ids, call.state, len(worker.headers)) == ("IGNORED", [], "PENDING", 1)


def test_message_overtakes_others_that_stay_away(make, worker, memory_nodes):
    """The slot is free, and whoever comes first may be away for long: a message that has waited runs before it."""
    task = make(scope="while_executing")
    call = task.delay(7)
    with lock(NAME):
        for node in memory_nodes:
            node.execute(Acquire((slug(NAME),), SECRET, SECRET, 30.0, 1, 3600.0, 60.0, waiter="elsewhere|1", stamp=1))
        worker.run()
    assert worker.run() == "IGNORED"

    state = worker.run()

    assert (state, worker.ids) == ("SUCCESS", [call.id])


def test_message_that_waits_need_not_know_for_whom(make, worker):
    """While a slot changes hands, nodes name several holders: no failure, after which it would come back ever later."""
    task = make(scope="while_executing", on_overlap="wait")
    with Simulation(nodes=3, check=False) as simulation:
        call = task.delay(7)
        message = worker.take()
        message.headers[HEADER] = replace(ticket_in(message.headers), tries=2).pack()
        for number, node in enumerate(simulation.nodes):
            secret = f"{number:032}"
            node.execute(Acquire((slug(NAME),), secret, f'{secret}{{"host":"{number}"}}', 30.0, 1, 3600.0, 60.0))

        state = worker.run(message)

    assert (state, worker.ids, call.state, len(worker.headers)) == ("IGNORED", [], "PENDING", 1)
    assert ticket_in(worker.headers[0]).waited <= 4.0


def test_retry_comes_before_the_calls_that_arrived_during_its_countdown(make, worker):
    """The slot is free for others meanwhile; afterwards it counts when a worker received the retry."""
    due = ["the first"]
    task = make(lambda self, shop_id: due and due.pop() and self.retry(countdown=5), scope="while_executing")
    first = task.delay(7)
    worker.run()
    again, second = worker.take(), task.delay(7)
    with lock(NAME):
        worker.run()
        worker.run(again, kept=5.0)

    came = {headers["id"]: ticket_in(headers).stamp for headers in worker.headers}
    assert came[first.id] < came[second.id]


def test_message_comes_back_for_the_permit_that_is_free_first(make, worker):
    """With ``limit``, the next permit may be free in four seconds, though it asked for one that is free in 599."""
    pauses = []
    with Simulation() as simulation:
        task = make(scope="while_executing", limit=2, hold_for=600)
        for shop in range(8):
            for seconds in 595.0, 1.0:
                task.delay(shop)
                worker.run()
                simulation.advance(seconds)
            task.delay(shop)
            worker.run()
            pauses.append(ticket_in(worker.take().headers).waited)

    assert max(pauses) < 4.1


def test_burst_of_runs_that_hold_their_slots_costs_few_messages(make, worker):
    """Each run has its slot for the minimum time, however short it is, so messages come back when those have passed."""
    calls, limit, minimum = 40, 3, 2.0
    came, put_back = [], 0
    with Simulation() as simulation:
        task = make(scope="while_executing", limit=limit, hold_for=minimum)
        began = simulation.clock()
        for number in range(calls):
            task.delay(7)
            heappush(came, (began, number, worker.take(), 0.0))
        while came:
            due, number, message, waited = heappop(came)
            simulation.advance(max(due - simulation.clock(), 0.0))
            worker.run(message)
            if again := worker.take():
                put_back += 1
                pause = ticket_in(again.headers).waited
                heappush(came, (simulation.clock() + pause - waited, number, again, pause))
        took = simulation.clock() - began

    assert put_back <= 2 * calls
    assert took <= 1.3 * minimum * calls / limit


@pytest.mark.parametrize("limit", [3, 20])
def test_runs_of_unknown_length_are_looked_at_ever_more_rarely(make, worker, limit):
    """Though one of them has begun only now."""
    put_back, now = 0, 0.0
    with Simulation(max_hold=10_000) as simulation:
        task = make(scope="while_executing", limit=limit, max_hold=10_000)
        runs = []
        for number in range(limit):
            simulation.advance(600 / limit)
            runs.append(take_slot(task.singleton_ticket(f"run {number}", (7,), {})))
        task.delay(7)
        message, waited = worker.take(), 0.0
        while now < 300:
            worker.run(message)
            message = worker.take()
            pause, waited = ticket_in(message.headers).waited - waited, ticket_in(message.headers).waited
            put_back, now = put_back + 1, now + pause
            simulation.advance(pause)
        assert all(run.valid() for run in runs)

    assert put_back < 40


def test_message_behind_one_that_is_away_does_not_wait_for_a_run(make, worker):
    """Two permits of three are free earlier than expected, so it is back soon after the first one has come."""
    with Simulation() as simulation:
        task = make(lambda self, shop: simulation.advance(60.0), scope="while_executing", limit=3)
        for _ in range(3):
            task.delay(7)
            worker.run()
        runs = [take_slot(task.singleton_ticket(f"run {number}", (7,), {})) for number in range(3)]
        task.delay(7)
        worker.run()
        away = worker.take()
        for run in runs[:2]:
            run.release()
        simulation.advance(5.0)
        task.delay(7)
        worker.run()
        second = worker.take()

    assert ticket_in(away.headers).waited > 50
    assert ticket_in(second.headers).waited < 25
