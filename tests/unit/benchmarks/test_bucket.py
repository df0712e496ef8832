"""The S3 server of benchmarks."""

from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from benchmarks import bucket
from benchmarks.bucket import NAME, Server


@pytest.fixture
def server() -> Iterator[Server]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield Server(f"http://127.0.0.1:{running.get_host_and_port()[1]}", "bench", "bench")
    running.stop()


def test_clear_removes_objects_of_earlier_runs(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", endpoint_url=server.address, region_name="us-east-1")
    for _ in range(2):
        server.clear()
        assert "Contents" not in s3.list_objects_v2(Bucket=NAME)
        s3.put_object(Bucket=NAME, Key="runs/x", Body=b"x")


def test_storage_url_contains_the_endpoint() -> None:
    address = "s3://bench/runs?endpoint_override=127.0.0.1:5&scheme=http&region=us-east-1"
    assert Server("http://127.0.0.1:5", "bench", "bench").url == address


def test_environment_variable_selects_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {
        "SPOTFIT_BENCH_S3": "https://there:9000",
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "x",
    }
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    assert bucket.server.__wrapped__() == Server("https://there:9000", "me", "x")
    assert bucket.server_name() == "https://there:9000"
