"""The conditions that hold after a schedule."""

from collections.abc import Iterator
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from celery import states

from django_redlock.singleton.line import GRACE, IDLE, LONGEST_GUESS

from .celery_parts import results

if TYPE_CHECKING:
    from .celery_parts import Answer, Run
    from .schedule import History

RETURN = 5.0  # seconds within which nodes come back
TOGETHER = 1e-4  # seconds within which messages come at the same time, as their stamps show
AT_ONCE = 0.01  # seconds within which two permits count as taken at the same time
DELAY = 0.2  # seconds within which a worker enrols a message that it has got
MOMENT, LATE = 1.0, 4.0  # seconds within which a worker gets a message that is due, and has another one before it
NOTES = ("done:", "began:", "begun:", "watch:")


def every_call_ends(history: "History") -> list[str]:
    """Every call that was given a result sees that result, an error or a revocation."""
    waiting = [answer for answer in history.answers if not answer.error and answer.id not in history.broker.lost]
    return [
        f"{answer.caller} waits for ever for {answer.id[:4]}, its call with {answer.value}"
        for answer in waiting
        if history.state(answer.id) not in states.READY_STATES
    ]


def nothing_overlaps(history: "History") -> list[str]:
    """No more runs of one key overlap than its limit allows, unless the scope allows more."""
    options = history.profile.options
    if options.scope == "until_executing":
        return []
    found = []
    alive: list[Run] = []
    for run in sorted(history.runs, key=lambda run: run.number):
        alive = [other for other in alive if other.ended > run.number]
        if len(alive) >= options.limit:
            others = ", ".join(other.id[:4] for other in alive)
            found.append(f"{run.id[:4]} began before {others} had ended")
        alive += [run] * (run.end is not None)
    return found


def answers_are_true(history: "History") -> list[str]:
    """The answer says that a call was accepted if it sent a message, and whose duplicate it was."""
    found = []
    ids = {answer.id for answer in history.answers} | history.broker.sent  # the caller may have died after it had sent
    for answer in history.answers:
        if answer.error:
            continue
        if answer.accepted != bool(answer.sent):
            found.append(f"{answer.caller} got accepted={answer.accepted} and sent {answer.sent} messages")
        if answer.duplicate != bool(answer.reason):
            found.append(f"{answer.caller}: duplicate={answer.duplicate} with the reason {answer.reason!r}")
        if answer.holder_id and answer.holder_id not in ids:
            found.append(f"{answer.caller} got the holder {answer.holder_id}, which is no call")
    return found


def nothing_is_left(history: "History") -> list[str]:
    """No slot is taken when everything is idle."""
    return [f"{name} is still held" for name in sorted(history.left)]


def newest_arguments_run(history: "History") -> list[str]:
    """After every call something runs, under the id it was given, with its arguments or with newer ones."""
    found = []
    for answer in history.answers:
        if answer.error or answer.id in history.broker.lost or history.state(answer.id) == states.REVOKED:
            continue
        newer = {other.value for other in history.answers if other.end > answer.start}
        if not any(run.id == answer.id and run.number > answer.start and run.value in newer for run in history.runs):
            ran = [(run.id[:4], run.value) for run in history.runs if run.number > answer.start]
            found.append(f"nothing newer than {answer.caller}'s call with {answer.value} ran as {answer.id[:4]}: {ran}")
    return found


def older_arguments_run_first(history: "History") -> list[str]:
    """No message of a pending call runs after a newer message of the same call."""
    found = []
    newest: dict[str, int] = {}
    for run in sorted(history.runs, key=lambda run: run.number):
        if 0 < run.message < newest.get(run.id, 0):
            found.append(f"{run.id[:4]} ran with {run.value}, message {run.message}, after message {newest[run.id]}")
        newest[run.id] = max(run.message, newest.get(run.id, 0))
    return found


