"""A server that speaks S3, for both sides of a race: moto, in a process of its own."""

import atexit
import contextlib
import functools
import http.client
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

NAME = "bench"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where it listens."""

    port: int

    @property
    def url(self) -> str:
        """The bucket, as every side takes it for its storage path."""
        options = f"endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"
        return f"s3://{NAME}/runs?{options}"

    def empty(self) -> None:
        """Forget all objects; the bucket is there."""
        self._ask("POST", "/moto-api/reset")
        self._ask("PUT", f"/{NAME}")

    def _ask(self, method: str, path: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request(method, path, b"")
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{method} {path}: {answer.status} {answer.reason}")


@functools.cache
def server() -> Server:
    """The one of this process, which ends with it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    running = subprocess.Popen(
        command,
        env=os.environ | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**31)},  # no disk is measured
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(running.kill)
    _wait_for(port)
    return Server(port)


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
