"""Azure's word that a VM goes: half a minute ahead, among events of others, never acknowledged."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from spotfit.agent.notices.azure import AzureMetadata, AzureNotice
from spotfit.host import clocks
from spotfit.host.clocks import SystemClock
from spotfit_localsim.wire.http import Reply, Request, Server

NAME = "vmss_7"


class Instance:
    """A metadata service."""

    def __init__(self) -> None:
        self.name = NAME
        self.events: list[dict[str, Any]] = []
        self.asked: list[Request] = []

    def answer(self, request: Request) -> Reply:
        self.asked.append(request)
        if request.headers.get("metadata") != "true":
            return Reply.json({"error": "Bad request. Required metadata header"}, 400)
        if request.path == "/metadata/scheduledevents":
            return Reply.json({"DocumentIncarnation": len(self.asked), "Events": self.events})
        if request.path == "/metadata/instance/compute/name" and self.name:
            return Reply(200, self.name.encode())
        return Reply(404)

    def will(self, kind: str, *names: str, in_s: float | None = 40.0, event_id: str = "1") -> None:
        """From now on that event is told."""
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
def server(instance: Instance) -> Iterator[Server]:
    server = Server(instance.answer)
    yield server
    server.close()


@pytest.fixture
def metadata(server: Server) -> AzureMetadata:
    return AzureMetadata(server.url)


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy", "Reboot"])
def test_what_ends_processes_is_a_notice_with_its_time(
    metadata: AzureMetadata, instance: Instance, kind: str
) -> None:
    assert metadata.look() is None
    instance.will(kind)
    notice = metadata.look()
    assert notice is not None
    assert notice.reason == f"Azure will {kind.lower()} it"
    assert notice.seconds_left == pytest.approx(40.0, abs=10.0)
    assert notice.deadline_ms == pytest.approx(clocks.wall_ms() + 40_000, abs=10_000)


def test_an_event_that_has_begun_leaves_nothing(
    metadata: AzureMetadata, instance: Instance
) -> None:
    instance.will("Preempt", in_s=None)
    notice = metadata.look()
    assert notice is not None
    assert notice.seconds_left == pytest.approx(0.0, abs=1.0)
    assert notice.deadline_ms > 0


def test_the_earliest_of_several_counts(metadata: AzureMetadata, instance: Instance) -> None:
    instance.will("Reboot", in_s=900.0)
    instance.will("Preempt", in_s=30.0, event_id="2")
    notice = metadata.look()
    assert notice is not None
    assert "preempt" in notice.reason


def test_events_of_others_are_not_ours(metadata: AzureMetadata, instance: Instance) -> None:
    """Azure tells every VM of all in its placement group."""
    instance.will("Preempt", "vmss_8", "vmss_70")
    assert metadata.look() is None
    instance.will("Preempt", "vmss_9", NAME.upper())
    assert metadata.look() is not None


def test_who_does_not_know_its_name_does_not_flee_from_events_of_others(
    metadata: AzureMetadata, instance: Instance
) -> None:
    instance.name = ""
    instance.will("Preempt")
    assert metadata.look() is None
    instance.name = NAME
    assert metadata.look() is not None


def test_a_pause_of_seconds_is_told_once_and_is_no_notice(
    metadata: AzureMetadata, instance: Instance, capsys: pytest.CaptureFixture[str]
) -> None:
    instance.will("Freeze")
    assert [metadata.look() for _ in range(3)] == [None] * 3
    assert capsys.readouterr().err.count("Freeze") <= 1


def test_no_event_is_ever_acknowledged(metadata: AzureMetadata, instance: Instance) -> None:
    """That would begin it at once."""
    instance.will("Preempt")
    instance.will("Freeze", event_id="2")
    metadata.look()
    assert {request.method for request in instance.asked} == {"GET"}


def test_a_service_that_does_not_know_events_gives_no_notice(server: Server) -> None:
    assert AzureMetadata(f"{server.url}/elsewhere").look() is None


@pytest.mark.real_time("a source asks in a thread of its own")
def test_an_agent_asks_where_azure_s_own_libraries_ask(
    server: Server, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", f"{server.url}/")
    instance.will("Preempt")
    source = AzureNotice(lambda: None, every_s=0.01)
    clock = SystemClock()
    give_up_at = clock.now() + 20
    while source.poll(clock.now()) is None:
        assert clock.now() < give_up_at
        clock.wait(0.02)
    source.close()