def only_the_newest_call_expires(history: "History") -> list[str]:
    """A call is revoked only if somebody revoked it, or if a newest call with its id could expire."""
    found = []
    for task_id in results.revoked.keys() - history.revoked:
        calls = [answer for answer in history.answers if answer.id == task_id and answer.sent]
        newest = [call for call in calls if not any(other.start > call.end for other in calls)]
        if newest and not any("expires" in call.extra for call in newest):
            found.append(f"{task_id[:4]} was revoked, and its newest call is that with {newest[0].value}")
    return found


def no_call_joins_a_revoked_one(history: "History") -> list[str]:
    """No call gets the id of a call that waits for its time and that had been revoked before."""
    return [
        f"{answer.caller} got {answer.id[:4]} for its call with {answer.value}, which had been revoked"
        for answer in history.answers
        if answer.start > results.revoked.get(answer.id, answer.start)
    ]


def nothing_runs_after_its_end(history: "History") -> list[str]:
    """Nothing runs under an id of which its callers know that it was revoked."""
    return [
        f"{run.id[:4]} ran with {run.value} after it had been revoked"
        for run in history.runs
        if run.number > results.revoked.get(run.id, run.number)
    ]


def discarded_calls_run_no_older_arguments(history: "History") -> list[str]:
    """When a worker has discarded a revoked message, no other one runs older ones of its call."""
    return [
        f"{run.id[:4]} ran with {run.value}, message {run.message}, after message {number} was discarded"
        for task_id, number, step in history.broker.discarded
        for run in history.runs
        if run.id == task_id and run.number > step and 0 < run.message < number
    ]


def starts_are_apart(history: "History") -> list[str]:
    """
    A run that has ended has its slot until ``hold_for`` has passed since its start, even if its process ends.

    So a later one begins only where a slot is left of those that the limit allows.
    """
    found, options = [], history.profile.options
    runs = sorted(history.runs, key=lambda run: run.start)
    for number, run in enumerate(runs):
        since = run.start - options.hold_for + 0.01
        holding = [before for before in runs[:number] if before.over and before.start > since]
        if len(holding) >= options.limit:
            after = ", ".join(f"{run.start - before.start:.2f} s after {before.id[:4]}" for before in holding)
            found.append(f"{run.id[:4]} began {after}")
    return found


def runs_are_in_order(history: "History") -> list[str]:
    """
    No message takes its slot before one that came to a worker earlier, while the place of that one is kept.

    A message has a place since it was put back. The place is kept for its pause and a grace, until a worker has the
    message; then for as long again. But a message that has found the slot free, and again a moment later, may take it
    before those that have not taken it in between.
    """
    found, broker = [], history.broker
    at_once = AT_ONCE if history.profile.options.limit > 1 else 0.0
    first: dict[str, Run] = {}
    for run in sorted(history.runs, key=lambda run: run.number):
        first.setdefault(run.id, run)
    for other, visits in broker.visits.items():
        if other not in first:
            continue
        # A worker that died with it before may have told the nodes of it, or not.
        came = max(got for got in broker.got[other] if got < visits[0].at)
        for task_id, run in first.items():
            is_earlier = run.took < first[other].took - at_once and came < broker.got[task_id][0] - TOGETHER
            if is_earlier and _keeps_its_place(history, other, run.took) and not _may_overtake(history, run):
                found.append(f"{task_id[:4]} took its slot before {other[:4]}, which had come earlier")
    return found


def _keeps_its_place(history: "History", task_id: str, moment: float) -> bool:
    """Return whether a message has been put back by that moment, and has come back in time whenever it was."""
    visits = [visit for visit in history.broker.visits[task_id] if visit.at < moment]
    kept = all(after.at < before.until - DELAY for before, after in pairwise(visits))
    return bool(visits) and kept and moment < visits[-1].until - DELAY


def _may_overtake(history: "History", mine: "Run") -> bool:
    """
    Return whether the only slot was free for the message a moment ago, and none that comes before it has had it since.

    One that comes after it may have had it, for less than that moment: that one has overtaken them, too.
    """
    start, came = mine.took - IDLE + TOGETHER, history.broker.got[mine.id][0]
    was_free = not any(run.took < start < run.until for run in history.runs)
    between = {run.id for run in history.runs if start < run.took < mine.took}
    one = history.profile.options.limit == 1
    return one and was_free and not any(history.broker.got[task_id][0] < came for task_id in between)


