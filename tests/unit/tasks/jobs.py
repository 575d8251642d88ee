"""Singleton tasks in memory: one backend keeps what is enqueued, the other runs it at once."""

import asyncio

import django

from django_redlock import current_lease


def steps():
    yield ran.append("steps")


if django.VERSION >= (6, 0):
    from django_redlock.tasks import singleton_task

    ran: list[object] = []

    @singleton_task(backend="kept", queue_ttl=600)
    def keep(shop_id, since=None, *, deep=False):
        ran.append(("keep", shop_id))

    @singleton_task(
        backend="kept", key=lambda call: f"{call.arguments['shop_id']}", scope="until_executing", group="shops"
    )
    def until(shop_id):
        ran.append(("until", shop_id, until.singleton.lease))

    @singleton_task(backend="kept", scope="until_and_while_executing")
    def pair(shop_id):
        ran.append(("pair", shop_id))

    @singleton_task(hold_for=60)
    def report(day):
        ran.append(("report", day, report.singleton.remaining > 0))
        return day

    @singleton_task(scope="while_executing")
    def again(depth):
        ran.append(("again", depth))
        return again.enqueue(depth).errors[0].traceback

    @singleton_task(takes_context=True, scope="until_and_while_executing")
    def attempt(context, day):
        freed = [attempt.singleton.release() for _ in range(2)]
        return [day, context.attempt, freed, attempt.singleton.lease is None]

    @singleton_task
    def everything():
        ran.append(everything.singleton.release())

    @singleton_task(backend="kept")
    def waiting():
        ran.append(waiting.singleton.release())

    @singleton_task(scope="until_and_while_executing", key=(), on_unavailable={"enqueue": "raise"})
    def inside_itself(depth):
        return inside_itself.enqueue(depth - 1).status if depth else "done"

    @singleton_task(takes_context=True)
    def nested(context, depth):
        inner = nested.call(context, depth - 1) if depth else []
        return [[nested.singleton.is_locked(depth), nested.singleton.remaining > 0], *inner]

    @singleton_task
    async def anested(depth):
        inner = await anested.acall(depth - 1) if depth else []
        return [anested.singleton.remaining > 0, *inner]

    @singleton_task
    async def later(day):
        return [day, later.singleton.remaining > 0]

    @singleton_task(scope="while_executing")
    async def slow(day):
        return day

    @singleton_task
    async def endless(day):
        ran.append(endless.singleton.lease)
        await asyncio.get_running_loop().create_future()

    @singleton_task(backend="kept", key="{sizes}/{kind}")
    def measure(sizes, kind):
        ran.append(("measure", sizes, kind))

    @singleton_task
    def begun():
        return steps()

    @singleton_task
    async def abegun():
        return steps()

    @singleton_task
    def inside(day):
        ran.append(current_lease().name)

    @singleton_task
    async def ainside(day):
        ran.append(current_lease().name)
