"""NodeValidation: starts what the journal assigns, reports to every leader, enforces timeouts."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.agent.ports import AgentMessageReceived
from spotfit.agent.validations import NodeValidation
from spotfit.core.ids import AgentId, Token
from spotfit.model.events import FitEnded, ValidationRequest, ValidationStarted
from spotfit.model.leader_state import ValidationReported
from spotfit.model.spec import ValidationSpec
from spotfit.model.view import View
from spotfit.protocol.agent_leader import Join
from spotfit.protocol.agent_sidecar import ValidationResult
from spotfit.testing.builders import (
    RUN_ID,
    a_committed_checkpoint,
    a_member,
    a_spec,
    a_view,
    an_agent_id,
)
from tests.unit.agent.simulated_cluster import FakeValidator, Infrastructure

ME = an_agent_id(1)
TIMEOUT = "the validation took longer than its timeout of 60 s"
CHECKPOINT = a_committed_checkpoint(
    "c1", validation=ValidationRequest(fn_kwargs={"batches": 2}, timeout_s=60.0)
)


def assigned(
    attempt: int = 1,
    agent: AgentId = ME,
    checkpoint: Any = CHECKPOINT,
    timeout_s: float | None = None,
) -> View:
    started = ValidationStarted(
        checkpoint_name=checkpoint.name,
        checkpoint_uid=checkpoint.uid,
        attempt=attempt,
        agent=agent,
        token=Token("t-v"),
        node=0,
    )
    spec = a_spec(validation=ValidationSpec(timeout_s=timeout_s))
    return a_view(
        spec=spec,
        checkpoints=(checkpoint,),
        unvalidated_checkpoints=(checkpoint,),
        current_validation=started,
    )


class Node:
    """The validation of one node, connected to a fake leader."""

    def __init__(self) -> None:
        infrastructure = Infrastructure()
        self.leader = infrastructure.open_transport(a_member(0))
        self.transport = infrastructure.open_transport(a_member(1))
        self.validator = FakeValidator(infrastructure)
        self.validation = NodeValidation(ME, self.transport, self.validator)
        self.connect()

    def connect(self) -> None:
        self.transport.connect(
            a_member(0).coordinator_address, Join(run_id=RUN_ID, member=a_member(1), next_slot=0)
        )
        self.leader.drain_events()

    def reports(self, *, is_reconnected: bool = False) -> list[Any]:
        """Return what the leader receives."""
        self.validation.send_report(is_reconnected=is_reconnected)
        return [
            event.message
            for event in self.leader.drain_events()
            if isinstance(event, AgentMessageReceived)
        ]


@pytest.fixture
def node() -> Node:
    return Node()


def test_an_assigned_attempt_is_started_once(node: Node) -> None:
    for _ in range(3):
        node.validation.apply_view(assigned(), 0.0)
    assert node.validator.started_names == ["c1"]
    node.validator.finish(acc=1.0)
    node.validation.poll(1.0)
    node.validation.apply_view(assigned(), 1.0)
    assert node.validator.started_names == ["c1"], "the attempt is not started again"
    node.validation.apply_view(assigned(2), 1.0)
    assert node.validator.started_names == ["c1", "c1"]


def test_a_validation_of_another_node_is_not_started(node: Node) -> None:
    node.validation.apply_view(assigned(agent=an_agent_id(0)), 0.0)
    assert not node.validation.is_busy


@pytest.mark.parametrize(
    "after",
    [
        replace(assigned(), current_validation=None),
        replace(assigned(), current_validation=None, fit_end=FitEnded(outcome="cancelled")),
        assigned(2, agent=an_agent_id(0)),
    ],
    ids=["validated", "run ended", "assigned to another node"],
)
def test_a_validation_that_is_not_assigned_any_more_is_stopped(node: Node, after: View) -> None:
    node.validation.apply_view(assigned(), 0.0)
    node.validation.apply_view(after, 1.0)
    assert not node.validation.is_busy
    assert node.reports() == []


def test_the_result_is_reported_once_to_each_leader(node: Node) -> None:
    node.validation.apply_view(assigned(), 0.0)
    assert node.reports() == []
    node.validator.finish(acc=1.0)
    node.validation.poll(1.0)
    report = ValidationReported(attempt=1, status="validated", metrics={"acc": 1.0})
    assert (node.reports(), node.reports()) == ([report], [])
    node.connect()
    assert node.reports(is_reconnected=True) == [report]


@pytest.mark.parametrize(
    ("result", "report"),
    [
        (
            ValidationResult(message="ValueError: no"),
            ValidationReported(attempt=1, status="failed", reason="ValueError: no"),
        ),
        (
            ValidationResult(message="no bucket", retryable=True),
            ValidationReported(attempt=1, status="lost", reason="no bucket"),
        ),
        (ValidationResult(metrics={}), ValidationReported(attempt=1, status="validated")),
    ],
)
def test_the_result_determines_the_report(
    node: Node, result: ValidationResult, report: ValidationReported
) -> None:
    node.validation.apply_view(assigned(), 0.0)
    node.validator.exit(result)
    node.validation.poll(1.0)
    assert node.reports() == [report]


def test_a_validation_is_stopped_after_its_timeout(node: Node) -> None:
    node.validation.apply_view(assigned(), 100.0)
    assert node.validation.wake_at == 160.0
    node.validation.poll(159.0)
    assert node.reports() == []
    node.validation.poll(160.0)
    assert node.reports() == [ValidationReported(attempt=1, status="timeout", reason=TIMEOUT)]
    assert not node.validation.is_busy
    assert node.validation.wake_at == float("inf")


@pytest.mark.parametrize(
    ("requested", "trainer_timeout_s", "deadline"),
    [
        (ValidationRequest(), 10.0, 10.0),
        (ValidationRequest(), None, float("inf")),
        (ValidationRequest(fn_kwargs={}, timeout_s=5.0), 10.0, 5.0),
        (ValidationRequest(fn_kwargs={}), 10.0, float("inf")),
    ],
    ids=["of the trainer", "none", "of the report", "of the report: none"],
)
def test_the_timeout_is_that_of_the_report_or_the_trainer(
    node: Node, requested: ValidationRequest, trainer_timeout_s: float | None, deadline: float
) -> None:
    checkpoint = a_committed_checkpoint("c1", validation=requested)
    node.validation.apply_view(assigned(checkpoint=checkpoint, timeout_s=trainer_timeout_s), 0.0)
    assert node.validation.wake_at == deadline


def test_the_next_attempt_waits_until_the_previous_process_has_exited(node: Node) -> None:
    node.validation.apply_view(assigned(), 0.0)
    node.validator.stop = lambda: None  # type: ignore[method-assign]  # the exit follows later
    node.validation.apply_view(assigned(2), 1.0)
    assert node.validator.started_names == ["c1"]
    node.validator.exit(None)
    node.validation.apply_view(assigned(2), 2.0)
    assert node.validator.started_names == ["c1", "c1"]
