"""
One word for each concept, and the field's own: no name of ours is a word that the project has given up.

Names of other libraries keep theirs: ``hint=`` of Django's checks, ``Bundle`` of Hypothesis, markers of pytest.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]

# Each word with the one that has replaced it.
REPLACED = {
    "ballot": "round",
    "bury": "tombstone",
    "buried": "tombstone",
    "clerk": "worker",
    "courier": "redelivery",
    "examine": "inspect",
    "farewell": "cleanup round",
    "green": "gevent",
    "ledger": "table",
    "nonce": "secret",
    "owed": "in flight",
    "presence": "heartbeat",
    "seat": "connection",
    "seated": "connected",
    "seats": "connections",
    "tenure": "hold",
    "waker": "wake-up",
    "wording": "encode",
}
FOREIGN = {"Bundle", "GREEN", "NONCE"}  # of Hypothesis; a colour; the template for a secret in redis-py's own tests

# Words that are ordinary English elsewhere, but named several things in the package.
REPLACED_IN_PACKAGE = {
    "bundle": "connection set",
    "courier": "redelivery",
    "marker": "tombstone",
    "refusal": "response, problem, or the error itself",
    "said": "reported, or what it is",
    "says": "has, or what it does",
    "tell": "report",
    "told": "notified",
}
OF_REPLIES = {"_reason_of_refusal"}  # a node's reply is a refusal

# A lock has a secret and a fencing token. These files have tokens of others: of redis-py, of etcd, a database's column.
OTHER_TOKENS = ("compat.py", "models.py", "redis_py/", "nodes/etcd/client.py")

# Modules that have been renamed; the words themselves have other, ordinary uses.
RENAMED = {
    *("answers", "ballot", "blocks", "bundle", "child", "clerk", "courier", "decoration", "engines", "entering"),
    *("examine", "forks", "gather", "green", "hints", "ledger", "loops", "presence", "refusals", "tenure", "waker"),
    *("watchdog", "wording"),
}

# In running text, where a word such as "green" may be the ordinary one.
NEVER_WRITTEN = re.compile(
    r"\b(ballots?|clerks?|couriers?|farewells?|tenures?|wakers?|buried|bury"
    r"|st(?:and|ands|ood|anding) in line|asks? (?:nobody|no node)|(?:locks?|leases?|holds?) of before"
    r"|(?:its|their|whose) equals?)\b",
    re.IGNORECASE,
)


def files(*patterns: str) -> Iterator[Path]:
    """Yield the project's own files, of the folders that a checkout has."""
    for folder in ("django_redlock", "tests", "docs", "example_project"):
        for pattern in patterns:
            for path in sorted((CHECKOUT / folder).rglob(pattern)):
                if path != Path(__file__) and "__pycache__" not in path.parts:
                    yield path


def names(source: str) -> set[str]:
    """Return what a module of Python names: classes, functions, parameters, variables, attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.arg(arg=name) | ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
    return found


def words(name: str) -> set[str]:
    """Return the words of a name, in lower case: of ``snake_case``, ``CamelCase`` and ``CONSTANT``."""
    return {word.lower() for part in name.split("_") for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", part)}


def outdated(name: str) -> set[str]:
    return set() if name in FOREIGN else words(name) & REPLACED.keys()


def test_words_of_names_are_found():
    """
    Each way to write a name is taken apart into its words.
    """
    assert words("_is_green") == {"is", "green"}
    assert words("TurnWaker") == {"turn", "waker"}
    assert words("MAX_OWED") == {"max", "owed"}
    assert words("evergreen") == {"evergreen"}


@pytest.mark.parametrize("folder", ["django_redlock", "tests", "example_project"])
def test_names_in_python_are_the_fields_own(folder: str):
    """
    No class, function, parameter, variable or attribute has a word that was replaced.
    """
    found = {
        f"{path.relative_to(CHECKOUT)}: {name} ({', '.join(REPLACED[word] for word in outdated(name))})"
        for path in files("*.py")
        if path.relative_to(CHECKOUT).parts[0] == folder
        for name in names(path.read_text(encoding="utf-8"))
        if outdated(name)
    }

    assert found == set()


def test_names_in_the_package_are_precise():
    """
    No name in the package has a word that stood for several things; other libraries' names are only used.
    """
    found = {
        f"{path.relative_to(CHECKOUT)}: {name}"
        for path in files("*.py")
        if path.is_relative_to(CHECKOUT / "django_redlock")
        for name in names(path.read_text(encoding="utf-8")) - OF_REPLIES
        if words(name) & REPLACED_IN_PACKAGE.keys()
    }

    assert found == set()


def test_secret_and_fencing_token_are_not_both_called_token():
    """
    What proves a hold is a secret, and the number that a database compares is a fencing token.
    """
    package = CHECKOUT / "django_redlock"
    found = {
        f"{path.relative_to(package)}: {name}"
        for path in files("*.py", "*.lua")
        if path.is_relative_to(package) and not str(path.relative_to(package)).startswith(OTHER_TOKENS)
        for name in (names if path.suffix == ".py" else variables)(path.read_text(encoding="utf-8"))
        if name.strip("_") == "token"
    }

    assert found == set()


def variables(script: str) -> set[str]:
    """Return the words of a Lua script outside its comments."""
    return set(re.findall(r"[A-Za-z_]+", re.sub(r"--.*", "", script)))


def test_names_in_scripts_are_the_fields_own():
    """
    Nor has a variable of the scripts that the servers run.
    """
    found = {
        f"{path.name}: {name}"
        for path in files("*.lua")
        for name in re.findall(r"[A-Za-z_]+", path.read_text(encoding="utf-8"))
        if outdated(name)
    }

    assert found == set()


def test_modules_are_named_after_their_job():
    """
    No module has a name that was given up.
    """
    package = CHECKOUT / "django_redlock"

    assert sorted(path.stem for path in package.rglob("*.py") if path.stem in RENAMED) == []


def test_text_uses_the_fields_words():
    """
    Comments, docstrings, messages and documentation do not use the words that nobody else in the field uses.
    """
    found = {
        f"{path.relative_to(CHECKOUT)}: {match[0]}"
        for path in (*files("*.py", "*.lua", "*.md", "*.html"), *CHECKOUT.glob("*.md"))
        for match in NEVER_WRITTEN.finditer(path.read_text(encoding="utf-8"))
    }

    assert found == set()
