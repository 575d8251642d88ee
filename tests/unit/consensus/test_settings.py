"""Nodes of etcd and ZooKeeper in the setting: their URLs, what needs a package, and what the checks say."""

import sys
from pathlib import Path
from typing import Any

import pytest

from django_redlock import InvalidRedlockError, QuorumUnavailableError, lock, locks
from django_redlock.checks import check_deployment, check_settings
from tests.unit.test_settings import PATIENCE, SECRET, configured

MISTAKES: list[tuple[Any, str, str]] = [
    *(
        ([url], "redlock.E003", message)
        for url, message in (
            (f"etcd://:{SECRET}@a,b/2", "etcd has neither a path nor database"),
            (f"etcd://u:pa@{SECRET}@a,b", "percent-encoded"),
            (f"etcd://u:{SECRET}@a,b:x", "its hosts or ports cannot be read, "),
            ("etcd://a;b", "its hosts or ports cannot be read; write"),
            (f"etcd://:{SECRET}@a", "a user name and a password, or neither"),
            ("etcd://a?ssl_ca_certs=/x", "write etcds:// instead of etcd://"),
            ("etcds://a?ssl_keyfile=/x", "add ssl_certfile"),
            ("etcd://a?timeout=3", "etcd has no option 'timeout'; it has username"),
            ("etcd://a,redis://b", "names several nodes: make each a separate item"),
            (f"zookeeper://:{SECRET}@a/2", "ZooKeeper has no database numbers"),
            (f"zookeeper://u:{SECRET}@a/x//y", "its path is not valid in ZooKeeper"),
            ("zookeeper://a?sasl_service=x", "add sasl_mechanism=GSSAPI"),
            ("zookeeper://a?sasl_mechanism=PLAIN", "one of DIGEST-MD5, GSSAPI"),
            ("zookeeper://a?sasl_mechanism=DIGEST-MD5", "DIGEST-MD5 needs a user"),
        )
    ),
    ("zookeeper://a:1/x,b:1/x", "redlock.E003", "its path comes once, after the last member"),
    (["etcd://a,b", "etcds://c,b:2379"], "redlock.E004", "'b:2379' twice, at 0 and 1"),
]


@pytest.mark.parametrize(("nodes", "code", "message"), MISTAKES, ids=lambda value: str(value)[:60])
def test_mistake_says_what_where_and_what_to_write(nodes: Any, code: str, message: str):
    """Using the alias and the system check report the same mistake; no message shows a password."""
    with configured(NODES=nodes):
        with pytest.raises(InvalidRedlockError, match=message) as caught:
            locks["default"]
        assert [each.id for each in check_settings()] == [code]
    assert SECRET not in str(caught.value) + repr(caught.value)


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("etcds://u:p%2Cw@[::1],b?ssl_ca_certs=/etc/ca.pem, redis://c", ["[::1]:2379, b:2379", "c:6379"]),
        ("zookeeper://b,a:7001/locks, redis://c", ["a:7001, b:2181", "c:6379"]),
    ],
)
def test_members_name_the_node(nodes: str, names: list[str]):
    """All members are one node, in a string with others, too."""
    with configured(NODES=nodes):
        assert [node.name for node in locks["default"].nodes] == names


def test_certificate_that_cannot_be_read_is_named(tmp_path: Path):
    """The error names the option, and no lock is waited for: it takes another setting."""
    (tmp_path / "ca.pem").write_text("no certificate")
    for url, says in (
        ("etcds://127.0.0.1?ssl_ca_certs=/none", "its ssl_ca_certs does not name a readable file"),
        ("zookeepers://127.0.0.1?ssl_certfile=/none", "its ssl_certfile does not name a readable file"),
        (f"etcds://127.0.0.1?ssl_ca_certs={tmp_path}", "its ssl_ca_certs does not name a readable file"),
        (f"etcds://127.0.0.1?ssl_ca_certs={tmp_path}/ca.pem", "TLS refuses a file of its ssl_ options"),
    ):
        with configured(NODES=[url]), pytest.raises(QuorumUnavailableError, match=says) as caught:
            lock("a", wait=PATIENCE).acquire()
        assert caught.value.misconfigured
        assert caught.value.waited < PATIENCE


@pytest.mark.parametrize("scheme", ["etcd", "zookeeper"])
def test_one_node_with_members_needs_no_others(scheme: str):
    """Three members survive the loss of one and forget nothing; a single address may be a single server."""
    with configured(NODES=f"{scheme}://u:{SECRET}@member-1,member-2,member-3"):
        assert check_settings() == []
        (node,) = locks["default"].nodes
        assert SECRET not in repr(node) + repr(vars(node))
    with configured(NODES=f"{scheme}://member-1"):
        assert [message.id for message in check_settings()] == ["redlock.W001"]


def test_kind_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    """Kazoo is an extra, and so is what SASL needs."""
    with monkeypatch.context() as patch, configured(NODES="zookeeper://a"):
        for name in [
            name for name in sys.modules if name.startswith(("django_redlock.contrib.consensus.zookeeper", "kazoo."))
        ]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "kazoo", None)
        (error,) = check_settings()
    assert error.id == "redlock.E003"
    assert 'it needs kazoo: pip install "django-redlock[zookeeper]"' in error.msg
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with configured(NODES=f"zookeeper://u:{SECRET}@a?sasl_mechanism=DIGEST-MD5"):
        (error,) = check_settings()
    assert 'pip install "kazoo[sasl]"' in error.msg


@pytest.mark.parametrize(
    ("nodes", "codes"),
    [
        (["ETCDS://u:x@a,b,c"], []),
        (["etcd://u:x@a,b,c"], ["W101"]),
        (["etcds://a,b,c?ssl_certfile=/x"], ["W104"]),
        (["zookeepers://a,b,c?ssl_ca_certs=/x"], ["W104", "W102"]),
        (["zookeepers://u:x@a,b,c?ssl_check_hostname=false"], ["W106"]),
    ],
)
def test_deployment(nodes: list[str], codes: list[str]):
    """Without TLS, unverified, without a password: only ``check --deploy`` warns."""
    with configured(NODES=nodes, OPTIONS={"wait": 10}):
        assert [message.id for message in check_deployment()] == [f"redlock.{code}" for code in codes]
        assert not {message.id for message in check_settings()} & {f"redlock.W10{number}" for number in range(1, 7)}
