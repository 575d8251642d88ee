"""The demo over a Redis Cluster, etcd or ZooKeeper, which checks itself, and what it says without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import needs
from tests.deployment import CHECKOUT
from tests.etcd import Member
from tests.zookeeper import Zoo

pytestmark = pytest.mark.xdist_group("etcd")


def demo(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run the demo to its end."""
    command = [sys.executable, str(CHECKOUT / "example_project" / "manage.py"), "demo", *arguments]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "shop_site.settings", **environment}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.endurance  # the demo keeps a processor busy for as long as it runs
@pytest.mark.parametrize("kind", ["cluster", "etcd", "zookeeper"])
def test_shop_runs_over_a_cluster(kind: str):
    """
    Migrations, admin pages, commands, views and a singleton task work while members of the cluster are
    killed and come back.
    """
    missing = {"etcd": Member.missing, "zookeeper": Zoo.missing}.get(kind, str)()
    needs(kind, not missing, missing)

    ran = demo("--nodes", kind, "--seconds", "24")

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Held locks shows 1 of 1 votes" in ran.stdout
    assert "checks hold." in ran.stdout


@pytest.mark.parametrize(("kind", "package"), [("etcd", "etcd-server"), ("zookeeper", "zookeeper")])
def test_missing_cluster_is_reported(tmp_path: Path, kind: str, package: str):
    """Without its program, the demo says what to install, starts nothing and leaves nothing."""
    ran = demo("--nodes", kind, PATH=str(tmp_path), TMPDIR=str(tmp_path))

    assert ran.returncode == 1
    assert "is not installed" in ran.stderr
    assert f"apt-get install {package}" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not list(tmp_path.iterdir())
