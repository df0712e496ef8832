"""The S3 server of a benchmark: moto in a separate process, or an existing server."""

import atexit
import contextlib
import functools
import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NAME = "bench"
SERVER_ENV = "SPOTFIT_BENCH_S3"
"""Names an existing server to use instead of moto; its keys come from the environment."""
TIMEOUT_S = 60.0
_DELETE_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Server:
    """The server's address and credentials."""

    address: str
    key_id: str
    key: str
    certificate: str = ""
    """Path of a self-signed certificate; empty without TLS."""

    @property
    def url(self) -> str:
        """The storage path of the bucket, accepted by all sides."""
        return self.url_of("runs")

    def url_of(self, prefix: str) -> str:
        """Return the URL of the objects with that prefix."""
        url = urlsplit(self.address)
        options = f"endpoint_override={url.netloc}&scheme={url.scheme}&region=us-east-1"
        return f"s3://{NAME}/{prefix}?{options}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of its clients."""
        keys = {"AWS_ACCESS_KEY_ID": self.key_id, "AWS_SECRET_ACCESS_KEY": self.key}
        return keys | ({"SSL_CERT_FILE": self.certificate} if self.certificate else {})

    def clear(self) -> None:
        """Create the bucket if necessary, and delete its objects."""
        client = self._client()
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=NAME)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=NAME):
            found = [{"Key": one["Key"]} for one in page.get("Contents", ())]
            for first in range(0, len(found), _DELETE_BATCH):
                batch = {"Objects": found[first : first + _DELETE_BATCH], "Quiet": True}
                client.delete_objects(Bucket=NAME, Delete=batch)

    def upload(self, folder: Path, prefix: str) -> None:
        """Create the bucket if necessary, and upload the files of a folder."""
        client = self._client()
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=NAME)
        for path in sorted(folder.iterdir()):
            client.upload_file(str(path), NAME, f"{prefix}/{path.name}")

    def _client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.address,
            region_name="us-east-1",
            aws_access_key_id=self.key_id,
            aws_secret_access_key=self.key,
            verify=self.certificate or None,
        )


def server_name() -> str:
    """Return the name of the server, for the table of results."""
    return os.environ.get(SERVER_ENV, "moto")


@functools.cache
def server(*, encrypted: bool = False) -> Server:
    """Run moto in a process that ends with this one, or use the server in `SPOTFIT_BENCH_S3`."""
    if address := os.environ.get(SERVER_ENV):
        keys = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        return Server(address, *keys)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    certificate, key = _self_signed_certificate() if encrypted else ("", "")
    program = str(Path(__file__).with_name("serialized_moto.py"))
    command = [sys.executable, program, "-H", "127.0.0.1", "-p", str(port)]
    running = subprocess.Popen(
        [*command, "-c", certificate, "-k", key] if encrypted else command,
        env=os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**31)},  # keep bodies in memory
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(running.kill)
    _wait_for(port)
    scheme = "https" if encrypted else "http"
    return Server(f"{scheme}://127.0.0.1:{port}", "bench", "bench", certificate)


def _self_signed_certificate() -> tuple[str, str]:
    """Write a certificate for loopback and its key to files that are removed at exit."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "certificate").write_bytes(certificate.public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(folder / "certificate"), str(folder / "key")


def with_bandwidth_limit(server: Server, gbit: float) -> Server:
    """Return the server behind a proxy that limits its responses to `gbit` per second."""
    return _behind_proxy(server, "--gbit", str(gbit))


def with_delay(server: Server, delay_ms: float) -> Server:
    """Return the server behind a proxy that delays every request."""
    return _behind_proxy(server, "--delay-ms", str(delay_ms))


def _behind_proxy(server: Server, *options: str) -> Server:
    url = urlsplit(server.address)
    command = [sys.executable, str(Path(__file__).with_name("bandwidth_proxy.py")), url.netloc]
    proxy = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    atexit.register(proxy.kill)
    assert proxy.stdout is not None
    return replace(server, address=f"{url.scheme}://127.0.0.1:{int(proxy.stdout.readline())}")


def _wait_for(port: int) -> None:
    deadline = time.time() + TIMEOUT_S
    while True:
        try:
            http.client.HTTPConnection("127.0.0.1", port, timeout=1.0).connect()
        except OSError:
            if time.time() > deadline:
                raise
            time.sleep(0.1)
        else:
            return
