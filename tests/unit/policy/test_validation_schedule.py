"""Validation schedule: order, choice of the node, and machines."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotfit.core.ids import AgentId, Token
from spotfit.model.events import (
    CheckpointDropped,
    FitEnded,
    LeaderElected,
    NodeLost,
    RankFailure,
    TrainingEnded,
    ValidationEnded,
    ValidationRequest,
    ValidationStarted,
)
from spotfit.model.group import NodeState
from spotfit.model.leader_state import LeaderState, MemberStatus, NoRound, ValidationReported
from spotfit.model.spec import RetentionConfig, RunTiming, ValidationSpec
from spotfit.model.view import View
from spotfit.policy.actions import AppendEvent, LeaderAction, ReleaseGroups, RequestMachines, Wait
from spotfit.policy.scheduler import next_action
from spotfit.policy.validation_schedule import leader_handover
from spotfit.testing.builders import (
    TOKEN,
    a_committed_checkpoint,
    a_group,
    a_group_status,
    a_leader_state,
    a_member,
    a_member_status,
    a_notice,
    a_returned,
    a_round,
    a_spec,
    a_view,
    an_agent_id,
    member_statuses,
)

NOW = 1000.0
OWN = Token("t-v")
V = AgentId("v")
TIMING = RunTiming(validator_wait_timeout_s=300.0, validator_idle_timeout_s=60.0)
C1 = a_committed_checkpoint("c1", validation=ValidationRequest())
C2 = a_committed_checkpoint("c2", report_index=1, validation=ValidationRequest())
MACHINE = a_group(token=OWN, nodes=1, role="validate")
BOTH = {TOKEN: a_group(), OWN: MACHINE}
ENDED = FitEnded(outcome="finished", metrics={"loss": 1.0}, result_key="r")


def a_run(own_machine: bool | None = None, **fields: Any) -> View:
    """A round is open and two validations are pending."""
    spec = a_spec(validation=ValidationSpec(own_machine=own_machine), timing=TIMING)
    defaults = {
        "spec": spec,
        "checkpoints": (C1, C2),
        "unvalidated_checkpoints": (C1, C2),
        "round": a_round(),
    }
    return a_view(**{**defaults, **fields})


def after_training(own_machine: bool | None = None, **fields: Any) -> View:
    view = a_run(own_machine, **fields)
    return replace(view, round=None, pending_fit_end=ENDED)


def started(agent: AgentId = V, token: Token = OWN, attempt: int = 1) -> ValidationStarted:
    return ValidationStarted(
        checkpoint_name="c1",
        checkpoint_uid=C1.uid,
        attempt=attempt,
        agent=agent,
        token=token,
        node=0,
    )


def validator(**fields: Any) -> MemberStatus:
    return a_member_status(9, member=a_member(9, agent=V, token=OWN, node=0), **fields)


def busy_workers(*more: MemberStatus, **fields: Any) -> LeaderState:
    """Two busy worker nodes, plus `more` members; the last change was at NOW."""
    busy = member_statuses(
        a_member_status(0, running_round=1), a_member_status(1, running_round=1), *more
    )
    return a_leader_state(
        **{"members": busy, "validation_changed_at": NOW, "phase": NoRound(since=NOW), **fields}
    )


def next_action_of(view: View, state: LeaderState, now: float = NOW) -> LeaderAction:
    return next_action(view, state, now)


# --- dedicated machines --------------------------------------------------------------------------


def test_a_pending_validation_requests_a_machine() -> None:
    assert next_action_of(a_run(), busy_workers()) == RequestMachines(
        1, "2 validations pending", "validate"
    )


@pytest.mark.parametrize(
    "view",
    [
        a_run(unvalidated_checkpoints=()),
        a_run(spec=a_spec(timing=TIMING)),
        a_run(groups={TOKEN: a_group(), OWN: a_group(token=OWN, nodes=1, role="validate")}),
    ],
    ids=["nothing to validate", "no validation settings", "machine pending"],
)
def test_no_machine_is_requested_in_these_cases(view: View) -> None:
    assert not isinstance(next_action_of(view, busy_workers()), RequestMachines)


def test_machines_for_workers_are_requested_first() -> None:
    expected_request = next_action_of(a_run(groups={}, round=None), a_leader_state(members={}))
    assert expected_request == RequestMachines(2, "2 of 2 workers need a machine")
    request = a_run(groups={TOKEN: a_group(handle=None)}, round=None)
    assert not isinstance(
        next_action_of(request, a_leader_state(members={}, is_headless=True)), RequestMachines
    )


def test_a_validation_machine_runs_no_workers() -> None:
    short = a_run(groups={TOKEN: a_group(nodes=1), OWN: MACHINE}, round=None)
    expected_request = next_action_of(
        short,
        a_leader_state(
            members=member_statuses(a_member_status(0), validator()), validation_changed_at=NOW
        ),
    )
    assert expected_request == RequestMachines(1, "1 of 2 workers need a machine")


def test_the_next_validation_starts_on_its_machine() -> None:
    action = next_action_of(a_run(groups=BOTH), busy_workers(validator()))
    assert action == AppendEvent(
        ValidationStarted(
            checkpoint_name="c1",
            checkpoint_uid="1-0",
            attempt=1,
            agent=V,
            token=OWN,
            node=0,
            reason="on a dedicated machine",
        )
    )


def test_validations_run_one_at_a_time() -> None:
    running = a_run(
        groups=BOTH, current_validation=started(), validation_attempts=1, current_validation_tries=1
    )
    assert isinstance(next_action_of(running, busy_workers(validator())), Wait)


def test_a_refused_machine_falls_back_to_the_workers_nodes() -> None:
    refused = a_run(validator_refusals=1)
    action = next_action_of(refused, busy_workers(refused_at={"validate": NOW}))
    assert action == AppendEvent(
        ValidationStarted(
            checkpoint_name="c1",
            checkpoint_uid="1-0",
            attempt=1,
            agent=an_agent_id(0),
            token=TOKEN,
            node=0,
            reason="beside the workers",
        )
    )


def test_requests_back_off_after_refusals() -> None:
    running = a_run(
        validator_refusals=4,
        current_validation=started(an_agent_id(0), TOKEN),
        current_validation_tries=1,
    )
    assert isinstance(next_action_of(running, busy_workers(refused_at={"validate": NOW})), Wait)
    assert isinstance(
        next_action_of(running, busy_workers(refused_at={"validate": NOW - 7.9})), Wait
    )
    assert isinstance(
        next_action_of(running, busy_workers(refused_at={"validate": NOW - 8.0})), RequestMachines
    )


def test_the_wait_for_a_machine_is_bounded() -> None:
    view = a_run(groups=BOTH)
    wait = next_action_of(view, busy_workers())
    assert isinstance(wait, Wait)
    late = next_action_of(view, busy_workers(validation_changed_at=NOW - 300.0))
    assert isinstance(late, AppendEvent)
    assert isinstance(late.event, ValidationStarted)
    assert late.event.agent == an_agent_id(0)


@pytest.mark.parametrize(
    ("own_machine", "refusals", "agent"),
    [(False, 0, an_agent_id(0)), (True, 5, None)],
    ids=["never", "only"],
)
def test_own_machine_determines_the_node(own_machine: bool, refusals: int, agent: Any) -> None:
    view = a_run(own_machine, validator_refusals=refusals)
    action = next_action_of(
        view, busy_workers(refused_at={"validate": NOW}, validation_changed_at=NOW - 1e4)
    )
    found = action.event.agent if isinstance(action, AppendEvent) else None  # type: ignore[union-attr]
    assert found == agent


def test_the_leaders_node_is_preferred_unless_it_leaves() -> None:
    both = member_statuses(
        a_member_status(0, running_round=1, joined_at=9.0), a_member_status(1, running_round=1)
    )
    action = next_action_of(a_run(False), busy_workers(members=both))
    assert isinstance(action, AppendEvent)
    assert action.event.agent == an_agent_id(0)  # type: ignore[union-attr]
    decide_replacement = a_run(
        False, notices={an_agent_id(0): a_notice()}, notice_slots={an_agent_id(0): 3}
    )
    three = {TOKEN: a_group(nodes=3)}
    action = next_action_of(
        replace(decide_replacement, groups=three),
        busy_workers(a_member_status(2), leading_since=NOW),
    )
    assert isinstance(action, AppendEvent)
    assert action.event.agent == an_agent_id(1)  # type: ignore[union-attr]


def test_without_a_required_machine_the_validation_fails() -> None:
    refused = a_run(True, permanent_validator_refusals=11, last_validator_refusal="no quota for it")
    action = next_action_of(refused, busy_workers())
    why = "no dedicated machine is available: no quota for it"
    assert action == AppendEvent(
        ValidationEnded(checkpoint_name="c1", checkpoint_uid="1-0", status="failed", reason=why)
    )


def test_credentials_that_are_invalid_for_some_minutes_fail_no_validation() -> None:
    refused = a_run(
        True, permanent_validator_refusals=10, last_validator_refusal="the token has expired"
    )
    assert isinstance(next_action_of(refused, busy_workers()), RequestMachines)


def test_without_a_requested_machine_nothing_is_awaited() -> None:
    """An incomplete elastic group would wait indefinitely otherwise."""
    spec = a_spec(min_workers=2, max_workers=4, validation=ValidationSpec(), timing=TIMING)
    action = next_action_of(a_run(spec=spec, refusals=1), busy_workers(refused_at={"train": NOW}))
    assert isinstance(action, AppendEvent)
    assert action.event.agent == an_agent_id(0)  # type: ignore[union-attr]


def test_an_unusable_machine_counts_as_a_boot_failure() -> None:
    failure = RankFailure(
        rank=0, kind="raised", message="Traceback\nShippingError: torch is not installed"
    )
    action = next_action_of(a_run(groups=BOTH), busy_workers(validator(node_failure=failure)))
    why = "its environment could not be set up: ShippingError: torch is not installed"
    lost = NodeLost(token=OWN, node=0, agent=None, reason=why, is_unusable=True)
    assert action == AppendEvent(lost)


BROKEN = validator(
    node_failure=RankFailure(rank=0, kind="raised", message="ShippingError: no torch")
)


def leading_on_broken_machine(*more: MemberStatus) -> LeaderState:
    """A leader that the election has found on a validation machine without its environment."""
    return a_leader_state(
        agent_id=V,
        members=member_statuses(BROKEN, *more),
        validation_changed_at=NOW - 1000.0,
        phase=NoRound(since=NOW - 100.0),
    )


def test_a_leader_on_a_machine_without_its_environment_requests_another() -> None:
    view = after_training(True, groups={OWN: MACHINE})
    request = RequestMachines(1, "2 validations pending", "validate")
    assert next_action_of(view, leading_on_broken_machine()) == request


def test_a_leader_on_a_machine_without_its_environment_lets_others_validate() -> None:
    view = after_training(groups=BOTH)
    action = next_action_of(view, leading_on_broken_machine(a_member_status(0)))
    assert isinstance(action, AppendEvent)
    assert isinstance(action.event, ValidationStarted)
    assert action.event.agent == an_agent_id(0)


def test_no_leader_is_elected_on_a_machine_without_its_environment() -> None:
    members = member_statuses(a_member_status(0), BROKEN)
    state = a_leader_state(members=members, phase=NoRound(since=NOW))
    view = after_training(True, groups=BOTH)
    assert leader_handover(view, state) is None
    working = replace(state, members=member_statuses(a_member_status(0), validator()))
    assert leader_handover(view, working) is not None


# --- results and retries -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "ended"),
    [
        (
            ValidationReported(attempt=1, status="validated", metrics={"acc": 1}),
            ValidationEnded(
                checkpoint_name="c1", checkpoint_uid="1-0", status="validated", metrics={"acc": 1}
            ),
        ),
        (
            ValidationReported(attempt=1, status="failed", reason="no"),
            ValidationEnded(
                checkpoint_name="c1", checkpoint_uid="1-0", status="failed", reason="no"
            ),
        ),
        (
            ValidationReported(attempt=1, status="timeout", reason="long"),
            ValidationEnded(
                checkpoint_name="c1", checkpoint_uid="1-0", status="timeout", reason="long"
            ),
        ),
    ],
    ids=["validated", "failed", "timeout"],
)
def test_a_reported_result_is_recorded(message: ValidationReported, ended: ValidationEnded) -> None:
    running = a_run(
        groups=BOTH, current_validation=started(), validation_attempts=1, current_validation_tries=1
    )
    assert next_action_of(
        running, busy_workers(validator(), validation_reported=message)
    ) == AppendEvent(ended)


def test_a_report_of_an_earlier_attempt_is_ignored() -> None:
    running = a_run(
        groups=BOTH,
        current_validation=started(attempt=2),
        validation_attempts=2,
        current_validation_tries=2,
    )
    old = ValidationReported(attempt=1, status="failed", reason="no")
    assert isinstance(
        next_action_of(running, busy_workers(validator(), validation_reported=old)), Wait
    )


@pytest.mark.parametrize(
    "groups",
    [
        {TOKEN: a_group(), OWN: replace(MACHINE, lost_nodes=frozenset({0}), is_released=True)},
        {TOKEN: a_group(), OWN: replace(MACHINE, is_released=True)},
        {TOKEN: a_group()},
    ],
    ids=["lost machine", "released group", "removed group"],
)
def test_a_validation_on_a_lost_node_is_restarted(groups: Any) -> None:
    running = a_run(False, groups=groups, current_validation=started(), validation_attempts=1)
    action = next_action_of(running, busy_workers())
    assert action == AppendEvent(
        ValidationStarted(
            checkpoint_name="c1",
            checkpoint_uid="1-0",
            attempt=2,
            agent=an_agent_id(0),
            token=TOKEN,
            node=0,
            reason="beside the workers",
        )
    )


def test_a_silent_validator_is_lost() -> None:
    running = a_run(
        groups=BOTH, current_validation=started(), validation_attempts=1, current_validation_tries=1
    )
    gone = busy_workers(leading_since=NOW - 900.0)
    action = next_action_of(running, gone)
    assert isinstance(action, AppendEvent)
    assert action.event.agent == V  # type: ignore[union-attr]
    assert isinstance(next_action_of(running, busy_workers(leading_since=NOW)), Wait), (
        "it may still reconnect"
    )


def test_a_restarted_machine_loses_its_validation() -> None:
    running = a_run(
        groups=BOTH, current_validation=started(), validation_attempts=1, current_validation_tries=1
    )
    another = a_member_status(9, member=a_member(9, agent=AgentId("w"), token=OWN, node=0))
    action = next_action_of(running, busy_workers(another))
    assert isinstance(action, AppendEvent)
    assert isinstance(action.event, NodeLost)
    assert (action.event.agent, action.event.machine_returned) == (V, True)
    message = replace(running, lost_agents=frozenset({V}))
    again = ValidationStarted(
        checkpoint_name="c1",
        checkpoint_uid="1-0",
        attempt=2,
        agent=AgentId("w"),
        token=OWN,
        node=0,
        reason="on a dedicated machine",
    )
    assert next_action_of(message, busy_workers(another)) == AppendEvent(again)


def test_a_lost_attempt_is_retried_with_backoff() -> None:
    def after(tries: int, now: float) -> LeaderAction:
        running = a_run(
            groups=BOTH,
            current_validation=started(attempt=tries),
            validation_attempts=tries,
            current_validation_tries=tries,
        )
        lost_report = ValidationReported(attempt=tries, status="lost", reason="the bucket failed")
        return next_action_of(
            running, busy_workers(validator(), validation_reported=lost_report), now
        )

    assert isinstance(after(1, NOW), AppendEvent), "the first retry is immediate"
    assert isinstance(after(3, NOW + 7.9), Wait)
    assert isinstance(after(3, NOW + 8.0), AppendEvent)
    exhausted = after(20, NOW + 1e3)
    assert isinstance(exhausted, AppendEvent)
    why = "all 20 attempts were lost"
    assert exhausted.event == ValidationEnded(
        checkpoint_name="c1", checkpoint_uid="1-0", status="failed", reason=why
    )


def test_a_checkpoint_with_a_pending_validation_is_not_dropped() -> None:
    latest = a_committed_checkpoint("c3", report_index=2)
    spec = a_spec(
        validation=ValidationSpec(own_machine=False), retention=RetentionConfig(num_to_keep=1)
    )
    view = a_run(spec=spec, checkpoints=(C1, C2, latest), unvalidated_checkpoints=(C2,))
    assert next_action_of(view, busy_workers()) == AppendEvent(
        CheckpointDropped(name="c1", reason="num_to_keep=1: only the last 1 are kept")
    )
    pending = a_run(spec=spec, checkpoints=(C2, latest), unvalidated_checkpoints=(C2,))
    action = next_action_of(pending, busy_workers())
    assert not isinstance(action, AppendEvent) or not isinstance(action.event, CheckpointDropped)


# --- release -------------------------------------------------------------------------------------


def test_an_idle_machine_is_released_after_the_timeout() -> None:
    idle = a_run(groups=BOTH, unvalidated_checkpoints=())
    wait = next_action_of(idle, busy_workers(validator()))
    assert isinstance(wait, Wait)
    assert next_action_of(idle, busy_workers(validator()), NOW + 60.0) == ReleaseGroups(OWN)


def test_a_machine_is_released_if_workers_are_refused() -> None:
    without_workers = a_run(
        groups={TOKEN: a_group(nodes=1), OWN: MACHINE},
        round=None,
        current_validation=started(),
        current_validation_tries=1,
        refusals=3,
    )
    state = a_leader_state(
        members=member_statuses(a_member_status(0), validator()),
        refused_at={"train": NOW},
        validation_changed_at=NOW,
    )
    assert next_action_of(without_workers, state) == ReleaseGroups(OWN)
    assert isinstance(next_action_of(replace(without_workers, refusals=2), state), Wait)


def test_the_leader_does_not_release_its_own_machine() -> None:
    idle = a_run(groups=BOTH, unvalidated_checkpoints=(), round=None)
    alone = a_leader_state(
        agent_id=V, members=member_statuses(validator()), validation_changed_at=0.0
    )
    assert not isinstance(next_action_of(idle, alone), ReleaseGroups)


def test_leadership_moves_to_a_worker_node() -> None:
    view = a_run(groups=BOTH, round=None, epoch=4)
    action = next_action_of(
        view, a_leader_state(agent_id=V, members=member_statuses(validator(), a_member_status(1)))
    )
    assert action == AppendEvent(
        LeaderElected(
            leader=an_agent_id(1),
            epoch=5,
            coordinator_address=a_member(1).coordinator_address,
            reason="the previous leader is not on a worker node",
        )
    )


# --- after the training --------------------------------------------------------------------------


def test_the_fit_ends_after_the_last_validation() -> None:
    returned = busy_workers(phase=a_returned(), latest_metrics=ENDED.metrics)
    assert next_action_of(
        a_run(groups=BOTH, current_validation=started(), current_validation_tries=1), returned
    ) == AppendEvent(TrainingEnded(fit_end=ENDED))
    assert next_action_of(a_run(unvalidated_checkpoints=()), returned) == AppendEvent(ENDED)
    assert next_action_of(
        after_training(unvalidated_checkpoints=()), a_leader_state()
    ) == AppendEvent(ENDED)


def test_remaining_validations_run_on_the_workers_nodes() -> None:
    action = next_action_of(
        after_training(), a_leader_state(validation_changed_at=NOW, phase=NoRound(since=NOW))
    )
    assert action == AppendEvent(
        ValidationStarted(
            checkpoint_name="c1",
            checkpoint_uid="1-0",
            attempt=1,
            agent=an_agent_id(0),
            token=TOKEN,
            node=0,
            reason="beside the workers",
        )
    )


def test_a_pending_machine_is_not_awaited_after_the_training() -> None:
    running = after_training(
        groups=BOTH, current_validation=started(an_agent_id(0), TOKEN), current_validation_tries=1
    )
    assert next_action_of(
        running, a_leader_state(validation_changed_at=NOW, phase=NoRound(since=NOW))
    ) == ReleaseGroups(OWN)


def test_leadership_moves_to_the_validator_and_workers_are_released() -> None:
    running = after_training(
        groups=BOTH, current_validation=started(), current_validation_tries=1, epoch=1
    )
    both = member_statuses(a_member_status(0), validator())
    state = a_leader_state(members=both, validation_changed_at=NOW, phase=NoRound(since=NOW))
    assert next_action_of(running, state) == AppendEvent(
        LeaderElected(
            leader=V,
            epoch=2,
            coordinator_address=a_member(9).coordinator_address,
            reason="the training has ended, only validations are pending",
        )
    )
    with_leader = replace(
        running,
        leader=LeaderElected(
            leader=V, epoch=2, coordinator_address=a_member(9).coordinator_address
        ),
    )
    decide_replacement = next_action_of(with_leader, replace(state, agent_id=V))
    assert isinstance(decide_replacement, Wait)
    assert decide_replacement.reason == "machines are shutting down"
    assert next_action_of(
        with_leader, replace(state, agent_id=V, members=member_statuses(validator()))
    ) == ReleaseGroups(TOKEN)
    assert next_action_of(with_leader, replace(state, agent_id=V), NOW + 15.0) == ReleaseGroups(
        TOKEN
    ), "after the timeout"


def test_the_validating_machine_is_kept_until_the_result() -> None:
    other = Token("t-2")
    groups = {TOKEN: a_group(), other: a_group(token=other, nodes=1)}
    at = ValidationStarted(
        checkpoint_name="c1",
        checkpoint_uid=C1.uid,
        attempt=1,
        agent=AgentId("b0"),
        token=other,
        node=0,
    )
    b0 = a_member_status(5, member=a_member(5, agent=AgentId("b0"), token=other, node=0))
    running = after_training(groups=groups, current_validation=at, current_validation_tries=1)
    state = a_leader_state(
        members=member_statuses(a_member_status(0), b0),
        validation_changed_at=NOW,
        phase=NoRound(since=NOW - 100.0),
    )
    assert isinstance(next_action_of(running, state), Wait)


def test_without_any_machine_one_is_requested() -> None:
    without_machines = after_training(groups={})
    expected_request = RequestMachines(1, "2 validations pending", "validate")
    assert (
        next_action_of(without_machines, a_leader_state(members={}, is_headless=True))
        == expected_request
    )
    running = after_training()
    assert isinstance(next_action_of(running, a_leader_state(members={}, is_headless=True)), Wait)
    gone = a_group_status(NodeState.GONE, NodeState.GONE)
    lost = next_action_of(
        running, a_leader_state(members={}, is_headless=True, group_statuses={TOKEN: gone})
    )
    assert isinstance(lost, AppendEvent), "a headless leader records losses"


def test_without_available_machines_validations_are_left_to_the_next_fit() -> None:
    without_machines = after_training(groups={}, permanent_validator_refusals=11)
    assert next_action_of(
        without_machines, a_leader_state(members={}, is_headless=True)
    ) == AppendEvent(ENDED)


def test_no_round_opens_after_the_training() -> None:
    gone = replace(a_group(), lost_nodes=frozenset({0, 1}), is_released=True)
    view = after_training(
        False,
        groups={TOKEN: gone, OWN: MACHINE},
        current_validation=started(),
        current_validation_tries=1,
    )
    assert isinstance(
        next_action_of(
            view, busy_workers(validator(), agent_id=V, members=member_statuses(validator()))
        ),
        Wait,
    )
