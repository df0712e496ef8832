"""Fixtures of live tests: warm fork servers, machines and a bucket, an S3 server."""

from __future__ import annotations

import itertools
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import pytest
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import make_server

from benchmarks.serialized_moto import SerializedMoto
from spotfit.fork_server.fork_client import ForkServerPool
from spotfit_provisioners.local.state_dir import LocalCloudDir
from tests.live.cloud import LiveTestCloud, end_waiting_machines
from tests.live.worker_pool_harness import WorkerPoolHarness

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

LIVE_TESTS = Path(__file__).parent
NO_RERUN_FILES = ("test_chaos.py", "test_cloud_chaos.py")
"""A failure in these modules is a bug with a reproducing seed and is not rerun."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A live test that fails is rerun once, and the summary says so (RERUN).

    docs/decisions/0038-rerun-live-tests.md
    """
    if not config.pluginmanager.hasplugin("rerunfailures"):
        return
    for item in items:
        if item.path.parent == LIVE_TESTS and item.path.name not in NO_RERUN_FILES:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServerPool]:
    fork_servers = ForkServerPool()
    yield fork_servers
    fork_servers.close()


@pytest.fixture
def harness(tmp_path: Path, fork_servers: ForkServerPool) -> Iterator[WorkerPoolHarness]:
    harness = WorkerPoolHarness(tmp_path, fork_servers)
    yield harness
    harness.close()


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCloudDir]:
    """A local cloud whose machines wait for the next test; the session fails if one remains."""
    root = LocalCloudDir(tmp_path_factory.mktemp("machines") / "cloud")
    yield root
    end_waiting_machines(root)


@pytest.fixture
def cloud(tmp_path: Path, shared_root: LocalCloudDir) -> Iterator[LiveTestCloud]:
    """A bucket for one test, and machines that may have served other tests.

    A machine imports all modules at its start, which takes longer than most tests.
    """
    cloud = LiveTestCloud(tmp_path, shared_root)
    yield cloud
    cloud.close()


@pytest.fixture
def cold_cloud(tmp_path: Path) -> Iterator[LiveTestCloud]:
    """A bucket and new machines for one test, which fails if anything remains."""
    cloud = LiveTestCloud(tmp_path)
    yield cloud
    cloud.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The endpoint of an S3 server on loopback with one empty bucket, 'runs'."""
    for name, text in (
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, text)
    with _serve(SerializedMoto(create_backend_app)) as endpoint:
        urllib.request.urlopen(f"{endpoint}/moto-api/reset", b"").close()  # noqa: S310 - loopback
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="runs")
        yield endpoint


@contextmanager
def _serve(app: WSGIApplication) -> Iterator[str]:
    """Serve the application on loopback in threads of this process, and yield its URL."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _FaultyAnswers:
    """Refuses the first create of every object with 409, and every tenth request with 403 or 503.

    Requests that are refused have no effect.
    """

    def __init__(self) -> None:
        self._app = SerializedMoto(create_backend_app)
        self._request_numbers = itertools.count(1)
        self._created: set[str] = set()
        self.refusals: Counter[str] = Counter()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        number, path = next(self._request_numbers), environ["PATH_INFO"]
        if "HTTP_IF_NONE_MATCH" in environ and path not in self._created:
            self._created.add(path)
            status, code = "409 Conflict", "ConditionalRequestConflict"
        elif number % 10 == 0:
            is_denied = number % 20 == 0
            status, code = ("403", "AccessDenied") if is_denied else ("503", "SlowDown")
        else:
            answer: Iterable[bytes] = self._app(environ, start_response)
            return answer
        self.refusals[code] += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response(status, [("content-type", "application/xml")])
        return [f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()]


@pytest.fixture
def faulty_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Send requests for the buckets of `s3` to a server that refuses some; yield their counts."""
    answers = _FaultyAnswers()
    with _serve(answers) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield answers.refusals
