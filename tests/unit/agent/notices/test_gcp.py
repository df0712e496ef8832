"""Tests of the Google notice source."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit.agent.notices.gcp import GceMetadata, GcpNoticeSource
from spotfit.host.system import SystemClock
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse, WireServer

pytestmark = pytest.mark.real_time("the metadata server holds its responses")
_BASE = "/computeMetadata/v1/instance/"


class Instance:
    """A metadata server."""

    def __init__(self) -> None:
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.requests: list[dict[str, str]] = []

    def answer(self, request: WireRequest) -> WireResponse:
        if request.headers.get("metadata-flavor") != "Google":
            return WireResponse(403)
        if request.path == f"{_BASE}maintenance-event":
            return WireResponse(200, self.maintenance.encode())
        if request.path != f"{_BASE}preempted":
            return WireResponse(404)
        self.requests.append(dict(request.query))
        same = request.query.get("last_etag") == self.preempted
        headers = {"ETag": self.preempted}
        return WireResponse(200, self.preempted.encode(), headers, hold_s=0.2 if same else 0.0)


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def server(instance: Instance) -> Iterator[WireServer]:
    server = WireServer(instance.answer)
    yield server
    server.close()


@pytest.fixture
def metadata(server: WireServer) -> GceMetadata:
    return GceMetadata(server.url)


def test_no_notice_before_the_preemption(metadata: GceMetadata, instance: Instance) -> None:
    assert metadata.check() is None
    instance.preempted = "TRUE"
    notice = metadata.check()
    assert notice is not None
    assert notice.reason == "Google preempts the VM"
    assert notice.seconds_left == 30.0


def test_the_configured_grace_period_is_used(
    metadata: GceMetadata, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_SIGNAL_GRACE_S", "150")
    instance.preempted = "TRUE"
    notice = metadata.check()
    assert notice is not None
    assert notice.seconds_left == 150.0


def test_later_requests_are_long_polls(metadata: GceMetadata, instance: Instance) -> None:
    metadata.check()
    metadata.check()
    assert instance.requests[0] == {}
    assert instance.requests[-1] == {
        "wait_for_change": "true",
        "timeout_sec": "3",
        "last_etag": "FALSE",
    }


def test_only_terminating_maintenance_is_a_notice(
    metadata: GceMetadata, instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    assert [metadata.check() for _ in range(3)] == [None] * 3
    assert capsys.readouterr().err.count("MIGRATE") <= 1
    instance.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    notice = metadata.check()
    assert notice is not None
    assert "maintenance" in notice.reason


def test_the_endpoint_variable_of_google_is_used(
    server: WireServer, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", f"{server.host}:{server.port}")
    instance.preempted = "TRUE"
    source = GcpNoticeSource(lambda: None, interval_s=0.01)
    clock = SystemClock()
    deadline_s = clock.now() + 20
    while source.poll(clock.now()) is None:
        assert clock.now() < deadline_s
        clock.wait(0.02)
    source.close()
