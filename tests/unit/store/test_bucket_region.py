import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from spotfit.store import bucket_region
from spotfit.store.bucket_region import resolve_region
from spotfit.store.factory import open_store, with_bucket_region
from spotfit.store.url import RootUrl


class S3Server(BaseHTTPRequestHandler):
    """Answers HEAD requests of a bucket as S3 does, in a region."""

    status: ClassVar[int] = 200
    region: ClassVar[str] = "eu-west-1"
    requests: ClassVar[list[tuple[str, str, str]]]

    def do_HEAD(self) -> None:  # http.server's name
        authorization = self.headers.get("authorization", "")
        self.requests.append((self.command, self.path, authorization))
        self.send_response(self.status)
        if self.region:
            self.send_header("x-amz-bucket-region", self.region)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Discard the log."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[S3Server]]:
    handler = type("Handler", (S3Server,), {"requests": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{http.server_port}/")
        yield handler
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 301, 400, 403])
def test_region_comes_from_the_header_of_any_answer(server: type[S3Server], status: int) -> None:
    server.status = status
    assert resolve_region(RootUrl.parse("s3://runs.example/folder")) == "eu-west-1"
    assert server.requests == [("HEAD", "/runs.example", "")], "one request, without credentials"


def test_missing_header_gives_no_region(server: type[S3Server]) -> None:
    server.status, server.region = 404, ""
    assert resolve_region(RootUrl.parse("s3://missing")) == ""


@pytest.mark.parametrize(
    "text",
    [
        "s3://runs?region=us-west-2",
        "s3://runs?endpoint_url=http://127.0.0.1:9",
        "gs://runs",
        "az://runs?account_name=a",
        "/runs",
    ],
)
def test_no_request_is_sent_if_the_url_needs_no_region(server: type[S3Server], text: str) -> None:
    assert resolve_region(RootUrl.parse(text)) == ""
    assert not server.requests


def test_unreachable_endpoint_gives_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    assert resolve_region(RootUrl.parse("s3://runs")) == ""


@pytest.mark.parametrize(
    ("region", "endpoint"),
    [
        (None, "https://s3.amazonaws.com"),
        ("eu-west-1", "https://s3.amazonaws.com"),
        ("cn-north-1", "https://s3.cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", "https://s3.us-gov-west-1.amazonaws.com"),
    ],
)
def test_bucket_is_looked_up_in_the_partition_of_the_environment(
    region: str | None, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    if region is not None:
        monkeypatch.setenv("AWS_REGION", region)
    requested: list[str] = []

    def fetch_headers(url: str) -> dict[str, str]:
        requested.append(url)
        return {}

    monkeypatch.setattr(bucket_region, "_fetch_headers", fetch_headers)
    resolve_region(RootUrl.parse("s3://runs"))
    assert requested == [f"{endpoint}/runs"]


def test_store_keeps_its_credentials_and_gets_the_region_in_its_url(
    server: type[S3Server],
) -> None:
    keys = {"access_key_id": "key", "secret_access_key": "secret"}
    store = with_bucket_region(open_store("s3://runs/folder", credentials=keys))
    assert store.url == "s3://runs/folder?region=eu-west-1"
    assert getattr(store, "credentials", None) == keys
