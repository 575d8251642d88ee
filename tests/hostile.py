"""
A hostile server: a relay to an honest server that answers one kind of request with an attack.

It is a process of its own, so that the processor time and the memory of a test are those of the client alone. The kinds
of request are ``STAGES``; ``FORMS`` are what it can answer. ``rediss`` is Redis with TLS, where ``handshake`` attacks
every connection before its first request. Other replies of Redis are in tests/unit/locking/test_wire.py.
"""

import json
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from urllib.parse import urlsplit

STAGES = ("auth", "greeting", "script", "survey", "subscription")
# Other sizes and pieces are those of tests/unit/consensus/test_bounded.py.
OF_STORES = ("nested", "lines", "slow", "types", "control")
FORMS = {
    "redis": ("lines", "pieces", "slow", "control"),
    "rediss": ("lines", "handshake"),
    "etcd": OF_STORES,
    "zookeeper": OF_STORES,
}
LOUD = "\x1b[31;1m\x07\x00evil\r\n\x9b2J\u202e\x85second line"
MANY = 3000  # a reply that never ends is sent in this many pieces of up to 64 kB

Attack = Iterator[bytes]


@dataclass
class Hostile:
    """The process of a hostile server in front of the honest one; *options* are those in its URL."""

    kind: str
    honest: str
    process: "subprocess.Popen[str]"
    port: int
    options: str
    stage: str = ""

    @property
    def url(self) -> str:
        """Its URL, with a user if the login is attacked."""
        user = "default:sesame@" if self.stage == "auth" or self.kind in ("redis", "rediss") else ""
        return f"{self.kind}://{user}127.0.0.1:{self.port}{self.options}"

    def attack(self, stage: str, form: str) -> None:
        """Answer the requests of one kind like this from now on; other requests reach the honest server."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stage = stage
        self.process.stdin.write(json.dumps([stage, form]) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ready\n"


@contextmanager
def hostile(kind: str, honest: str, certificates: Path | None = None) -> Iterator[Hostile]:
    """Run a hostile server in front of the honest one with this URL, on this machine; with certificates, it has TLS."""
    command = [sys.executable, str(Path(__file__)), kind, str(urlsplit(honest).port)]
    options = ""
    if certificates is not None:
        command += [str(certificates / "server.crt"), str(certificates / "server.key")]
        options = f"?ssl_ca_certs={certificates / 'ca.crt'}"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Hostile(kind, honest, process, int(process.stdout.readline()), options)
        finally:
            process.kill()


# What follows runs in that process.


def endless(piece: bytes) -> Attack:
    """Send a piece again and again, in large writes."""
    return repeat(piece * max(1, 65_536 // len(piece)), MANY)


def in_redis(stage: str, form: str) -> Attack:
    """Return the answer of a Redis server."""
    match form:
        case "lines":
            return endless(b"+OK\r\n")
        case "pieces":
            return chain([b"$900000\r\n"], repeat(b"xy", 450_000))
        case "slow":
            return (byte.to_bytes() for byte in b"$100\r\n" + b"x" * 100)
    if stage == "greeting":
        info = f"run_id:{'a' * 40}\r\nredis_version:7{LOUD}\r\nredis_mode:{LOUD * 5000}\r\n".encode()
        return iter([b"$%d\r\n%s\r\n$-1\r\n" % (len(info), info)])
    if stage == "subscription":
        text = LOUD.encode()
        return chain(
            [b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n"],
            endless(b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$%d\r\n%s\r\n" % (len(text), text)),
        )
    if stage == "script":
        text = f"BUSY 5 1795000000000000 5000 -1 {LOUD * 1000}".encode()
        return iter([b"$%d\r\n%s\r\n" % (len(text), text)])
    if stage == "survey":
        value = "a" * 32 + json.dumps({**dict.fromkeys(("host", "kind", "label", "ref"), LOUD), "pid": 1, "since": 1.0})
        row = json.dumps(["{" + LOUD.replace("\r\n", "") + "}", value, 5000, "1795000000000000"])
        parts = ["LISTED", "0", "1795000000000000", "1", row, "[]", "ERR " + LOUD, ""]
        return iter([b"*8\r\n" + b"".join(b"$%d\r\n%s\r\n" % (len(one), one) for one in map(str.encode, parts))])
    return iter([f"-ERR {LOUD.replace(chr(13) + chr(10), '')}\r\n".encode() * 5])


def asks_redis(stage: str, data: bytes) -> bool:
    """Return whether this is the kind of request of a client of Redis."""
    survey, greeting = b"LONGEST_WAITER" in data, b"\r\nINFO\r\n" in data
    return {
        "auth": b"\r\nAUTH\r\n" in data,
        "greeting": greeting,
        "survey": survey,
        "script": b"\r\nEVAL" in data and not greeting and not survey,
        "subscription": b"\r\nSUBSCRIBE\r\n" in data,
    }[stage]


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HEADER = {"cluster_id": "1", "member_id": "1", "raft_term": "1"}


def in_etcd(stage: str, form: str) -> Attack:
    """Return the answer of a member of etcd."""
    match form:
        case "nested":
            body = chain([b'{"header":{},"kvs":[['], islice(repeat(b"[],{}," * 8_000), 40), [b"1]]}"])
            return chain([CHUNKED], (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in body), [b"0\r\n\r\n"])
        case "lines":
            return chain([b"HTTP/1.1 100 Continue\r\n\r\n" * 50] * 50, [OK], endless(b"X-Y: z\r\n"))
        case "slow":
            return (byte.to_bytes() for byte in CHUNKED + b'40\r\n{"header":' + b" " * 100)
        case "types":
            reply = {"header": 7, "leader": [], "responses": 5, "succeeded": {}, "kvs": {"a": 1}, "token": [[]]}
            return iter([http(reply)] * 5)
    if stage == "greeting":
        return iter([http({"header": HEADER, "leader": "1", "version": LOUD * 5000})] * 5)
    if stage == "subscription":
        line = json.dumps({"result": {"events": [{"kv": {"value": "eyJ0byI6WyJcdTAwMWIiXX0="}}]}}).encode() + b"\n"
        return chain([CHUNKED], endless(b"%x\r\n%s\r\n" % (len(line), line)))
    return iter([http({"error": LOUD, "message": LOUD, "code": 2}, "500 " + LOUD.split("\r")[0])] * 5)


def http(reply: object, status: str = "200 OK") -> bytes:
    body = json.dumps(reply).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def asks_etcd(stage: str, data: bytes) -> bool:
    """Return whether this is the kind of request of a client of etcd."""
    return {
        "auth": b"/v3/auth/" in data,
        "greeting": b"/v3/maintenance/status" in data,
        "script": b"/v3/kv/txn" in data,
        "survey": b"range_end" in data,
        "subscription": b"/v3/watch" in data,
    }[stage]


CONNECT, EXISTS, GET, CHILDREN, MULTI, AUTH = 0, 3, 4, 8, 14, 100


def in_zookeeper(stage: str, form: str, xid: int = 0, op: int = 0) -> Attack:
    """Return the answer of a member of ZooKeeper to a request with this number."""
    head = b"" if op == CONNECT else struct.pack(">iqi", xid, 1, 0)
    match form:
        case "nested":  # results of a transaction, or names
            return iter([frame(head + (struct.pack(">i?i", 13, False, 0) + struct.pack(">i", -1)) * 140_000)])
        case "lines":  # events that nobody asked for
            return endless(frame(struct.pack(">iqi", -1, 1, 0) + struct.pack(">ii", 3, 3) + field(b"/a")))
        case "slow":
            return (byte.to_bytes() for byte in frame(head + b"x" * 100))
        case "types":
            return iter([frame(head + struct.pack(">iqi", -1, -1, -1)) * 5])
    stat = struct.pack(">qqqqiiiqiiq", 5, 5, 5, 5, 1, 1, 1, 0, 9, 0, 5)
    if op == CONNECT:
        return iter([frame(struct.pack(">iiq", 0, 10_000, 7) + field(LOUD.encode()))])
    if op == CHILDREN:
        return iter([frame(head + struct.pack(">i", 1) + field(LOUD.encode()))])
    return iter([frame(head + field(LOUD.encode() * 1000) + stat)])


def frame(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def field(content: bytes) -> bytes:
    return struct.pack(">i", len(content)) + content


def asks_zookeeper(stage: str, op: int, watched: bool) -> bool:
    """Return whether this is the kind of request of a client of ZooKeeper."""
    return {
        "auth": op == AUTH,
        "greeting": op == CONNECT,
        "script": op in (MULTI, GET),
        "survey": op == CHILDREN,
        "subscription": op == GET and watched,
    }[stage]


@dataclass
class Relay:
    """One connection of a client, and the one to the honest server."""

    client: socket.socket
    server: socket.socket
    kind: str
    attacked: list[str]  # the stage and the form, which change
    tls: ssl.SSLContext | None
    begun: bool = False

    def run(self) -> None:
        """Serve the connection until one side ends it."""
        with suppress(OSError), self.server, self.client:
            if self.attacked[1] == "handshake":
                self.send(byte.to_bytes() for byte in b"\x16\x03\x03\x40\x00" + b"\x02" * 100)
            elif self.tls:
                with self.tls.wrap_socket(self.client, server_side=True) as self.client:
                    self.relay()
            else:
                self.relay()

    def relay(self) -> None:
        """Pass on what comes until a request is to be attacked."""
        while True:
            for source in select.select([self.client, self.server], [], [])[0]:
                data = source.recv(2**20)
                while isinstance(source, ssl.SSLSocket) and source.pending():
                    data += source.recv(2**20)
                if not data:
                    return
                if source is self.server:
                    self.client.sendall(data)
                elif attack := self.attack_on(data):
                    return self.send(attack)
                else:
                    self.server.sendall(data)

    def attack_on(self, data: bytes) -> Attack | None:
        """Return the attack if this is the kind of request to attack."""
        stage, form = self.attacked
        requests = list(self.requests(data)) if self.kind == "zookeeper" else []
        if not stage:
            return None
        if self.kind in ("redis", "rediss") and asks_redis(stage, data):
            login = b"+OK\r\n" if b"\r\nAUTH\r\n" in data and stage != "auth" else b""
            named = b"+OK\r\n" if b"\r\nHELLO\r\n" in data and stage == "subscription" else b""
            return chain([login, named], in_redis(stage, form))
        if self.kind == "etcd" and asks_etcd(stage, data):
            return in_etcd(stage, form)
        for xid, op, watched in requests:
            if asks_zookeeper(stage, op, watched):
                return in_zookeeper(stage, form, xid, op)
        return None

    def requests(self, data: bytes) -> Iterator[tuple[int, int, bool]]:
        """Yield number, kind and watch of each request; the first packet of a connection begins the session."""
        at = 0
        while at + 4 <= len(data):
            (size,) = struct.unpack_from(">i", data, at)
            xid, op = struct.unpack_from(">ii", data, at + 4)
            yield (xid, op, data[at + 3 + size] == 1) if self.begun else (0, CONNECT, False)
            self.begun = True
            at += 4 + size

    def send(self, attack: Attack) -> None:
        """Send an attack, and keep the connection open."""
        slow = self.attacked[1] in ("slow", "handshake")
        self.client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in attack:
            self.client.sendall(piece)
            if slow:
                time.sleep(1)
        while self.client.recv(65_536):
            pass


def main(kind: str, port: int, *certificate: str) -> None:
    """Serve until the test ends; each line of the input is a stage and a form."""
    attack = ["", ""]
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER) if certificate else None
    if tls:
        tls.load_cert_chain(*certificate)

    def serve() -> None:
        while True:
            client, _ = listener.accept()
            relay = Relay(client, socket.create_connection(("127.0.0.1", port)), kind, attack, tls)
            threading.Thread(target=relay.run, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=serve, daemon=True).start()
        for line in sys.stdin:
            attack[:] = json.loads(line)
            print("ready", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
