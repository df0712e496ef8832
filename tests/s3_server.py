"""An S3 server (moto) in a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_PROGRAM = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

app, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

def respond(environ, start_response):
    with lock:  # moto looks for the existing object and stores the new one in two steps
        return app(environ, start_response)

server = make_server("127.0.0.1", 0, respond, threaded=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
server.shutdown()
"""


@contextmanager
def run_s3_server() -> Iterator[str]:
    """Yield the URL of a server with a bucket named 'bucket', and set credentials for it."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AWS_ACCESS_KEY_ID", "test-key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "something")
            patch.setenv("AWS_REGION", "us-east-1")
            make_bucket(url)
            yield url
        assert server.stdin is not None
        server.stdin.close()


def make_bucket(url: str) -> None:
    """Create the bucket 'bucket' on an S3 server."""
    boto3 = pytest.importorskip("boto3")
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="bucket")
