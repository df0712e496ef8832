"""Validation schedule: which checkpoint is validated next, on which node, and with which machines.

Validations run one at a time in commit order, on a dedicated machine or beside the workers. A
dedicated machine is requested while validations are pending and no machine for workers is missing.

    state of a checkpoint's validation | event                                   | next
    -----------------------------------|-----------------------------------------|----------
    pending                            | a node is available: ValidationStarted  | running
    running                            | result reported: ValidationEnded        | finished
    running                            | node lost, or attempt reported 'lost'   | pending
    pending, after `_MAX_TRIES`        | ValidationEnded("failed")               | finished

When the training ends with validations pending, `TrainingEnded` records its outcome, and the fit
ends after the last validation (docs/decisions/0024).
"""

from __future__ import annotations

from collections.abc import Iterator

from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.ids import Token
from spotfit.model.events import (
    CheckpointCommitted,
    FitEnded,
    LeaderElected,
    TrainingEnded,
    ValidationEnded,
    ValidationStarted,
)
from spotfit.model.group import Role
from spotfit.model.leader_state import LeaderState, MemberStatus
from spotfit.model.view import View
from spotfit.policy import capacity
from spotfit.policy.actions import AppendEvent, LeaderAction, ReleaseGroups, RequestMachines, Wait
from spotfit.policy.election import handover

# A validation that was lost 20 times (by preemptions, or because its process cannot be started)
# takes longer than the lifetime of the available machines.
_MAX_TRIES = 20

# With the backoff below, 40 refusals in a row take about three hours of training.
_MAX_REFUSALS = 40

# As for workers (`capacity`), refusals that usually do not change must persist for ten minutes: the
# credentials of a fit that has trained may become valid again.
_MAX_PERMANENT_REFUSALS = 10

# One or two refusals of workers' machines are normal; after three the validation machine, which may
# occupy the capacity or quota that the workers need, is released.
_REFUSALS_BEFORE_YIELDING = 3

# Backoff after refused machines and lost attempts. During the training a validation is not urgent;
# afterwards the run ends only after its last validation, so the longest pause is shorter.
_MIN_BACKOFF_S = 1.0
_MAX_BACKOFF_S = 300.0
_MAX_BACKOFF_AFTER_TRAINING_S = 60.0

_POLL_S = 1.0


def pending_validations(view: View) -> tuple[CheckpointCommitted, ...]:
    """Return the committed checkpoints to validate that have no result yet, in commit order.

    Those reported with `validation=...`, including the one that is being validated. Empty if the
    trainer of the current fit has no `ValidationConfig`.
    """
    return view.unvalidated_checkpoints if view.spec.validation is not None else ()


def fit_end_action(view: View, fit_end: FitEnded) -> AppendEvent:
    """Return the action that ends the fit with `fit_end`, or only its training.

    With validations pending it appends `TrainingEnded`; `end_after_validations` appends `fit_end`
    later.
    """
    return AppendEvent(TrainingEnded(fit_end=fit_end) if pending_validations(view) else fit_end)


