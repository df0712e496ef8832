"""Fixtures of live tests: warm fork servers, a cloud per test, an S3 server."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from spotfit.fork_server.fork_client import ForkServerPool
from tests.live.cloud import LiveTestCloud
from tests.live.worker_pool_harness import WorkerPoolHarness

LIVE_TESTS = Path(__file__).parent
NO_RERUN_FILES = ("test_chaos.py",)
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


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[LiveTestCloud]:
    """Machines and a bucket for one test, which fails if anything remains."""
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
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(f"{endpoint}/moto-api/reset", b"").close()  # noqa: S310 - loopback
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="runs")
    yield endpoint
    server.stop()
