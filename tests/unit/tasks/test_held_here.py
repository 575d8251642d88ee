"""The body of a singleton task of Django, and what it calls, know the lease of its slot."""

from tests.unit.tasks import jobs


def test_run_holds_its_slot():
    """In a thread and in a coroutine."""
    jobs.inside.enqueue(1)
    jobs.ainside.enqueue(1)

    assert jobs.ran == ["task:tests.unit.tasks.jobs.inside:day=1", "task:tests.unit.tasks.jobs.ainside:day=1"]
