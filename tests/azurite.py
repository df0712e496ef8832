"""Azurite, Microsoft's emulator of Azure Storage, if it is installed (`make azurite`)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import shutil
import subprocess
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import urlsplit

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The well-known credentials of Azurite: https://learn.microsoft.com/azure/storage/common/storage-use-azurite."""
CONTAINER = "bucket"
_LOCAL_BIN = Path(__file__).parents[1] / ".azurite" / "node_modules" / ".bin"
_LISTENING_PREFIX = "successfully listens on "


def find_azurite() -> str | None:
    """Return the blob emulator on PATH or of `make azurite`."""
    return shutil.which("azurite-blob") or shutil.which("azurite-blob", path=_LOCAL_BIN)


@contextlib.contextmanager
def run_azurite(program: str) -> Iterator[str]:
    """Run the emulator in memory with an empty container; yields its URL."""
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
    where = ["--blobHost", "127.0.0.1", "--blobPort", "0"]
    with subprocess.Popen(
        [program, *options, *where], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            lines = (line.strip() for line in server.stdout)
            line = next(line for line in lines if _LISTENING_PREFIX in line)
            url = f"{line.partition(_LISTENING_PREFIX)[2]}/{ACCOUNT}"
            _make_container(url)
            yield url
        finally:
            server.kill()


def _make_container(url: str) -> None:
    """Create the container by a signed request, without a client library."""
    amz_headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{text}\n" for name, text in amz_headers.items())
    path = f"{urlsplit(url).path}/{CONTAINER}"
    signed = f"PUT{chr(10) * 12}{named}/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
    authorization = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    with contextlib.closing(connection):
        headers = {**amz_headers, "Authorization": authorization, "Content-Length": "0"}
        connection.request("PUT", f"{path}?restype=container", headers=headers)
        reply = connection.getresponse()
        assert reply.status == 201, reply.read()
