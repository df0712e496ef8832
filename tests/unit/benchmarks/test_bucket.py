"""The server of the races: empty when it is asked to be, with its bucket in place."""

from collections.abc import Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from benchmarks.bucket import CREDENTIALS, NAME, Server


@pytest.fixture
def server() -> Iterator[Server]:
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield Server(running.get_host_and_port()[1])
    running.stop()


def test_nothing_is_left_of_the_run_before(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{server.port}", region_name="us-east-1")
    for _ in range(2):
        server.empty()
        assert "Contents" not in s3.list_objects_v2(Bucket=NAME)
        s3.put_object(Bucket=NAME, Key="runs/x", Body=b"x")


def test_both_sides_find_it_by_one_address() -> None:
    address = "s3://bench/runs?endpoint_override=127.0.0.1:5&scheme=http&region=us-east-1"
    assert Server(5).url == address
