"""
Run redis-py's own tests of its locks against ``django_redlock.compat``: `tox run -e redis-py-suite`.

The tests come from redis-py's source distribution on PyPI; none of them is part of this repository. They run twice,
over one node and over five. All must pass except those in ``differences.toml``, each of which must fail at the line
given there.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "8.1.0"
SHA256 = "6e1a19beef9225c83efd689c7e6b7da2d5215b1f42cd13b7fc3714d0a09c7b25"
HERE = Path(__file__).parent
FILES = ("tests/test_lock.py", "tests/test_asyncio/test_lock.py")


def fetch(folder: Path) -> Path:
    """Return the folder with redis-py's tests; download and unpack them first if necessary."""
    archive, unpacked = folder / f"redis-{VERSION}.tar.gz", folder / f"redis-{VERSION}"
    if not archive.exists():
        wanted = ["--no-deps", "--no-binary", "redis", "--dest", str(folder), f"redis=={VERSION}"]
        subprocess.run([sys.executable, "-W", "ignore", "-m", "pip", "--quiet", "download", *wanted], check=True)
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"{archive} has the SHA-256 {found}, not {SHA256}: delete it, or correct run.py after a look at it.")
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return unpacked


def run(source: Path, nodes: int, arguments: list[str]) -> int:
    """Run the tests over the given number of nodes, in a process of their own; return its exit status."""
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "pytest.ini"), "--rootdir", str(source)]
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environ = os.environ | {"PYTHONPATH": path, "SUITE_NODES": str(nodes)}
    return subprocess.run([*command, *FILES, *arguments], cwd=source, env=environ, check=False).returncode


def main(folder: str, *arguments: str) -> None:
    """Fetch the tests into *folder* and run them; *arguments* are for pytest."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    source = fetch(Path(folder))
    failed = [nodes for nodes in (1, 5) if run(source, nodes, list(arguments))]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
