"""Tests of the Azure notice source."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from spotfit.agent.notices.azure import AzureMetadata, AzureNoticeSource
from spotfit.host import system
from spotfit.host.system import SystemClock
from spotfit_localsim.clouds.http_server import WireRequest, WireResponse, WireServer

NAME = "vmss_7"


class Instance:
    """A metadata service."""

    def __init__(self) -> None:
        self.name = NAME
        self.events: list[dict[str, Any]] = []
        self.requests: list[WireRequest] = []

    def answer(self, request: WireRequest) -> WireResponse:
        self.requests.append(request)
        if request.headers.get("metadata") != "true":
            return WireResponse.json({"error": "Bad request. Required metadata header"}, 400)
        if request.path == "/metadata/scheduledevents":
            return WireResponse.json(
                {"DocumentIncarnation": len(self.requests), "Events": self.events}
            )
        if request.path == "/metadata/instance/compute/name" and self.name:
            return WireResponse(200, self.name.encode())
        return WireResponse(404)

    def add_event(
        self, kind: str, *names: str, in_s: float | None = 40.0, event_id: str = "1"
    ) -> None:
        """Add an event to the document."""
        at = datetime.now(UTC) + timedelta(seconds=in_s or 0)
        event = {
            "EventId": event_id,
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(names or (NAME,)),
            "EventStatus": "Started" if in_s is None else "Scheduled",
            "NotBefore": "" if in_s is None else format_datetime(at, usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events.append(event)


@pytest.fixture
def instance() -> Instance:
    return Instance()


@pytest.fixture
def server(instance: Instance) -> Iterator[WireServer]:
    server = WireServer(instance.answer)
    yield server
    server.close()


@pytest.fixture
def metadata(server: WireServer) -> AzureMetadata:
    return AzureMetadata(server.url)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy", "Reboot"])
def test_a_terminating_event_is_a_notice_with_its_time(
    metadata: AzureMetadata, instance: Instance, kind: str
) -> None:
    assert metadata.check() is None
    instance.add_event(kind)
    notice = metadata.check()
    assert notice is not None
    assert notice.reason == f"Azure will {kind.lower()} the VM"
    assert notice.seconds_left == pytest.approx(40.0, abs=10.0)
    assert notice.deadline_ms == pytest.approx(system.wall_ms() + 40_000, abs=10_000)


def test_a_started_event_leaves_0_seconds(metadata: AzureMetadata, instance: Instance) -> None:
    instance.add_event("Preempt", in_s=None)
    notice = metadata.check()
    assert notice is not None
    assert notice.seconds_left == pytest.approx(0.0, abs=1.0)
    assert notice.deadline_ms > 0


def test_the_earliest_of_several_counts(metadata: AzureMetadata, instance: Instance) -> None:
    instance.add_event("Reboot", in_s=900.0)
    instance.add_event("Preempt", in_s=30.0, event_id="2")
    notice = metadata.check()
    assert notice is not None
    assert "preempt" in notice.reason


def test_events_of_other_vms_are_ignored(metadata: AzureMetadata, instance: Instance) -> None:
    """Azure lists the events of all VMs of a placement group."""
    instance.add_event("Preempt", "vmss_8", "vmss_70")
    assert metadata.check() is None
    instance.add_event("Preempt", "vmss_9", NAME.upper())
    assert metadata.check() is not None


def test_without_a_vm_name_events_are_ignored(metadata: AzureMetadata, instance: Instance) -> None:
    instance.name = ""
    instance.add_event("Preempt")
    assert metadata.check() is None
    instance.name = NAME
    assert metadata.check() is not None


def test_a_freeze_is_logged_once_and_is_not_a_notice(
    metadata: AzureMetadata, instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.add_event("Freeze")
    assert [metadata.check() for _ in range(3)] == [None] * 3
    assert capsys.readouterr().err.count("Freeze") <= 1


def test_no_event_is_ever_acknowledged(metadata: AzureMetadata, instance: Instance) -> None:
    """An acknowledgement would start the event at once."""
    instance.add_event("Preempt")
    instance.add_event("Freeze", event_id="2")
    metadata.check()
    assert {request.method for request in instance.requests} == {"GET"}


def test_a_service_without_events_returns_none(server: WireServer) -> None:
    assert AzureMetadata(f"{server.url}/elsewhere").check() is None


@pytest.mark.real_time("a source polls in a separate thread")
def test_the_endpoint_variable_of_azure_is_used(
    server: WireServer, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"{server.url}/")
    instance.add_event("Preempt")
    source = AzureNoticeSource(lambda: None, interval_s=0.01)
    clock = SystemClock()
    deadline_s = clock.now() + 20
    while source.poll(clock.now()) is None:
        assert clock.now() < deadline_s
        clock.wait(0.02)
    source.close()