def no_slot_is_idle(history: "History") -> list[str]:
    """
    While messages wait, no slot is free for longer than the longest of their pauses, and a moment.

    Before that, the place of one that was lost is kept for its pause and a grace, in whole seconds. If a worker died,
    the place of its message is kept for a grace, and the slot of its run for a lease.
    """
    profile, visits, lost = history.profile, history.broker.visits, history.broker.lost
    deaths = profile.kills + profile.stops
    moment = MOMENT + profile.options.hold_for + (LATE if profile.prefetched else 0.0)
    moment += GRACE + profile.options.lease if deaths else 0.0
    moment += max((ceil(each.pause + GRACE) for task_id in lost for each in visits.get(task_id, ())), default=0.0)
    found = []
    for task_id, mine in visits.items():
        begins = min([run.took for run in history.runs if run.id == task_id], default=mine[-1].at)
        waits = min(begins, history.broker.cut.get(task_id, begins))  # then the broker has it for some time
        for start, stop in _free_times(history, mine[0].at, waits):
            pauses = [each.pause for some in visits.values() for each in some if each.at < stop and start < each.until]
            if stop - start > max(pauses, default=0.0) + moment:
                found.append(f"{task_id[:4]} waited although a slot was free from {start:.2f} to {stop:.2f}")
    return found


def _free_times(history: "History", start: float, stop: float) -> Iterator[tuple[float, float]]:
    """Yield the times between two moments for which the next run could have had a slot, and none began."""
    limit = history.profile.options.limit
    changes = [(run.took, 1) for run in history.runs] + [(run.until, -1) for run in history.runs]
    alive, free = 0, start
    for moment, change in [*sorted(changes), (stop, 1)]:
        if change > 0 and alive < limit and free < min(moment, stop):
            yield free, min(moment, stop)
        alive += change
        if change > 0 or alive + 1 == limit:  # the next one may begin, from now on
            free = max(start, moment)


def pending_calls_begin(history: "History") -> list[str]:
    """A pending call begins soon after the run before it has ended, or a worker has got its message."""
    found = []
    runs = sorted(history.runs, key=lambda run: run.took)
    for number, run in enumerate(runs):
        before = max((other.until for other in runs[:number]), default=0.0)
        waited = run.took - max(before, history.broker.got[run.id][0])
        if waited > LONGEST_GUESS + MOMENT:
            found.append(f"{run.id[:4]} began {waited:.1f} s too late")
    return found


def one_id_for_a_run(history: "History") -> list[str]:
    """
    All calls that are made during one run have one id, and it runs once.

    A call whose message was sent but may not count is sent once more, under another id. The record that it could not
    replace may be gone, so the calls after it have a third one.
    """
    found = []
    for run in history.runs:
        if run.end is None:
            continue
        free = [answer for answer in history.answers if not answer.error and "task_id" not in answer.extra]
        twice = sum(answer.sent > 1 and run.number < answer.end and answer.start < run.ended for answer in free)
        ids = {answer.id for answer in free if run.number < answer.start and answer.end < run.ended}
        if len(ids) > 1 + 2 * twice:
            found.append(f"the calls during {run.id[:4]} have {len(ids)} ids: {sorted(i[:4] for i in ids)}")
    return found


def each_id_runs_once(history: "History") -> list[str]:
    """No id runs twice, where no worker dies and nothing is retried."""
    counts: dict[str, int] = {}
    for run in history.runs:
        counts[run.id] = counts.get(run.id, 0) + 1
    return [f"{task_id[:4]} ran {count} times" for task_id, count in counts.items() if count > 1]


def nothing_is_done_again(history: "History") -> list[str]:
    """Where no worker dies, no attempt runs once it has returned or sent a retry."""
    found, done = [], set()
    for run in sorted(history.runs, key=lambda run: run.number):
        if (run.id, run.attempt) in done:
            found.append(f"{run.id[:4]} ran again, though its attempt {run.attempt} was done")
        if run.done:
            done.add((run.id, run.attempt))
    return found


