"""The compose file and the Kubernetes manifests of the example shop say what the settings and the servers need."""

import re
import runpy
import sys
from collections import UserDict
from types import ModuleType

import pytest

from django_redlock import locks
from tests import deployment
from tests.deployment import CHECKOUT, lock_container, manifest

FILES = ("compose", "kubernetes")
SECURITY = (CHECKOUT / "docs" / "operate" / "security.md").read_text()
OF_OTHERS = {"DJANGO_SETTINGS_MODULE"}  # read by Django


class Recorded(UserDict[str, str]):
    """The environment of a container, which records what is read."""

    def __init__(self, values: dict[str, str]) -> None:
        super().__init__(values)
        self.read = set[str]()

    def __getitem__(self, name: str) -> str:
        self.read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("file", FILES)
def test_the_settings_read_every_variable_and_need_no_other(file, monkeypatch):
    """A variable that no setting reads is a mistake, and one that a setting needs is there."""
    environment = Recorded(dict(deployment.environments()[file]))
    package = ModuleType("shop_site")  # the package itself would create a Celery app
    package.__path__ = [str(CHECKOUT / "example_project" / "shop_site")]
    monkeypatch.setitem(sys.modules, "shop_site", package)
    monkeypatch.delitem(sys.modules, "shop_site.settings", raising=False)
    monkeypatch.setattr("os.environ", environment)

    settings = runpy.run_module("shop_site.deployed")
    del sys.modules["shop_site.settings"]

    assert environment.keys() - environment.read == OF_OTHERS
    assert environment["DJANGO_SETTINGS_MODULE"] == "shop_site.deployed"
    assert len(settings["REDLOCK"]["default"]["NODES"]) == 3
    assert not settings["DEBUG"]
    assert "localhost" in settings["ALLOWED_HOSTS"]  # that is how the probes ask


def test_hosts_are_services_of_the_same_file():
    """Lock servers exist under the names by which the shop connects; tests/container starts the compose file."""
    locks = manifest("StatefulSet", "lock")["spec"]
    pod = [f"lock-{number}.{locks['serviceName']}" for number in range(locks["replicas"])]
    assert re.findall(r"redis://([\w.-]+):6379", deployment.environments()["kubernetes"]["REDLOCK_NODES"]) == pod
    assert manifest("Service", locks["serviceName"])["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("file", FILES)
def test_users_of_lock_servers_have_the_documented_rights(file):
    """The rights are those of the page Security, for the prefix of the shop; everybody else may do nothing."""
    (documented,) = re.findall(r"```text\nACL SETUSER locks (.*?)```", SECURITY, re.DOTALL)
    rights = set(documented.replace("myproject:", "shop:").split()) - {"reset", "on", ">PASSWORD"}
    users = {line.split()[1]: line.split()[2:] for line in deployment.lock_users()[file].strip().splitlines()}

    assert users["default"] == ["off"]
    assert users["health"] == ["on", "nopass", "+ping"]
    assert set(users["locks"]) == rights | {"on", f">{deployment.environments()[file]['LOCKS_PASSWORD']}"}


def test_lock_pod_is_ready_only_when_its_server_votes(settings):
    """Rolling updates and drains wait for readiness, so they wait for the restart guard."""
    settings.REDLOCK = {"default": {"NODES": "memory://a,memory://b,memory://c"}}
    usual = locks["default"].rules

    assert lock_container()["readinessProbe"]["initialDelaySeconds"] > usual.max_ttl * (1 + usual.drift_factor)
    assert manifest("PodDisruptionBudget", "lock")["spec"]["maxUnavailable"] == 1
    assert manifest("Service", "lock")["spec"]["publishNotReadyAddresses"]
