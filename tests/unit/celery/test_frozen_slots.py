"""What a singleton task writes to its nodes and into its messages, compared with a file in tests/frozen."""

import re
from typing import Any

from celery.signals import before_task_publish

from django_redlock import locks
from tests.frozen import compare
from tests.server.locking.test_frozen_keys import RULES, comparable, in_memory


def test_slot_is_written_as_ever(make: Any, worker: Any):
    """A call that is being sent, waits, runs, is followed by another one, and is done leaves the recorded keys."""
    steps: dict[str, list[str]] = {}

    def note(step: str, headers: Any = None) -> None:
        store = locks["default"].nodes[0].store
        lines = in_memory(store.records, store.now())
        if headers:
            lines.append(re.sub('"[0-9a-f]{32}"', '"<secret>"', f"header  {comparable(headers['django_redlock'])}"))
        steps.setdefault(step, [re.sub(r'"(ttl|hold)":(59|60)\.\d+', r'"\1":<seconds>', line) for line in lines])

    def body(task: Any, shop: int) -> None:
        note("running")
        task.delay(7)
        note("running, and another call waits")

    def sending(headers: Any, **about: Any) -> None:
        note("claimed, and its message", headers)

    sync = make(body, on_duplicate="rerun", hold_for=60.0)
    before_task_publish.connect(sending)
    sync.delay(7)
    note("sent")
    worker.run()
    note("done, and held for a minute")
    before_task_publish.disconnect(sending)

    compare("task.txt", steps, RULES)