def one_waits(history: "History") -> list[str]:
    """Calls that are all made before the first run share one run; with ``rerun``, the first call has one of its own."""
    most = 2 if history.profile.options.on_duplicate == "rerun" else 1
    runs = len(history.runs)
    return [f"{runs} runs of calls that all waited at once"] if runs > most else []


def every_call_is_covered(history: "History") -> list[str]:
    """
    Every accepted call runs, or ends in a way that is documented; a duplicate's other call was sent, and ended later.

    This holds whatever fails, and however often: nodes, the backend, the broker, callers and workers.
    """
    found = []
    for answer in history.answers:
        if answer.error == "DuplicateTask":
            wrong = _uncovered(history, answer, answer.holder_id, "is refused because of")
        elif answer.error:
            wrong = "" if answer.error == "OSError" else f"gets {answer.error}"
        elif answer.accepted:
            wrong = _uncovered(history, answer, answer.id, "is sent as")
        else:
            skipped = results.stored.get(answer.id, (0, ""))[1] == answer.caller
            skipped = skipped or history.profile.options.on_duplicate == "skip"
            wrong = _uncovered(history, answer, answer.holder_id if skipped else answer.id, "is a duplicate of")
        if wrong:
            found.append(f"{answer.caller}'s call with {answer.value} {wrong}")
    return found


def _uncovered(history: "History", answer: "Answer", task_id: str | None, how: str) -> str:
    """Return what is wrong with the end of the task of which a call was given the id, or heard; empty if nothing is."""
    broker, options, told = history.broker, history.profile.options, f"{how} {(task_id or 'nobody')[:4]}"
    mine = [run for run in history.runs if run.id == task_id]
    ended = [run for run in history.runs if run.end is not None and max(run.ended, run.over) > answer.start]
    if task_id is None:
        return "" if ended else f"{told}, and nothing ran after it"
    if any(run.id == task_id for run in ended) or task_id in broker.lost | history.revoked:
        return ""
    # The end of a run that no quorum of nodes has heard of is under way for longer than a worker waits for it, or it is
    # redelivered; until then, its slot is taken.
    longest = max(history.profile.ways)
    unheard = longest if longest > history.profile.node_timeout else 0.0
    if history.profile.outage == "quorum":
        unheard = options.lease + RETURN
    held = [(run.start, run.start + options.hold_for) for run in mine]
    held += [(run.start, run.end + unheard) for run in mine if run.end is not None]
    if any(start <= answer.began < end for start, end in held):
        return ""
    if task_id not in broker.sent:
        return f"{told}, which was never sent"
    step, _ = results.stored.get(task_id, (-1, ""))
    state, result = history.state(task_id), results.kept.get(task_id, {}).get("result")
    if step < answer.start and (step >= 0 or any(run.end is not None for run in mine)):
        return f"{told}, which had ended"
    unseen = history.profile.ignored and broker.ends.get(task_id, "").startswith(("Ignore('Skipped", "DuplicateTask"))
    if state not in states.READY_STATES and not unseen:
        return f"{told}, which never ends"
    error = result.get("exc_type", "") if isinstance(result, dict) else type(result).__name__
    if error == "TimeLimitExceeded" or "terminated" in str(result):
        return ""
    followed = state == states.SUCCESS and options.on_overlap == "follow"
    if state in (states.SUCCESS, states.FAILURE) and not followed and error != "DuplicateTask":
        return f"{told}, which ended without a run: {result!r}"
    if mine and options.redelivery == "drop":
        return ""
    if mine:
        return f"{told}, whose run was cut short, and which was dropped"
    # It was dropped because of a run that then died with its worker; that one's message had been acknowledged.
    dropped = results.ended.get(str(task_id), 0.0)
    dead = [run for run in history.runs if run.end is None and run.id in broker.lost]
    died = any((run.took or run.start) <= dropped for run in dead)
    # Or because of one whose end no quorum of nodes has heard of yet.
    heard = not unheard or not any(run.end and answer.began < run.end + unheard for run in history.runs)
    return "" if ended or died or not heard else f"{told}, which was dropped, and nothing ran after the call"
