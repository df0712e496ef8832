"""Machines are listed from the journal; their output is fetched from the backend."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from spotfit.client import machine_logs
from spotfit.client.console import format_event
from spotfit.client.machine_logs import (
    ALL_MACHINES,
    read_granted_machines,
    read_machine_output,
    read_unjoined_output,
)
from spotfit.core.errors import ConfigError, ProvisionError, TransientStoreError
from spotfit.core.ids import Token
from spotfit.ledger.authenticated_store import AuthenticatedStore
from spotfit.ledger.journal import Ledger
from spotfit.model.events import (
    FailureCause,
    FitEnded,
    FitStarted,
    GroupPlanned,
    GroupSubmitted,
    JournalEvent,
    NodeLost,
)
from spotfit.model.group import GroupHandle, GroupPlan, GroupRequest
from spotfit.provision.api import MachineOutput
from spotfit.store.factory import open_store
from spotfit.testing.builders import RUN_ID, RUN_KEY, a_member, a_spec, an_agent_id

FIRST, SECOND = Token("t-1"), Token("t-2")


def planned(token: Token, nodes: int) -> GroupPlanned:
    plan = GroupPlan(token=token, provisioner="backend", num_nodes=nodes, slots_per_node=1)
    return GroupPlanned(
        request=GroupRequest(token=token, num_workers=nodes, total_workers=nodes),
        plan=plan,
        reason="because",
    )


class Backend:
    """Stores the output of machines, or fails."""

    name = "backend"

    def __init__(self) -> None:
        self.traits = SimpleNamespace(keeps_output=True)
        self.failing: set[int] = set()
        """Nodes whose output cannot be fetched."""

    def fetch_machine_output(
        self, handle: GroupHandle, node: int, *, max_lines: int
    ) -> list[MachineOutput]:
        if node in self.failing:
            raise ProvisionError("no answer")
        if handle.token == SECOND:
            return []
        return [MachineOutput("attempt 1", (f"no module, says {node}", "that is all")[-max_lines:])]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A run of two groups. Both machines of the first are lost; one of their agents had joined."""
    store = AuthenticatedStore(open_store(str(tmp_path)), RUN_KEY)
    ledger = Ledger(store, RUN_ID, an_agent_id(0))
    Ledger(store, RUN_ID, an_agent_id(1)).publish_member(
        a_member(1, agent=an_agent_id(1), token=FIRST, node=1)
    )
    events: list[JournalEvent] = [
        FitStarted(spec=a_spec(storage_url=str(tmp_path))),
        planned(FIRST, 2),
        GroupSubmitted(
            token=FIRST, handle=GroupHandle(token=FIRST, provisioner="backend", name="group-1")
        ),
        planned(SECOND, 1),
        GroupSubmitted(
            token=SECOND, handle=GroupHandle(token=SECOND, provisioner="backend", name="group-2")
        ),
        NodeLost(token=FIRST, node=0, agent=None, reason="exit code 1"),
        NodeLost(token=FIRST, node=1, agent=None, reason="exit code 1"),
    ]
    for event in events:
        ledger.append(event, after=ledger.catch_up())
    return ledger


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    backend = Backend()
    monkeypatch.setattr(machine_logs, "open_provisioner", lambda *_: backend)
    return backend


def test_requests_that_the_backend_has_withdrawn_have_no_output(ledger: Ledger) -> None:
    event = NodeLost(
        token=SECOND, node=0, agent=None, reason="no capacity", cause=FailureCause.PREEMPTION
    )
    ledger.append(event, after=ledger.catch_up())
    assert read_granted_machines(ledger.store).lost_before_join == ["t-1/0", "t-1/1"]
    assert format_event(event) == "machine t-2/0 not granted: no capacity"


def test_machines_are_named_by_token_and_node(ledger: Ledger) -> None:
    assert list(read_granted_machines(ledger.store).by_name) == ["t-1/0", "t-1/1", "t-2/0"]


@pytest.mark.parametrize("which", ["t-1/1", "1"])
def test_a_machine_is_selected_by_name_or_number(ledger: Ledger, which: str) -> None:
    assert list(read_machine_output(ledger.store, which, max_lines=5)) == [
        "(t-1/1: attempt 1)",
        "(t-1/1) no module, says 1",
        "(t-1/1) that is all",
    ]


def test_the_output_of_all_machines_includes_those_without_output(ledger: Ledger) -> None:
    lines = list(read_machine_output(ledger.store, ALL_MACHINES, max_lines=1))
    assert [line for line in lines if "that is all" in line] == [
        "(t-1/0) that is all",
        "(t-1/1) that is all",
    ]
    assert lines[-1] == "(t-2/0: no output, or not yet available)"


@pytest.mark.parametrize("which", ["t-1/7", "9", "unknown"])
def test_an_unknown_machine_is_reported_with_all_names(ledger: Ledger, which: str) -> None:
    with pytest.raises(ConfigError, match="has no machine") as wrong:
        list(read_machine_output(ledger.store, which, max_lines=5))
    assert "t-1/0, t-1/1, t-2/0" in wrong.value.do


def test_unjoined_output_is_of_machines_whose_agent_never_joined(ledger: Ledger) -> None:
    assert read_unjoined_output(ledger).splitlines() == [
        "Output of machines that were lost before their agent joined:",
        "(t-1/0: attempt 1)",
        "(t-1/0) no module, says 0",
        "(t-1/0) that is all",
    ]


def test_a_backend_failure_for_one_machine_does_not_affect_others(
    ledger: Ledger, backend: Backend
) -> None:
    backend.failing = {0}
    lines = list(read_machine_output(ledger.store, ALL_MACHINES, max_lines=5))
    assert lines[0] == "(t-1/0: its output cannot be read: no answer)"
    assert "(t-1/1) that is all" in lines
    assert read_unjoined_output(ledger) == "", "the only machine whose agent never joined"


def test_a_store_failure_is_only_logged(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "list_members", Mock(side_effect=TransientStoreError("no answer")))
    assert read_unjoined_output(ledger) == ""


def test_output_is_fetched_from_the_backend_of_the_fit(
    ledger: Ledger, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later fit may use another provisioner."""
    opened_names: list[str] = []

    def opened(name: str, _options: dict[str, Any]) -> Backend:
        opened_names.append(name)
        return backend

    monkeypatch.setattr(machine_logs, "open_provisioner", opened)
    ledger.append(FitEnded(outcome="failed", reason="no"), after=ledger.catch_up())
    later_spec = a_spec(fit_id="f2", provisioner="other")
    ledger.append(FitStarted(spec=later_spec), after=ledger.catch_up())
    assert read_unjoined_output(ledger) == ""
    list(read_machine_output(ledger.store, ALL_MACHINES, max_lines=5))
    assert opened_names == [a_spec().provisioner] * 3


def test_a_backend_without_stored_output_is_reported(ledger: Ledger, backend: Any) -> None:
    backend.traits.keeps_output = False
    lines = list(read_machine_output(ledger.store, ALL_MACHINES, max_lines=5))
    assert len(lines) == 3
    assert all("does not store the output" in line for line in lines)
    assert "does not store the output" in read_unjoined_output(ledger)


def test_without_the_key_no_backend_that_the_journal_names_is_opened(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Backend:
        raise AssertionError("a provisioner was opened")

    monkeypatch.setattr(machine_logs, "open_provisioner", refuse)
    plain = Ledger(open_store(ledger.store.url), RUN_ID, an_agent_id(0))
    with pytest.raises(ConfigError, match="has no key of the run"):
        list(read_machine_output(plain.store, "all", max_lines=5))
    assert read_unjoined_output(plain) == ""
