"""A certificate authority, certificates that it signed, and servers that use them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from django_redlock.testing import Server, ServerStartError
from tests.conftest import needs

NAMES = "DNS:localhost,IP:127.0.0.1,IP:::1"
USAGE = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 requires the usage of a key


@dataclass
class Certificates:
    """A certificate authority and the certificates that it signed, made by the openssl command."""

    folder: Path

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def make(self) -> "Certificates":
        self._authority("ca")
        self._authority("stranger")
        self._sign("server", NAMES, "ca")
        self._sign("elsewhere", "DNS:lock-1.example.org", "ca")
        self._sign("client", "DNS:app", "ca")
        self._sign("expired", NAMES, "ca")
        return self

    def pkcs8(self, name: str) -> str:
        """Return a key in the format that Java reads."""
        return self._openssl("pkcs8", "-topk8", "-nocrypt", "-in", self[f"{name}.key"])

    def _authority(self, name: str) -> None:
        self._key(name)
        made = ("-out", self[f"{name}.crt"], "-subj", f"/CN={name}", "-days", "2")
        self._openssl("req", "-x509", "-new", "-key", self[f"{name}.key"], *USAGE, *made)

    def _sign(self, name: str, names: str, authority: str) -> None:
        self._key(name)
        days = "-1" if name == "expired" else "2"
        (self.folder / f"{name}.ext").write_text(
            f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\nkeyUsage=digitalSignature\n"
        )
        self._openssl("req", "-new", "-key", self[f"{name}.key"], "-out", self[f"{name}.csr"], "-subj", f"/CN={name}")
        ca = ("-CA", self[f"{authority}.crt"], "-CAkey", self[f"{authority}.key"], "-CAcreateserial", "-days", days)
        certificate = ("-in", self[f"{name}.csr"], "-out", self[f"{name}.crt"], "-extfile", self[f"{name}.ext"])
        self._openssl("x509", "-req", *certificate, *ca)

    def _key(self, name: str) -> None:
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self[f"{name}.key"])

    def _openssl(self, *command: str) -> str:
        done = subprocess.run(["openssl", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def tls_server(certificates: Certificates, name: str = "server", clients: str = "no") -> Iterator[Server]:
    server = Server()
    server.args = ("--port", "0", "--tls-port", str(server.port), "--tls-auth-clients", clients)
    server.args += ("--tls-cert-file", certificates[f"{name}.crt"], "--tls-key-file", certificates[f"{name}.key"])
    server.args += ("--tls-ca-cert-file", certificates["ca.crt"])
    with server:
        yield server


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    needs("the openssl command", shutil.which("openssl"), "apt-get install openssl")
    return Certificates(tmp_path_factory.mktemp("certificates")).make()


@pytest.fixture(scope="session")
def tls_program(certificates: Certificates) -> str:
    """A server that supports TLS: the one under test, or one of the system."""
    named = os.environ.get("REDLOCK_SERVER")
    folders = os.environ["PATH"].split(os.pathsep)
    others = [str(Path(folder, name)) for folder in folders for name in ("redis-server", "valkey-server")]
    with pytest.MonkeyPatch.context() as patch:
        for candidate in ([named] if named else []) + [path for path in others if os.access(path, os.X_OK)]:
            patch.setenv("REDLOCK_SERVER", candidate)
            with suppress(ServerStartError), tls_server(certificates):
                return candidate
    needs("a server with TLS", None, "apt-get install redis-server, or set REDLOCK_SERVER to one")
    return ""


@pytest.fixture
def tls(certificates: Certificates, tls_program: str, monkeypatch: pytest.MonkeyPatch) -> Certificates:
    """Certificates, and a server with TLS that a test can start."""
    monkeypatch.setenv("REDLOCK_SERVER", tls_program)
    return certificates


@pytest.fixture(scope="session")
def secure(certificates: Certificates, tls_program: str) -> Iterator[Server]:
    """A running server with TLS, shared by all tests of this process."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("REDLOCK_SERVER", tls_program)
            server = stack.enter_context(tls_server(certificates))
        yield server
