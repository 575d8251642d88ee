"""The profiles that schedules are drawn from."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from django_redlock.celery import SingletonOptions

from .oracles import (
    answers_are_true,
    discarded_calls_run_no_older_arguments,
    each_id_runs_once,
    every_call_ends,
    every_call_is_covered,
    newest_arguments_run,
    no_call_joins_a_revoked_one,
    no_slot_is_idle,
    nothing_is_done_again,
    nothing_is_left,
    nothing_overlaps,
    nothing_runs_after_its_end,
    older_arguments_run_first,
    one_id_for_a_run,
    one_waits,
    only_the_newest_call_expires,
    pending_calls_begin,
    runs_are_in_order,
    starts_are_apart,
)
from .schedule import Profile

ALWAYS = (every_call_ends, nothing_overlaps, answers_are_true, nothing_is_left)
TRAILING = (*ALWAYS, newest_arguments_run, older_arguments_run_first, one_id_for_a_run, each_id_runs_once)
PROMPT = (*TRAILING, pending_calls_begin)
KEY = ("key",)

RERUN = SingletonOptions(key=KEY, on_duplicate="rerun")
REPLACE = SingletonOptions(key=KEY, on_duplicate="replace")
BOTH = {"key": KEY, "scope": "until_and_while_executing"}
DROP = SingletonOptions(key=KEY, on_duplicate="rerun", redelivery="drop")
ONCE = SingletonOptions(key=KEY)
SERIAL = SingletonOptions(key=KEY, scope="while_executing")
# An operator who frees the record lets one more call wait, and a dead worker lets a run begin anew.
ENDING = (*ALWAYS, newest_arguments_run, older_arguments_run_first)
REVOKED = (*ENDING, discarded_calls_run_no_older_arguments)
QUEUED = {"key": KEY, "scope": "until_executing", "hold_for": 1.5}
APART = (
    every_call_ends,
    answers_are_true,
    nothing_is_left,
    newest_arguments_run,
    older_arguments_run_first,
    each_id_runs_once,
    starts_are_apart,
)
BURST = {"spread": 0.0, "callers": 5, "calls": 1, "held": True, "length": 5.0}
CROWD = {"callers": 6, "spread": 1.0, "length": 0.5, "workers": 3}

# Each seed takes another strategy and scope, and acknowledges early or late, so that a profile has all of them.
STRATEGIES: tuple[dict[str, Any], ...] = (
    *(
        {"on_duplicate": strategy, "scope": scope}
        for strategy in ("join", "skip", "raise", "rerun", "replace")
        for scope in ("until_executed", "until_executing", "until_and_while_executing")
    ),
    *({"scope": "while_executing", "on_overlap": overlap} for overlap in ("wait", "drop", "follow", "fail")),
    {"redelivery": "drop"},
    *({"scope": "until_executed", "on_overlap": overlap} for overlap in ("wait", "follow", "fail")),
)
COVERED = (every_call_is_covered, nothing_overlaps, answers_are_true)
CROWDS = (2, 3, 4, 5, 8)
CLOSE, FAR, LATE = (0.0, 0.001, 0.02), (0.0, 0.01, 0.1), (0.0, 0.01, 0.1, 0.4)  # seconds to a node
LONG: dict[str, Any] = {"spread": 8.0, "calls": 5}
BACKEND: dict[str, Any] = {**LONG, "prefetched": 0.5, "owned": 1, "draws": {"ignored": (False, True)}}
# The lease of a dead worker's run ends before the message is delivered again, and another call may run by then.
WORKERS: dict[str, Any] = {
    **{"spread": 24.0, "calls": 10, "length": 5.0, "unseen": (0.0, 8.0, 8.0, 15.0)},
    "draws": {"late": (True, True, True, False)},
}
AT_ONCE: dict[str, Any] = {
    **{"spread": 0.0, "calls": 1, "workers": 3},
    "draws": {"callers": CROWDS, "ways": (CLOSE, (0.0,))},
}
FAULTS: dict[str, dict[str, Any]] = {
    "at once": AT_ONCE,
    "at once, one silent": {**AT_ONCE, "outage": "one"},
    "by name, one silent": {**AT_ONCE, "owned": 1, "workers": 4, "outage": "one"},
    "one silent": {"outage": "one"},
    "one after another": {**LONG, "outage": "another", "recycled": 0.7},
    "flapping": {**LONG, "outage": "flapping", "recycled": 0.3},
    "quorum away": {**LONG, "outage": "quorum", "length": 0.5, "prefetched": 0.5},
    # Nothing times out; but a claim may reach a node after the release of the run that it led to.
    "far nodes": {**LONG, "ways": FAR, "node_timeout": 1.0, "length": 0.1},
    "far nodes, one silent": {**LONG, "ways": FAR, "node_timeout": 1.0, "length": 0.1, "outage": "one"},
    "late nodes": {**LONG, "ways": LATE, "length": 0.3, "recycled": 0.3},
    "callers die": {"dying": 2, "callers": 5, "spread": 8.0},
    "callers die, one silent": {"dying": 2, "callers": 5, "spread": 8.0, "outage": "one"},
    "broker refuses": {"broken": 3, "callers": 5, "spread": 0.5, "outage": "one"},
    "backend away": {**BACKEND, "backend": "away"},
    "backend slow": {**BACKEND, "backend": "slow"},
    "backend full": {**BACKEND, "backend": "full"},
    "workers die": {**WORKERS, "kills": 3},
    "workers stop": {**WORKERS, "stops": 3},
    "delivered again": {**WORKERS, "kills": 1, "stops": 1, "redeliver": 0.7},
    "cut short": {**LONG, "cut_short": 0.3},
}

# Calls of which one or a few run at a time, in the order in which workers got them.
LIMITED = (*COVERED, nothing_is_left)
IN_LINE = (*LIMITED, runs_are_in_order, no_slot_is_idle)
LINE: dict[str, Any] = {"callers": 4, "calls": 3, "workers": 4}
LIMITS: dict[str, Any] = {"options": tuple(replace(SERIAL, limit=limit) for limit in (1, 2, 3))}
HOLDS: dict[str, Any] = {
    "options": tuple(
        replace(SERIAL, hold_for=2.0, limit=limit, lease=lease) for limit in (1, 2, 3) for lease in (1.5, 30.0)
    )
}
MORTAL: dict[str, Any] = {
    "options": tuple(replace(SERIAL, limit=limit, lease=6.0) for limit in (1, 2)),
    "unseen": ((0.0, 8.0), (8.0, 15.0)),
}
LINES: dict[str, dict[str, Any]] = {
    "serial burst": {"spread": 0.0, "draws": {"length": (0.02, 0.5, 3.0)}},
    "serial with limit": {"draws": LIMITS},
    "serial, one silent": {"outage": "one", "draws": LIMITS},
    "serial, flapping": {**LONG, "outage": "flapping", "draws": LIMITS},
    "serial, workers die": {"late": True, "kills": 3, "spread": 8.0, "draws": MORTAL},
    "serial, workers stop": {"late": True, "stops": 3, "spread": 8.0, "draws": MORTAL},
    "serial, revoked": {"revoked": 4, "draws": LIMITS},
    "serial, purged": {"purge": True, "draws": LIMITS},
    "serial, prefetched": {"prefetched": 0.3, "draws": LIMITS},
}


def in_line(name: str) -> Profile:
    """Return the profile of calls that wait in line."""
    about = LINES[name]
    # A message whose nodes do not answer gives up its place, and comes back ever later.
    return Profile(name, SERIAL, LIMITED if "outage" in about else IN_LINE, **{**LINE, **about})


def burst(calls: int, length: float, *oracles: Any) -> Profile:
    """Return the profile of calls that are made at once, with runs of one length, for four workers."""
    about: dict[str, Any] = {"callers": 1, "calls": calls, "workers": 4, "spread": 0.0, "reorder": 0.0}
    return Profile("burst", SERIAL, (*IN_LINE, *oracles), length=length, lengths=(1.0, 1.0), **about)


def under(fault: str) -> Profile:
    """Return the profile of all strategies and scopes under a fault."""
    about = FAULTS[fault]
    lease = 6.0 if "unseen" in about else 30.0
    options = tuple(SingletonOptions(key=KEY, lease=lease, **strategy) for strategy in STRATEGIES)
    draws = {"options": options, "late": (False, True), **about.get("draws", {})}
    return Profile(fault, options[0], COVERED, **{**about, "draws": draws})


PROFILES = {
    profile.name: profile
    for profile in (
        *map(under, FAULTS),
        *map(in_line, LINES),
        Profile(
            "serial, held",
            SERIAL,
            (*IN_LINE, starts_are_apart),
            **{**LINE, "recycled": 0.5, "length": 0.5, "node_timeout": 0.1, "draws": HOLDS},
        ),
        Profile(
            "serial, copies",
            SERIAL,
            (*LIMITED, nothing_is_done_again),
            **LINE | {"callers": 1, "calls": 1, "spread": 0.4, "length": 0.6, "draws": LIMITS},
            late=True,
            redeliver=1.0,
            fail=1.0,
        ),
        Profile("once", ONCE, (*ALWAYS, each_id_runs_once)),
        Profile("serial", SERIAL, (*ALWAYS, newest_arguments_run, each_id_runs_once)),
        Profile("rerun", RERUN, PROMPT),
        Profile("rerun burst", RERUN, PROMPT, **BURST),
        Profile("rerun waiting", RERUN, (*TRAILING, one_waits), idle=True),
        Profile("rerun crowd", RERUN, PROMPT, **CROWD),
        Profile("rerun beside a run", SingletonOptions(**BOTH, on_duplicate="rerun"), TRAILING),
        Profile("rerun held", SingletonOptions(**QUEUED, on_duplicate="rerun"), APART),
        Profile("replace held", SingletonOptions(**QUEUED, on_duplicate="replace"), APART),
        Profile("rerun revoked", RERUN, REVOKED, revoked=3, newcomers=True, length=2.0),
        Profile("replace revoked", REPLACE, REVOKED, revoked=3, newcomers=True, countdowns=(0.0, 3.0)),
        Profile(
            "debounce revoked",
            REPLACE,
            REVOKED,
            revoked=4,
            newcomers=True,
            countdowns=(1.0, 2.0),
            spread=4.0,
            workers=1,
        ),
        Profile("rerun freed", RERUN, ENDING, freed=1, length=2.0),
        Profile("replace", REPLACE, PROMPT),
        Profile("replace burst", REPLACE, PROMPT, **BURST),
        Profile("replace waiting", REPLACE, (*TRAILING, one_waits), idle=True, spread=0.0),
        Profile("replace crowd", REPLACE, PROMPT, **CROWD),
        Profile("replace beside a run", SingletonOptions(**BOTH, on_duplicate="replace"), TRAILING),
        Profile("debounce", REPLACE, TRAILING, countdowns=(0.0, 0.5, 3.0, 600.0)),
        Profile(
            "expiring",
            REPLACE,
            (*ENDING, each_id_runs_once, only_the_newest_call_expires),
            expires=(None, 0.5, 2.0),
            workers=1,
            same=0.0,
        ),
        Profile(
            "waits briefly",
            SingletonOptions(key=KEY, on_duplicate="replace", wait_for=2.0),
            (*TRAILING, nothing_runs_after_its_end),
            countdowns=(0.0, 0.5, 30.0),
            length=5.0,
        ),
        Profile(
            "revoked",
            RERUN,
            (*ENDING, each_id_runs_once, no_call_joins_a_revoked_one),
            revoked=4,
            countdowns=(60.0,),
            calls=5,
            spread=6.0,
            same=0.7,
        ),
        Profile("failing", RERUN, (*ALWAYS, newest_arguments_run, one_id_for_a_run), fail=0.5),
        Profile("own ids", RERUN, ENDING, owned=1),
        Profile("broker away", REPLACE, TRAILING, broken=2),
        Profile("node away", RERUN, ENDING, downs=3),
        Profile("nodes come and go", REPLACE, TRAILING, downs=20, callers=5, spread=2.0, workers=3, length=1.0),
        Profile("redelivered", RERUN, TRAILING, late=True, redeliver=0.5),
        Profile("dropped", DROP, (*ALWAYS, each_id_runs_once), late=True, redeliver=0.5, kills=1),
        Profile("killed", RERUN, ENDING, late=True, kills=2),
        Profile("killed early", REPLACE, (*ALWAYS[:3], newest_arguments_run), kills=2),
        # Messages wait for the slot of one that is lost; the longer, the more often they come back in vain.
        Profile("purged", replace(RERUN, queue_ttl=120.0), ALWAYS[:3], purge=True),
    )
}

if find_spec("django.tasks"):  # since Django 6.0
    from . import task_schedule

    PROFILES[task_schedule.PROFILE.name] = task_schedule.PROFILE
