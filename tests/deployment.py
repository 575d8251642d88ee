"""The compose file and the Kubernetes manifests of the example shop, parsed."""

import re
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / "example_project" / "deploy"
LOCKS = ("lock-1", "lock-2", "lock-3")
VALUES = {
    "LOCKS_PASSWORD": "locks-secret",
    "BROKER_PASSWORD": "broker-secret",
    "DATABASE_PASSWORD": "database-secret",
    "SHOP_SECRET_KEY": "key",
}


def compose() -> dict[str, Any]:
    """Return the compose file, with the values that .env would have."""
    text = re.sub(r"\$\{(\w+)[^}]*\}", lambda match: VALUES[match[1]], (FOLDER / "compose.yaml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))


def manifest(kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in manifests() if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def pods() -> dict[str, dict[str, Any]]:
    """Return the description of the pods of each Deployment, StatefulSet and Job, by name."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in manifests()
        if "template" in each.get("spec", {})
    }


def container(pod: str) -> dict[str, Any]:
    (found,) = pods()[pod]["containers"]
    return dict(found)


def lock_users() -> dict[str, str]:
    """Return the users of a lock server, of each of the two files; one user in a line."""
    return {
        "compose": compose()["configs"]["users"]["content"],
        "kubernetes": manifest("Secret", "lock-users")["stringData"]["users.acl"],
    }


def lock_commands() -> dict[str, list[str]]:
    return {"compose": compose()["services"]["lock-1"]["command"], "kubernetes": container("lock")["args"]}


def environments() -> dict[str, dict[str, str]]:
    """Return the variables with which the shop runs, by file."""
    both = (manifest("ConfigMap", "shop")["data"], manifest("Secret", "shop")["stringData"])
    return {"compose": compose()["services"]["web"]["environment"], "kubernetes": both[0] | both[1]}
