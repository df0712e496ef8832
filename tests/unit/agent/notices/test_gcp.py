"""Google's word that a VM goes: asked for with patience, and never a false one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spotfit.agent.notices.gcp import GceMetadata, GcpNotice
from spotfit.host.clocks import SystemClock
from spotfit_localsim.wire.http import Reply, Request, Server

pytestmark = pytest.mark.real_time("the metadata server keeps its answers back")
_BASE = "/computeMetadata/v1/instance/"


class Instance:
    """A metadata server."""

    def __init__(self) -> None:
        self.preempted = "FALSE"
        self.maintenance = "NONE"
        self.asked: list[dict[str, str]] = []

    def answer(self, request: Request) -> Reply:
        if request.headers.get("metadata-flavor") != "Google":
            return Reply(403)
        if request.path == f"{_BASE}maintenance-event":
            return Reply(200, self.maintenance.encode())
        if request.path != f"{_BASE}preempted":
            return Reply(404)
        self.asked.append(dict(request.query))
        same = request.query.get("last_etag") == self.preempted
        headers = {"ETag": self.preempted}
        return Reply(200, self.preempted.encode(), headers, hold_s=0.2 if same else 0.0)


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def server(instance: Instance) -> Iterator[Server]:
    server = Server(instance.answer)
    yield server
    server.close()


@pytest.fixture
def metadata(server: Server) -> GceMetadata:
    return GceMetadata(server.url)


def test_nothing_is_said_until_the_vm_is_preempted(
    metadata: GceMetadata, instance: Instance
) -> None:
    assert metadata.look() is None
    instance.preempted = "TRUE"
    notice = metadata.look()
    assert notice is not None
    assert notice.reason == "Google preempts it"
    assert notice.seconds_left == 30.0


def test_who_knows_how_long_the_vm_stays_says_so(
    metadata: GceMetadata, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTFIT_SIGNAL_GRACE_S", "150")
    instance.preempted = "TRUE"
    notice = metadata.look()
    assert notice is not None
    assert notice.seconds_left == 150.0


def test_it_asks_at_once_first_and_then_for_a_change(
    metadata: GceMetadata, instance: Instance
) -> None:
    metadata.look()
    metadata.look()
    assert instance.asked[0] == {}
    assert instance.asked[-1] == {
        "wait_for_change": "true",
        "timeout_sec": "3",
        "last_etag": "FALSE",
    }


def test_a_vm_that_moves_to_another_host_stays_and_one_that_is_ended_there_goes(
    metadata: GceMetadata, instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.maintenance = "MIGRATE_ON_HOST_MAINTENANCE"
    assert [metadata.look() for _ in range(3)] == [None] * 3
    assert capsys.readouterr().err.count("MIGRATE") <= 1
    instance.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
    notice = metadata.look()
    assert notice is not None
    assert "maintenance" in notice.reason


def test_an_agent_asks_where_google_s_own_libraries_ask(
    server: Server, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", f"{server.host}:{server.port}")
    instance.preempted = "TRUE"
    source = GcpNotice(lambda: None, every_s=0.01)
    clock = SystemClock()
    give_up_at = clock.now() + 20
    while source.poll(clock.now()) is None:
        assert clock.now() < give_up_at
        clock.wait(0.02)
    source.close()
