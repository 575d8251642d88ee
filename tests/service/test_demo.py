"""The demo over a Redis Cluster, etcd or ZooKeeper, which checks itself."""

import os
import subprocess
import sys

import pytest

from tests import consensus
from tests.conftest import needs_service
from tests.deployment import CHECKOUT
from tests.etcd import Member
from tests.zookeeper import Zoo


@pytest.mark.xdist_group("etcd")
@pytest.mark.endurance  # the demo keeps a processor busy for as long as it runs
@pytest.mark.parametrize("kind", ["cluster", *(("etcd", "zookeeper") if consensus.PRESENT else ())])
def test_shop_runs_over_a_cluster(kind: str):
    """Pages, commands and tasks of the shop work while members of the cluster are killed and come back."""
    if kind != "cluster":
        needs_service(kind, Member if kind == "etcd" else Zoo)

    ran = subprocess.run(
        [sys.executable, str(CHECKOUT / "example_project" / "manage.py"), "demo", "--nodes", kind, "--seconds", "24"],
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "shop_site.settings"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Held locks shows 1 of 1 votes" in ran.stdout
    assert "checks hold." in ran.stdout
