"""Runs a worker as ``celery worker`` does, without importing Celery's command line, which takes as long as Celery."""

import logging
import os
import sys

import celery

celery.maybe_patch_concurrency()  # for --pool=gevent, before anything else is imported

from .project import app  # noqa: E402

options = dict(argument.removeprefix("--").split("=", 1) for argument in sys.argv[1:])
app.Worker(
    hostname=options["hostname"],
    pool_cls=options["pool"],
    concurrency=int(options["concurrency"]),
    queues=options["queues"],
    loglevel=logging.INFO if os.environ.get("TEST_LOG") else logging.CRITICAL,
    without_gossip=True,
    without_mingle=True,
    without_heartbeat=True,
    quiet=True,
).start()
