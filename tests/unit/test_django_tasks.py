"""The lock as a decorator below Django's own ``@task``, which came with Django 6.0."""

import asyncio

import django
import pytest
from django.core.management import CommandError, call_command

from django_redlock import LockTakenError, lock, locks

if django.VERSION < (6, 0):

    def test_singleton_task_says_what_it_needs():
        """Celery imports the module of every installed app, so that succeeds; what it has needs a later Django."""
        from django_redlock import tasks

        with pytest.raises(ImportError, match=r"needs Django 6\.0; for Celery, import it from"):
            from django_redlock.tasks import singleton_task  # noqa: F401
        with pytest.raises(CommandError, match=r"needs Django 6\.0"):
            call_command("redlock_reap_tasks")
        assert not hasattr(tasks, "anything")


if django.VERSION >= (6, 0):
    from django.tasks import TaskResultStatus, task

    def held() -> bool:
        try:
            locks["default"].lock("rates", wait=0).acquire().release()
        except LockTakenError:
            return True
        return False

    @task
    @lock("rates", wait=0)
    def refresh(shop_id: int) -> list[object]:
        return [shop_id, held()]

    @task
    @lock("rates", wait=0)
    async def arefresh(shop_id: int) -> list[object]:
        return [shop_id, await asyncio.to_thread(held)]

    @pytest.mark.parametrize("locked", [refresh, arefresh])
    def test_runs_under_the_lock_or_fails(locked):
        """A task with a lock below its decorator runs with it, and frees it; if it is taken, the task fails."""
        result = locked.enqueue(7)

        assert (result.status, result.return_value) == (TaskResultStatus.SUCCESSFUL, [7, True])
        with lock("rates"):
            result = locked.enqueue(7)
        assert result.status == TaskResultStatus.FAILED
        assert result.errors[0].exception_class_path.endswith("LockTakenError")
