"""An S3 server for both sides of a comparison: moto in a process of its own, or another one."""

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
GIVEN = "SPOTFIT_BENCH_S3"
"""The variable that names another server than moto; its keys are those of the environment."""
PATIENCE_S = 60.0
_FEW = 1000


@dataclass(frozen=True, slots=True)
class Server:
    """The server's address and credentials."""

    address: str
    key_id: str
    key: str
    certificate: str = ""
    """The file with its own certificate, where it encrypts and no authority vouches for it."""

    @property
    def url(self) -> str:
        """The bucket, as every side takes it for its storage path."""
        there = urlsplit(self.address)
        options = f"endpoint_override={there.netloc}&scheme={there.scheme}&region=us-east-1"
        return f"s3://{NAME}/runs?{options}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of its clients."""
        keys = {"AWS_ACCESS_KEY_ID": self.key_id, "AWS_SECRET_ACCESS_KEY": self.key}
        return keys | ({"SSL_CERT_FILE": self.certificate} if self.certificate else {})

    def empty(self) -> None:
        """Have the bucket, and nothing in it."""
        client = self._client()
        with contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
            client.create_bucket(Bucket=NAME)
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=NAME):
            found = [{"Key": one["Key"]} for one in page.get("Contents", ())]
            for first in range(0, len(found), _FEW):
                few = {"Objects": found[first : first + _FEW], "Quiet": True}
                client.delete_objects(Bucket=NAME, Delete=few)

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


def name() -> str:
    """Which server it is, for whoever reads the figures."""
    return os.environ.get(GIVEN, "moto")


@functools.cache
def server(*, encrypted: bool = False) -> Server:
    """Run moto in a process that ends with this one, or use the server in `SPOTFIT_BENCH_S3`."""
    if given := os.environ.get(GIVEN):
        keys = (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
        return Server(given, *keys)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    certificate, key = _certified() if encrypted else ("", "")
    program = str(Path(__file__).with_name("one_creator.py"))
    command = [sys.executable, program, "-H", "127.0.0.1", "-p", str(port)]
    running = subprocess.Popen(
        [*command, "-c", certificate, "-k", key] if encrypted else command,
        env=os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**31)},  # no disk is measured
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(running.kill)
    _wait_for(port)
    scheme = "https" if encrypted else "http"
    return Server(f"{scheme}://127.0.0.1:{port}", "bench", "bench", certificate)


def _certified() -> tuple[str, str]:
    """Files with a certificate for this address and its key; they go with this process."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "bench")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(here, critical=False)
        .sign(key, hashes.SHA256())
    )
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "certificate").write_bytes(certificate.public_bytes(pem))
    (folder / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(folder / "certificate"), str(folder / "key")


def narrowed(server: Server, gbit: float) -> Server:
    """The same to a machine that gets so many gigabits a second from it, all together."""
    there = urlsplit(server.address)
    command = [sys.executable, str(Path(__file__).with_name("narrow.py")), there.netloc]
    wire = subprocess.Popen([*command, "--gbit", str(gbit)], stdout=subprocess.PIPE, text=True)
    atexit.register(wire.kill)
    assert wire.stdout is not None
    return replace(server, address=f"{there.scheme}://127.0.0.1:{int(wire.stdout.readline())}")


def _wait_for(port: int) -> None:
    give_up_at = time.time() + PATIENCE_S
    while True:
        try:
            http.client.HTTPConnection("127.0.0.1", port, timeout=1.0).connect()
        except OSError:
            if time.time() > give_up_at:
                raise
            time.sleep(0.1)
        else:
            return
