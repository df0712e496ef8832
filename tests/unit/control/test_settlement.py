"""The settler: which backend is asked, what is recorded, and how failures are retried."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from spotfit.control.background_calls import BackgroundCalls, SynchronousCalls
from spotfit.control.journal_writer import JournalWriter
from spotfit.control.settlement import GroupSettler
from spotfit.core.errors import MissingExtraError
from spotfit.core.ids import Token
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupRefused,
    GroupsReleased,
    GroupSubmitted,
    JournalEvent,
)
from spotfit.model.group import GroupHandle
from spotfit.store.local import MemoryStore
from spotfit.testing.builders import RUN_ID, TOKEN, a_request, a_spec, an_agent_id
from tests.unit.control.fake_provisioner import LAUNCH, DeferredCalls, FakeProvisioner

OPTIONS = {"queues": ["spot"]}
ON_CLOUD_A = a_spec(provisioner="a", provisioner_options=OPTIONS)


class SettlerHarness:
    """A fit on cloud b after one on cloud a that left groups."""

    def __init__(self, calls: BackgroundCalls | None = None, tokens: tuple[str, ...] = (TOKEN,)):
        self.cloud = FakeProvisioner()
        self.opened: list[tuple[str, dict[str, Any]]] = []
        self.open_error: Exception | None = None
        self.events: list[JournalEvent] = []
        self.ledger = Ledger(MemoryStore(), RUN_ID, an_agent_id(0))
        self.ledger.set_entry_listener(lambda _slot, _body, entry: self.events.append(entry.event))
        requests = [a_request(Token(token)) for token in tokens]
        self.plans = [self.cloud.plan(request) for request in requests]
        self.write(FitStarted(spec=ON_CLOUD_A))
        for request, plan in zip(requests, self.plans, strict=True):
            self.write(GroupPlanned(request=request, plan=plan))
        writer = JournalWriter(self.ledger, SynchronousCalls())
        writer.advance(0.0)
        self.settler = GroupSettler(writer, self.open, LAUNCH, calls or SynchronousCalls())

    def open(self, name: str, options: dict[str, Any]) -> FakeProvisioner:
        self.opened.append((name, options))
        if self.open_error is not None:
            raise self.open_error
        return self.cloud

    def write(self, *events: JournalEvent) -> None:
        for event in events:
            self.ledger.append(event, after=self.ledger.journal_view)

    def start_next_fit(self) -> None:
        self.write(FitEnded(outcome="cancelled"), FitStarted(spec=a_spec(provisioner="b")))
        self.events.clear()


def test_a_group_is_released_by_the_backend_and_options_of_its_own_fit() -> None:
    harness = SettlerHarness()
    harness.cloud.submit(harness.plans[0], LAUNCH)
    harness.start_next_fit()
    harness.settler.settle(0.0)
    assert harness.opened == [("a", OPTIONS)]
    assert harness.cloud.groups == {}
    assert harness.events == [GroupsReleased(token=TOKEN)]


def test_a_granted_group_is_cancelled_by_its_handle() -> None:
    harness = SettlerHarness()
    handle = harness.cloud.submit(harness.plans[0], LAUNCH)
    assert isinstance(handle, GroupHandle)
    harness.write(GroupSubmitted(token=TOKEN, handle=handle))
    harness.start_next_fit()
    harness.settler.settle(0.0)
    assert (harness.cloud.cancelled_tokens, harness.cloud.looked_up_tokens) == ([TOKEN], [])


def test_a_token_that_the_backend_does_not_know_is_recorded_as_refused() -> None:
    harness = SettlerHarness()
    harness.start_next_fit()
    harness.settler.settle(0.0)
    (event,) = harness.events
    assert isinstance(event, GroupRefused)
    assert event.reason == "a has no machines for it; an earlier fit left it open"
    assert harness.cloud.submitted_tokens == []


def test_groups_of_the_running_fit_are_left_alone() -> None:
    harness = SettlerHarness()
    harness.settler.settle(0.0)
    assert (harness.opened, harness.settler.wake_at(0.0)) == ([], float("inf"))
    assert not harness.settler.is_waiting


def test_a_backend_that_cannot_be_opened_is_named_once_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    harness = SettlerHarness()
    harness.start_next_fit()
    harness.open_error = MissingExtraError("sky needs the package 'sky'.", do="pip install it.")
    with caplog.at_level(logging.WARNING):
        harness.settler.settle(0.0)
        assert harness.settler.wake_at(0.0) == 2.0
        harness.settler.settle(1.9)
        assert len(harness.opened) == 1
        harness.settler.settle(2.0)
    assert len(harness.opened) == 2
    (record,) = caplog.records
    fields = vars(record)
    assert (record.msg, fields["provisioner"], fields["token"]) == ("group.unsettled", "a", TOKEN)
    assert "needs the package" in fields["reason"]
    assert "spotfit sweep" in fields["do"]
    assert harness.events == []
    harness.open_error = None
    harness.settler.settle(100.0)
    assert harness.ledger.journal_view.unsettled_groups == {}


def test_retries_slow_down_to_five_minutes() -> None:
    harness = SettlerHarness()
    harness.start_next_fit()
    harness.open_error = ConnectionError("no route")
    now = 0.0
    for _ in range(20):
        harness.settler.settle(now)
        now = harness.settler.wake_at(now)
    tries = len(harness.opened)
    harness.settler.settle(now)
    assert len(harness.opened) == tries + 1
    assert harness.settler.wake_at(now) == now + 300.0


def test_it_waits_only_for_groups_whose_first_call_has_not_failed() -> None:
    harness = SettlerHarness(calls := DeferredCalls())
    harness.start_next_fit()
    harness.open_error = ConnectionError("no route")
    harness.settler.settle(0.0)
    assert harness.settler.is_waiting
    calls.complete()
    harness.settler.settle(0.1)
    assert not harness.settler.is_waiting


def test_a_group_that_fails_does_not_keep_others_from_being_settled() -> None:
    harness = SettlerHarness(tokens=(TOKEN, "t-2"))
    harness.start_next_fit()
    harness.cloud.call_error = ConnectionError("no route")
    harness.settler.settle(0.0)
    harness.cloud.call_error = None
    harness.settler.settle(0.1)
    assert harness.ledger.journal_view.unsettled_groups.keys() == {TOKEN}


def test_a_group_that_another_process_settles_meanwhile_is_recorded_once() -> None:
    harness = SettlerHarness(calls := DeferredCalls())
    harness.start_next_fit()
    harness.settler.settle(0.0)
    harness.write(GroupsReleased(token=TOKEN))
    calls.complete()
    harness.settler.settle(0.1)
    assert harness.events == [GroupsReleased(token=TOKEN)]
