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


def manifest(kind: str, name: str) -> dict[str, Any]:
    every = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    (found,) = (each for each in every if each["kind"] == kind and each["metadata"]["name"] == name)
    return dict(found)


def lock_container() -> dict[str, Any]:
    (found,) = manifest("StatefulSet", "lock")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def lock_users() -> dict[str, str]:
    """Return the users of a lock server, of each of the two files; one user in a line."""
    return {
        "compose": compose()["configs"]["users"]["content"],
        "kubernetes": manifest("Secret", "lock-users")["stringData"]["users.acl"],
    }


def lock_commands() -> dict[str, list[str]]:
    return {"compose": compose()["services"]["lock-1"]["command"], "kubernetes": lock_container()["args"]}


def environments() -> dict[str, dict[str, str]]:
    """Return the variables with which the shop runs, by file."""
    both = (manifest("ConfigMap", "shop")["data"], manifest("Secret", "shop")["stringData"])
    return {"compose": compose()["services"]["web"]["environment"], "kubernetes": both[0] | both[1]}