def record_result(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield the entry with the result that an agent has reported for the current validation.

    Nothing without a report, for one of an earlier attempt, and for a lost attempt, which
    `start_validation` repeats. A rule of `scheduler.next_action`.
    """
    current, reported = view.current_validation, state.validation_reported
    # A report of an earlier attempt may arrive late, from an agent that was assumed lost.
    if current is None or reported is None or reported.attempt != current.attempt:
        return
    if reported.status != "lost":
        yield AppendEvent(
            ValidationEnded(
                checkpoint_name=current.checkpoint_name,
                checkpoint_uid=current.checkpoint_uid,
                status=reported.status,
                metrics=reported.metrics,
                reason=reported.reason,
            )
        )


def end_after_validations(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield the recorded end of the fit once the training has ended and no validation is pending.

    Also if validations are pending but no node is and will be available for them. A rule of
    `scheduler.next_action`.
    """
    if view.pending_fit_end is None:
        return
    is_impossible = _no_validator_available(view) and not _has_candidate(view, state)
    if is_impossible or not pending_validations(view):
        yield AppendEvent(view.pending_fit_end)


def start_validation(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield the assignment of the first pending validation to a node, also for a lost attempt.

    Yields a `Wait` while no node is available or a retry is not due, the result "failed" if no
    attempt can succeed, and nothing while a validation runs or for a headless leader. `now` is the
    leader's `Clock.now()` in seconds. A rule of `scheduler.next_action`.
    """
    pending = pending_validations(view)
    is_running = view.current_validation is not None and not _is_lost(view, state)
    if not pending or state.is_headless or is_running:
        return
    checkpoint = pending[0]
    if (failure := _permanent_failure_reason(view)) is not None:
        yield AppendEvent(
            ValidationEnded(
                checkpoint_name=checkpoint.name,
                checkpoint_uid=checkpoint.uid,
                status="failed",
                reason=failure,
            )
        )
        return
    retry_at = state.validation_changed_at + _retry_backoff_s(view, state)
    if now < retry_at:
        yield Wait(retry_at, f"a validation was lost {view.current_validation_tries} times")
        return
    status = _choose_validator(view, state, now)
    if status is None:
        wait_until = max(now + _POLL_S, _wait_ends_at(view, state))
        yield Wait(wait_until, "no node is available for a validation")
        return
    member = status.member
    is_dedicated = _group_role(view, member.token) != "train"
    yield AppendEvent(
        ValidationStarted(
            checkpoint_name=checkpoint.name,
            checkpoint_uid=checkpoint.uid,
            attempt=view.validation_attempts + 1,
            agent=member.agent,
            token=member.token,
            node=member.node,
            reason="on a dedicated machine" if is_dedicated else "beside the workers",
        )
    )


def request_validator(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield a request for one dedicated machine if one is needed and none is running or pending.

    Yields a `Wait` during the backoff after refused machines. `now` is the leader's `Clock.now()`
    in seconds. A rule of `scheduler.next_action`.
    """
    pending = pending_validations(view)
    if not pending or _staying_validators(view, state) or _no_validator_available(view):
        return
    if not _wants_machine(view, state):
        return
    request_at = float("-inf")
    if "validate" in state.refused_at and view.validator_refusals > 0:
        limit_s = _MAX_BACKOFF_S if view.pending_fit_end is None else _MAX_BACKOFF_AFTER_TRAINING_S
        request_at = state.refused_at["validate"] + exponential_backoff_s(
            view.validator_refusals - 1, shortest_s=_MIN_BACKOFF_S, longest_s=limit_s
        )
    if now < request_at:
        reason = f"validation machine refused {view.validator_refusals} times"
        yield Wait(request_at, reason)
    else:
        noun = "validation" if len(pending) == 1 else "validations"
        yield RequestMachines(1, f"{len(pending)} {noun} pending", "validate")


def release_validators(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield the release of dedicated machines that are not needed any more.

    That is after `RunTiming.validator_idle_timeout_s` without a pending validation (until then a
    `Wait`); once the run has changed to another network; during the training, after three refusals
    of machines for workers; after it, if no
    agent of the dedicated machine has joined and the workers' machines suffice. `now` is the
    leader's `Clock.now()` in seconds. A rule of `scheduler.next_action`; excludes the leader's own
    machine.
    """
    idle_since = max(state.validation_changed_at, state.leading_since)
    idle_until = idle_since + view.spec.timing.validator_idle_timeout_s
    is_idle = not pending_validations(view)
    for token in _held_groups(view, "validate"):
        if _is_own_group(view, state, token):
            continue
        if view.pending_fit_end is None:
            # Workers' machines are refused while this one is held.
            is_refused = view.refusals >= _REFUSALS_BEFORE_YIELDING
            is_in_the_way = is_refused and capacity.missing_workers(view, state) > 0
        else:
            is_connected = any(status.member.token == token for status in state.members.values())
            is_in_the_way = not (is_connected or state.is_headless or _wants_machine(view, state))
        # The run has changed to another network.
        is_in_the_way |= view.stands_by(token)
        if is_in_the_way or (is_idle and now >= idle_until):
            yield ReleaseGroups(token)
        elif is_idle:
            yield Wait(idle_until, "no validation is pending")


def leader_handover(view: View, state: LeaderState) -> LeaderElected | None:
    """Return the election of an agent on a worker node or, after the training, a validation node.

    The machines of the other role are released soon. The caller appends it. Returns None if the
    leader is on such a node, while a round is open, without a candidate, and for a headless leader.
    """
    own = state.members.get(state.agent_id)
    if own is None or view.round is not None:
        return None
    # The machines of the other role are released soon; the leader would go with them.
    role: Role = "train" if view.pending_fit_end is None else "validate"
    if _group_role(view, own.member.token) == role:
        return None
    successors = sorted(_working_members(view, state, role), key=_join_order)
    if not successors:
        return None
    reason = (
        "the previous leader is not on a worker node"
        if role == "train"
        else "the training has ended, only validations are pending"
    )
    return handover(view, successors[0].member, reason=reason)


def release_idle_groups(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Yield the release of the workers' groups after the training, once their agents have exited.

    Waits for connected agents for at most `capacity.SELF_EXIT_TIMEOUT_S`; excludes the machines of
    the leader and of the current validation. `now` is the leader's `Clock.now()` in seconds. A rule
    of `scheduler.next_action`.
    """
    if view.pending_fit_end is None or state.is_headless:
        return
    connected = {status.member.token for status in state.members.values()}
    validating = view.current_validation.token if view.current_validation is not None else None
    self_exit_until = state.phase.since + capacity.SELF_EXIT_TIMEOUT_S
    for token in _held_groups(view, "train"):
        if _is_own_group(view, state, token) or token == validating:
            continue
        if token in connected and now < self_exit_until:
            yield Wait(min(now + _POLL_S, self_exit_until), "machines are shutting down")
        else:
            yield ReleaseGroups(token)


# --- choice of the node ------------------------------------------------------------------------


def _choose_validator(view: View, state: LeaderState, now: float) -> MemberStatus | None:
    """A dedicated machine, else the leader's node, else another worker node; None if none may run
    the validation now."""
    dedicated = sorted(_working_members(view, state, "validate"), key=_join_order)
    if dedicated:
        return dedicated[0]
    may_share = not _own_machine(view)
    if _own_machine(view) is None:
        # A dedicated machine is preferred as long as one may still come.
        may_share = (
            view.pending_fit_end is not None
            or view.validator_refusals > 0
            or _no_validator_available(view)
            or not (_staying_validators(view, state) or _wants_machine(view, state))
            or now >= _wait_ends_at(view, state)
        )
    return min(
        _working_members(view, state, "train") if may_share else (),
        key=lambda status: (status.member.agent != state.agent_id, _join_order(status)),
        default=None,
    )


def _own_machine(view: View) -> bool | None:
    """The option of that name; None also if the current fit has no validations."""
    return view.spec.validation.own_machine if view.spec.validation is not None else None


def _wait_ends_at(view: View, state: LeaderState) -> float:
    return (
        max(state.validation_changed_at, state.leading_since)
        + view.spec.timing.validator_wait_timeout_s
    )


def _wants_machine(view: View, state: LeaderState) -> bool:
    """Whether a dedicated machine is needed."""
    own_machine = _own_machine(view)
    if view.pending_fit_end is None:
        # Workers' machines take precedence: both use the same quota.
        is_group_complete = capacity.missing_workers(view, state) <= 0
        return own_machine is not False and not state.is_headless and is_group_complete
    # After the training the workers' machines may validate, as long as one is left.
    return own_machine is True or not _has_candidate(view, state)


def _has_candidate(view: View, state: LeaderState) -> bool:
    """Whether a node may run validations; for a headless leader, whether any machine is active."""
    if state.is_headless:
        return any(group.active_nodes for group in view.groups.values())
    if _working_members(view, state, "validate"):
        return True
    return _own_machine(view) is not True and bool(_working_members(view, state, "train"))


def _working_members(view: View, state: LeaderState, role: Role) -> list[MemberStatus]:
    """The usable members whose environment could be set up, as far as that is known.

    The leader's own machine is not recorded as lost while it leads.
    """
    members = capacity.usable_members(view, state, role)
    return [status for status in members if status.node_failure is None]


def _staying_validators(view: View, state: LeaderState) -> bool:
    """Whether a dedicated machine that may work runs or was requested."""
    broken = {
        (status.member.token, status.member.node)
        for status in state.members.values()
        if status.node_failure is not None
    }
    return any(node not in broken for node in capacity.staying_nodes(view, state, "validate"))


def _is_lost(view: View, state: LeaderState) -> bool:
    """Whether the current validation will have no result."""
    current = view.current_validation
    assert current is not None
    group = view.groups.get(current.token)
    is_node_lost = group is None or not group.is_node_active(current.node)
    return is_node_lost or current.agent in view.lost_agents or _is_attempt_lost(view, state)


def _is_attempt_lost(view: View, state: LeaderState) -> bool:
    """Whether the agent has reported the current attempt as lost."""
    current, reported = view.current_validation, state.validation_reported
    if current is None or reported is None:
        return False
    return reported.attempt == current.attempt and reported.status == "lost"


def _retry_backoff_s(view: View, state: LeaderState) -> float:
    """No pause before the first retry, and after a node was lost; otherwise exponential backoff."""
    if not _is_attempt_lost(view, state) or view.current_validation_tries < 2:
        return 0.0
    return exponential_backoff_s(
        view.current_validation_tries,
        shortest_s=_MIN_BACKOFF_S,
        longest_s=_MAX_BACKOFF_AFTER_TRAINING_S,
    )


def _permanent_failure_reason(view: View) -> str | None:
    """Why the next validation cannot succeed; None if it may."""
    if view.current_validation_tries >= _MAX_TRIES:
        return f"all {view.current_validation_tries} attempts were lost"
    if _own_machine(view) and _no_validator_available(view):
        reason = view.last_validator_refusal or "all machines failed to boot"
        return f"no dedicated machine is available: {reason}"
    return None


# --- machines ----------------------------------------------------------------------------------


def _no_validator_available(view: View) -> bool:
    return (
        view.permanent_validator_refusals > _MAX_PERMANENT_REFUSALS
        or view.validator_refusals > _MAX_REFUSALS
    )


def _held_groups(view: View, role: Role) -> list[Token]:
    return [
        token
        for token, group in view.groups.items()
        if group.role == role and group.handle is not None and not group.is_closed
    ]


def _is_own_group(view: View, state: LeaderState, token: Token) -> bool:
    """Whether the leader runs on a machine of that group."""
    own = state.members.get(state.agent_id)
    return own is not None and own.member.token == token


def _group_role(view: View, token: Token) -> Role | None:
    group = view.groups.get(token)
    return group.role if group is not None else None


def _join_order(status: MemberStatus) -> tuple[float, str]:
    return (status.joined_at, status.member.agent)
