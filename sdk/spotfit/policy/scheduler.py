"""The leader's scheduler: `next_action(view, state, now)` returns the next action, or a `Wait`.

A decision consists of ordered rules. Each rule yields its actions, or the `Wait`s after which it
must run again; the first action of the first rule that has one is returned. Rules are ordered by
urgency, and rules that call a cloud API come after those that do not, because such a call blocks
all rules behind it until it is answered. Only one action is taken per view: it is only valid
directly after the view it was decided from, so the next one is decided from the view it led to.

`next_round` is the rendezvous: when a round is opened, its members, and their ranks. It is delayed
while checkpoint uploads of the previous round are in flight (`wait_for_uploads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from msgspec.structs import replace

from spotfit.core.backoff import exponential_backoff_s
from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.core.units import format_count
from spotfit.model.events import (
    CheckpointCommitted,
    CheckpointDropped,
    FailureCause,
    FitEnded,
    GroupsReleased,
    MachinesObserved,
    NodeLost,
    PreemptionNoticed,
    RankFailure,
    RoundOpened,
    TrainingFunctionStarted,
)
from spotfit.model.group import NodeState, Role, find_node_status
from spotfit.model.leader_state import (
    Failing,
    LeaderState,
    MemberStatus,
    NoRound,
    Returned,
    Training,
)
from spotfit.model.spec import RunTiming
from spotfit.model.topology import NodeAssignment, Round
from spotfit.model.view import View
from spotfit.policy import (
    capacity,
    cost_budget,
    deadline_risk,
    election,
    failure_detection,
    feeder_schedule,
    machine_choice,
    network_change,
    offer_prices,
    partial_capacity,
    preemption,
    retention,
    retry_budget,
    time_budget,
    validation_schedule,
)
from spotfit.policy.actions import (
    AppendEvent,
    Idle,
    LeaderAction,
    ReleaseGroups,
    RequestMachines,
    SubmitGroup,
    Wait,
)
from spotfit.policy.capacity import (
    pending_slots,
    round_members,
    staying_members,
    usable_members,
)
from spotfit.policy.recovery import plan_memory_recovery
from spotfit.policy.request_backoff import next_request_at, offer_request_due_s
from spotfit.policy.retry_budget import fit_ended_by_budget
from spotfit.policy.secondary_errors import are_all_secondary

# Every event that changes the outcome wakes the leader; this bounds the delay if one was missed.
_MAX_WAIT_S = 30.0

# Time for workers to exit (and run their exit handlers) after all training functions have returned.
# The workers have a shorter limit of their own, so this one only applies if a node hangs.
_WORKER_EXIT_TIMEOUT_S = 45.0

# A cancelled run waits this long for the next step of the training and its snapshot, and, once the
# snapshot is being uploaded, for its commit. A second request ends it at once.
_CANCEL_SAVE_S = 120.0
_CANCEL_UPLOAD_S = 600.0

# Reports reach the callbacks within milliseconds; the bucket is searched within a few requests.
_REPORT_POLL_S = 0.05
_BUCKET_SEARCH_POLL_S = 0.1

# Interval at which disconnected agents and exiting machines are checked again.
_AGENT_POLL_S = 1.0


def next_action(view: View, state: LeaderState, now: float) -> LeaderAction:
    """Return the action of the first rule that has one, else the `Wait` that ends first. Pure.

    Valid only for exactly this view: append its event, or execute it, and decide again from the
    view that follows. `state` is what the leader `state.agent_id` observes at `now`, its
    `Clock.now()` in seconds. `Idle` means that the fit has ended and this leader may exit.
    Called by `control.reconciler`; the longest wait is 30 s.
    """
    waits = [Wait(now + _MAX_WAIT_S, "nothing to do")]
    for rule in _RULES_AFTER_END if view.fit_end else _RULES_WHILE_RUNNING:
        for action in rule(view, state, now):
            if not isinstance(action, Wait):
                return action
            waits.append(action)
    return min(waits, key=lambda wait: wait.until)


Rule = Callable[[View, LeaderState, float], Iterator[LeaderAction]]


def _submit_pending_groups(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    # Includes groups that a previous leader has planned: submitting is idempotent on the token.
    for token, group in view.groups.items():
        if group.is_pending:
            yield SubmitGroup(token)


def _end_at_time_budget(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    end = time_budget.end_of_time_budget(view, state, now)
    if isinstance(end, Wait):
        yield end
    elif end is not None:
        yield AppendEvent(end)


def _end_at_budget(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    end = cost_budget.end_of_budget(view, state, now)
    if isinstance(end, Wait):
        yield end
    elif end is not None:
        yield AppendEvent(end)


def _end_at_once(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """End a cancelled run, and one that no retry can continue."""
    if view.cancel_reason is not None:
        saved_by = _save_deadline(view, state)
        if saved_by is None or now >= saved_by:
            yield AppendEvent(
                FitEnded(
                    outcome="cancelled",
                    reason=view.cancel_reason,
                    metrics=state.latest_metrics,
                    is_time_budget=view.is_time_budget_used,
                    is_cost_budget=view.is_cost_budget_used,
                )
            )
        else:
            yield Wait(saved_by, "waiting for the last save before the run is cancelled")
    if state.user_code_error is not None:
        error = state.user_code_error
        failure = RankFailure(
            rank=-1, kind="raised", message=error.traceback_text, pickle_key=error.pickle_key
        )
        yield AppendEvent(_failed_event(error.reason, state, failures=(failure,)))
    # While validations are pending the training has already ended; missing machines do not fail it.
    if view.pending_fit_end is not None or view.round is not None:
        return
    reason = capacity.final_refusal_reason(view) or capacity.boot_failure_reason(view)
    if reason is not None and capacity.has_too_few_slots(view, state):
        yield AppendEvent(_failed_event(reason, state))
    # At once, although others may still boot: the run needs more machines than those.
    unreachable = retry_budget.fit_ended_by_unreachable(view, state, now)
    if unreachable is not None and capacity.has_too_few_slots(view, state):
        yield AppendEvent(_with_metrics(unreachable, state))
    # Other machines may still start an agent.
    failed_start = retry_budget.fit_ended_by_failed_starts(view)
    if failed_start is not None and pending_slots(view, state) == 0:
        yield AppendEvent(_with_metrics(failed_start, state))
    failures = [status.node_failure for status in capacity.usable_members(view, state)]
    permanent = next((failure for failure in failures if failure is not None), None)
    if permanent is not None:
        yield AppendEvent(_with_metrics(retry_budget.fit_ended_by_unusable_node(permanent), state))


def _save_deadline(view: View, state: LeaderState) -> float | None:
    """Until when a cancelled run waits for its last save; None if there is nothing to wait for."""
    if not view.saves_before_cancel:
        return None
    match state.phase:
        case Returned(since=since):
            return since + _CANCEL_SAVE_S  # the run finishes by itself
        case Training(save_requested_at=float(requested_at)) as training:
            commit = training.last_commit
            taken_at = commit.snapshot_taken_at if commit is not None else None
            if taken_at is not None and taken_at >= requested_at:
                return None
            if view.is_cost_budget_used:
                return requested_at + cost_budget.SAVE_S
            is_uploading = training.uploading_ranks or state.ready_checkpoints
            return requested_at + (_CANCEL_UPLOAD_S if is_uploading else _CANCEL_SAVE_S)
        case _:
            return None


def _record_notices_and_commits(
    view: View, state: LeaderState, now: float
) -> Iterator[LeaderAction]:
    # Notices first: a commit after the notice counts as saved since it (`preemption`).
    for agent, status in state.members.items():
        if status.notice in (None, view.notices.get(agent)) or agent in view.lost_agents:
            continue
        yield AppendEvent(PreemptionNoticed(agent=agent, notice=status.notice))
    for ready in state.ready_checkpoints:
        # A checkpoint that an earlier round has left says nothing about the age of this one.
        is_open = view.round is not None and view.round.number == ready.round
        yield AppendEvent(
            CheckpointCommitted(
                name=ready.name,
                round=ready.round,
                report_index=ready.report_index,
                metrics=ready.metrics,
                ranks=ready.ranks,
                size_bytes=ready.size_bytes,
                validation=ready.validation,
                round_age_s=_round_age_s(state, now) if is_open else None,
                is_snapshot=ready.is_snapshot,
                step=ready.step,
                reason=ready.reason,
                custom_folder=ready.custom_folder,
                manifests_digest=ready.manifests_digest,
                progress=ready.progress,
            )
        )


def _record_lost_nodes(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    for lost in capacity.find_lost_nodes(view, state, now):
        yield AppendEvent(feeder_schedule.with_failure(view, state, lost, now))


def _record_unusable_nodes(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """The loss of each machine for validations or feeders that cannot set up the environment.

    Excludes the leader's own machine, which is needed while it leads. The loss names no agent, like
    that of a machine lost while booting, and delays the next request like a refused machine. Such a
    machine of workers ends the fit.
    """
    roles: tuple[Role, ...] = ("validate", "feed")
    for status in chain.from_iterable(capacity.usable_members(view, state, one) for one in roles):
        if status.node_failure is not None and status.member.agent != state.agent_id:
            lines = status.node_failure.message.strip().splitlines() or ["unknown reason"]
            reason = f"its environment could not be set up: {lines[-1]}"
            token, node = status.member.token, status.member.node
            yield AppendEvent(
                NodeLost(token=token, node=node, agent=None, reason=reason, is_unusable=True)
            )


def _record_waiting_groups(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    # In the journal, because the user's process does not observe the backend.
    change = partial_capacity.waiting_reason_change(view, state)
    if change is not None and (view.round is None or view.spec.cost.chooses_offers):
        yield AppendEvent(change)


def _record_machine_times(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    if state.unrecorded_times:
        yield AppendEvent(MachinesObserved(times={**state.unrecorded_times}))


def _release_partial_capacity(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    if view.round is not None or _is_training_over(view):
        return
    lost = partial_capacity.partial_capacity_loss(view, state, now)
    if isinstance(lost, Wait):
        yield lost
    elif lost is not None:
        yield AppendEvent(lost)


def _replace_lost_nodes(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    former = view.leader.lost_leader if view.leader is not None else None
    former_missing = former is not None and former not in {*state.members, *view.lost_agents}
    if state.disconnected_since or former_missing:
        yield Wait(now + _AGENT_POLL_S, "waiting for disconnected agents")
    if view.spec.cost.chooses_offers:
        yield from _request_chosen_offers(view, state, now)
        return
    missing = capacity.missing_workers(view, state)
    # After a final refusal the run continues with the machines it has. One that has trained keeps
    # asking: it may need the machines after a later loss.
    is_over = _is_training_over(view) or retry_budget.fit_ended_by_failed_starts(view) is not None
    # A round that runs does not end; further machines are requested with growing pauses.
    if view.round is None and retry_budget.fit_ended_by_unreachable(view, state, now) is not None:
        is_over = True
    if missing <= 0 or is_over or view.final_refusal is not None:
        return
    request_at = next_request_at(view, state)
    if now < request_at:
        yield Wait(request_at, f"refused {view.refusals} times: {view.last_refusal}")
    else:
        reason = f"{missing} of {view.spec.max_workers} workers need a machine"
        yield RequestMachines(capacity.workers_to_request(view, missing), reason)


def _request_chosen_offers(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    is_over = _is_training_over(view) or retry_budget.fit_ended_by_failed_starts(view) is not None
    if is_over:
        return
    by_name = {offer.name: offer for offer in offer_prices.current_offers(view)}
    for name, missing in capacity.missing_by_offer(view, state):
        # A new leader pauses as well: the time of the refusal is in the journal.
        pause_s = offer_request_due_s(view, name) - state.elapsed_s
        if pause_s > 0:
            refusals = view.market.record_of(name).refusals
            reason = f"{name} was refused {refusals} times: {view.last_refusal}"
            if not refusals:
                reason = f"machines of the network of {name} could train nothing"
            yield Wait(now + pause_s, reason)
        else:
            reason = f"{missing} of {view.spec.max_workers} workers need a machine of {name}"
            workers = capacity.workers_to_request_of(view, state, name, missing)
            yield RequestMachines(workers, reason, offer=by_name[name])


def _record_prices(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    changed = offer_prices.price_changes(view, state)
    if changed is not None:
        yield AppendEvent(changed)


def _choose_machines(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    # The last save has no progress; other machines would train nothing.
    if _is_training_over(view) or isinstance(state.phase, Returned):
        return
    chosen = machine_choice.choose_machines(view, state, now)
    if chosen is None:
        end = cost_budget.end_without_offers(view, state)
        if end is not None and view.spec.cost.chooses_offers:
            yield AppendEvent(end)
        return
    before = view.market.choice
    if before is None or (before.workers, before.standing_offer) != (
        chosen.workers,
        chosen.standing_offer,
    ):
        yield AppendEvent(chosen)
    interval_s = view.spec.timing.decision_interval_s
    yield Wait(now + interval_s, f"the choice of machines: {chosen.reason}")


def _record_deadline_risk(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    if _is_training_over(view) or isinstance(state.phase, Returned):
        return
    risk = deadline_risk.find_deadline_risk(view, state, now)
    if risk is not None:
        yield AppendEvent(risk)


def _release_lost_groups(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    # The first renewal of the lease measures the clock with which the bill dates a release.
    clock_due_at = state.leading_since + view.spec.timing.lease_interval_s
    if state.wall_ms is None and now < clock_due_at and view.spec.cost.chooses_offers:
        yield Wait(min(now + _AGENT_POLL_S, clock_due_at), "the storage's clock is not measured")
        return
    # The request of a group may outlive its machines and would launch replacements.
    connected = {one.member.token for one in state.members.values()}
    surplus = capacity.surplus_groups(view, state)
    if surplus:
        yield ReleaseGroups(surplus[0], tuple(surplus[1:]))
    for token, group in view.groups.items():
        if group.handle is None or group.is_released or group.active_nodes:
            continue
        # A healthy machine, such as one that was replaced: its agent exits by itself.
        is_in_use = token in connected or (
            view.stands_by(token) and capacity.has_machines(state, token)
        )
        lost_at = state.loss_recorded_at.get(token, state.leading_since)
        exit_by = lost_at + capacity.SELF_EXIT_TIMEOUT_S
        if is_in_use and now < exit_by:
            yield Wait(min(now + _AGENT_POLL_S, exit_by), "a replaced machine is shutting down")
        else:
            yield ReleaseGroups(token)


def _drop_checkpoints(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    try:
        pending = {checkpoint.name for checkpoint in view.unvalidated_checkpoints}
        droppable = retention.checkpoints_to_drop(
            view.checkpoints, view.spec.retention, protected=pending
        )
    except ConfigError as error:
        yield AppendEvent(_failed_event(error.message, state))
        return
    for name, reason in droppable:
        yield AppendEvent(CheckpointDropped(name=name, reason=reason))


def _close_round(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    match state.phase:
        case NoRound():
            # No agent connects to a headless leader: it closes a round once all nodes are lost.
            round_ = view.round
            if round_ and all(one.agent in view.lost_agents for one in round_.assignments):
                yield AppendEvent(retry_budget.round_closed_by_failure(view, state, round_))
        case Returned() as returned:
            yield _finish_training(view, state, returned, now=now)
        case Failing(round=round_) as failing:
            # The first failure that arrives is often a consequence of the root cause: peers of a
            # lost node raise before its connection times out.
            settled_at = failing.since + _settle_s(view.spec.timing, failing)
            is_unexplained = any(
                failure_detection.is_unexplained_loss(view, state, one)
                for one in round_.assignments
            )
            if now < settled_at and (is_unexplained or not failing.workers_stopped):
                yield Wait(settled_at, "waiting for the root cause of the failure")
                return
            closed = retry_budget.round_closed_by_failure(
                view, state, round_, failing.rank_failures.values()
            )
            yield AppendEvent(replace(closed, duration_s=_round_age_s(state, now)))
        case Training() as training:
            yield from _interrupt_round(view, state, training, now=now)


def _settle_s(timing: RunTiming, failing: Failing) -> float:
    # The worker or machine that the exceptions are about is known once all agents have stopped
    # their workers, or one is disconnected; no round can be opened before.
    if are_all_secondary(failing.rank_failures.values()):
        return max(timing.failure_settle_s, timing.heartbeat_timeout_s)
    return timing.failure_settle_s


def _finish_training(
    view: View, state: LeaderState, returned: Returned, now: float
) -> LeaderAction:
    """End the fit once all reports are delivered and the workers have exited."""
    exit_deadline = returned.since + _WORKER_EXIT_TIMEOUT_S
    if not state.reports_delivered:
        return Wait(now + _REPORT_POLL_S, "delivering the last reports to the callbacks")
    if not returned.workers_stopped and now < exit_deadline:
        return Wait(exit_deadline, "the workers are exiting")
    finished = FitEnded(
        outcome="finished",
        metrics=state.latest_metrics,
        result_key=returned.result_key,
        last_save_error=returned.last_save_error,
        missing_reports=returned.missing_reports,
    )
    return validation_schedule.fit_end_action(view, finished)


def _interrupt_round(
    view: View, state: LeaderState, training: Training, now: float
) -> Iterator[LeaderAction]:
    for rule in (
        preemption.close_after_preemption,
        failure_detection.close_unstarted_round,
        preemption.replace_preempted_nodes,
        preemption.replace_working_nodes,
        preemption.resize_group,
    ):
        decision = rule(view, state, training, now)
        if isinstance(decision, Wait):
            yield decision
        elif decision is not None:
            yield AppendEvent(replace(decision, duration_s=_round_age_s(state, now)))


def _record_function_start(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    # Importing a framework on a busy machine takes a minute, in which a run looks like hanging.
    match state.phase:
        case Training(round=round_, since=since, running_ranks=ranks) if (
            view.round_startup_s is None and len(ranks) == round_.world_size
        ):
            yield AppendEvent(
                TrainingFunctionStarted(round_number=round_.number, startup_s=now - since)
            )
        case _:
            return


def _end_over_failure_budget(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    if view.round is not None or view.pending_fit_end:
        return
    ended = retry_budget.fit_ended_by_budget(view)
    if ended is None:
        return
    # The checkpoints of a failed run are completed, too: the next fit resumes from them.
    if isinstance(state.phase, NoRound) and not state.phase.bucket_searched:
        yield _wait_for_bucket_search(view, state, now)
    elif not state.reports_delivered:
        yield Wait(now + _REPORT_POLL_S, "delivering the last failure to the callbacks")
    else:
        yield validation_schedule.fit_end_action(view, _with_metrics(ended, state))


def _wait_for_bucket_search(view: View, state: LeaderState, now: float) -> Wait:
    searching = Wait(now + _BUCKET_SEARCH_POLL_S, "searching the bucket for complete checkpoints")
    return wait_for_uploads(view, state, now) or searching


def _hand_over_leadership(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """Between rounds, transfer the leadership from a node that leaves to one that stays.

    Otherwise the next round would end when the leader's node does (docs/decisions/0014). Or to
    another network, see `network_change`.
    """
    if view.round is not None or state.is_headless:
        return
    changed = network_change.change_network(view, state, now)
    if changed is not None and not _is_training_over(view):
        yield AppendEvent(changed)
        return
    staying = capacity.chosen_members(view, state) or capacity.usable_members(view, state)
    # The longest connected agent is the most likely one to be in good health, unless it is silent.
    silence_s = 2 * view.spec.timing.heartbeat_interval_s
    successors = sorted(
        staying,
        key=lambda one: (now - one.last_heard_at > silence_s, one.joined_at, one.member.agent),
    )
    reason = ""
    if state.agent_id in view.notices:
        reason = "the previous leader's node has a preemption notice"
    elif (own := state.members.get(state.agent_id)) is not None:
        is_last = capacity.is_last_attempt(state, own.member.token, own.member.node)
        has_successor = bool(capacity.staying_members(view, state))
        if is_last and has_successor:
            reason = "the backend would not restart the previous leader's node again"
        elif has_successor and not _stays(view, state, own):
            reason = "the run moves to machines of another offer"
    if reason and successors:
        yield AppendEvent(election.handover(view, successors[0].member, reason=reason))
        return
    elected = None if reason else validation_schedule.leader_handover(view, state)
    if elected is not None:
        yield AppendEvent(elected)


def _stays(view: View, state: LeaderState, own: MemberStatus) -> bool:
    """Whether the leader's machine is one of those that the run is to have."""
    if not view.spec.is_elastic:
        return not capacity.is_of_other_offer(view, own.member.token)
    return own in capacity.chosen_members(view, state)


def _open_round(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    phase = state.phase
    if not isinstance(phase, NoRound) or state.is_headless or _is_training_over(view):
        return
    if not phase.bucket_searched:
        yield _wait_for_bucket_search(view, state, now)
        return
    opened = next_round(view, state, now)
    if isinstance(opened, Wait):
        yield opened
    else:
        machines = format_count(len(opened.assignments), "machine")
        reason = f"{format_count(opened.world_size, 'worker')} on {machines}"
        yield AppendEvent(RoundOpened(round=opened, reason=reason))


def _is_training_over(view: View) -> bool:
    """Whether no further round will be opened."""
    return (
        view.pending_fit_end is not None
        or view.cancel_reason is not None
        or retry_budget.fit_ended_by_budget(view) is not None
    )


def _release_after_end(view: View, state: LeaderState, now: float) -> Iterator[LeaderAction]:
    """After the end: wait for machines to exit by themselves, then release the remaining groups.

    Requests with an unknown outcome are looked up after known machines are released. The leader's
    own group is released last, because cancelling it may terminate the leader, and once its
    deletions, reports and log lines are done. If the backend does not answer meanwhile, an agent
    leaves the other groups to the next leader, such as the client.
    """
    connected = {
        one.member.token for agent, one in state.members.items() if agent != state.agent_id
    } | _running_tokens(view, state)
    own_status = state.members.get(state.agent_id)
    # None for a headless leader, which runs on none of the machines.
    own = own_status.member.token if own_status is not None else None
    self_exit_until = state.phase.since + capacity.SELF_EXIT_TIMEOUT_S
    held = [token for token, group in view.groups.items() if group.handle and not group.is_closed]
    pending = [token for token, group in view.groups.items() if group.is_pending]
    if not held and not pending:
        yield Idle()
    exiting = [token for token in held if token in connected and now < self_exit_until]
    if exiting:
        yield Wait(min(now + _AGENT_POLL_S, self_exit_until), "machines are shutting down")
    # Where machines outlive their agents, an exit saves nothing.
    may_leave = state.releases_on_agent_exit and not state.is_headless
    is_leaving = may_leave and now >= state.phase.since + capacity.FINAL_CALLS_TIMEOUT_S
    due = [token for token in held if token not in exiting and token != own]
    if due and not is_leaving:
        yield ReleaseGroups(due[0], tuple(due[1:]))
    if pending and not is_leaving:
        yield SubmitGroup(pending[0])
    if own in held and own not in exiting:
        # A backend whose machines terminate with their agents needs no API call.
        ends = state.releases_on_agent_exit and _all_self_terminate(view, state, own)
        is_writing = state.has_unfinished_writes or (state.has_unwritten_logs and not ends)
        writes_until = state.phase.since + capacity.FINAL_WRITES_TIMEOUT_S
        if is_writing and now < writes_until:
            reason = "the leader deletes dropped checkpoints and stores reports and output"
            yield Wait(min(now + _AGENT_POLL_S, writes_until), reason)
            return
        if ends:
            yield AppendEvent(GroupsReleased(token=own))
        elif not is_leaving:
            yield ReleaseGroups(own)
    if is_leaving:
        yield Idle("the backend answers neither releases nor look-ups; the next leader continues")


def _running_tokens(view: View, state: LeaderState) -> set[Token]:
    """The groups whose agents may be shutting down, for a headless leader: no agent connects to it.

    Those of the last round that the backend reports as running.
    """
    last = view.last_round
    if not state.is_headless or last is None:
        return set()
    return {
        one.token
        for one in last.assignments
        if (status := find_node_status(state.group_statuses, one.token, one.node)) is not None
        and status.state is NodeState.RUNNING
    }


def _all_self_terminate(view: View, state: LeaderState, token: Token) -> bool:
    """Whether every machine of the group has had an agent (which ends it) or is terminated."""
    group_status = state.group_statuses.get(token)
    terminated = [status.is_terminated for status in group_status.nodes] if group_status else []
    return all(
        (token, node) in state.last_agent_by_node or terminated[node : node + 1] == [True]
        for node in range(view.groups[token].plan.num_nodes)
    )


def _failed_event(
    reason: str, state: LeaderState, *, failures: tuple[RankFailure, ...] = ()
) -> FitEnded:
    return FitEnded(
        outcome="failed",
        reason=reason,
        cause=FailureCause.PLATFORM,
        failures=failures,
        metrics=state.latest_metrics,
    )


def _round_age_s(state: LeaderState, now: float) -> float | None:
    """Age of the open round; None if another leader opened it, whose clock cannot be compared."""
    match state.phase:
        case Training(since=opened_at) | Returned(opened_at=opened_at):
            return now - opened_at
        case Failing(opened_at=float(opened_at)):
            return now - opened_at
        case _:
            return None


def _with_metrics(fit_end: FitEnded, state: LeaderState) -> FitEnded:
    return replace(fit_end, metrics=state.latest_metrics)


_RULES_WHILE_RUNNING: tuple[Rule, ...] = (
    _end_at_time_budget,
    _end_at_budget,
    _end_at_once,
    # Before _close_round: a complete checkpoint of a failing round must be committed.
    _record_notices_and_commits,
    validation_schedule.record_result,
    _drop_checkpoints,
    _close_round,
    # Before _end_over_failure_budget: a loss may revise the cause of the closed round. Before
    # _replace_lost_nodes: a lost node counts as missing only once it is recorded.
    _record_lost_nodes,
    _record_waiting_groups,
    # Before _replace_lost_nodes, which requests all machines again.
    _release_partial_capacity,
    _record_function_start,
    _end_over_failure_budget,
    validation_schedule.end_after_validations,
    _record_prices,
    # Before _replace_lost_nodes, which requests machines of the chosen offers.
    _choose_machines,
    # Before _open_round: planning needs no cloud API call, and machines boot slowly.
    _replace_lost_nodes,
    _record_unusable_nodes,
    validation_schedule.request_validator,
    # Before _open_round: a leader that leaves must not open a round.
    _hand_over_leadership,
    validation_schedule.start_validation,
    _open_round,
    # After _open_round and the machines of workers, which may need the same quota.
    feeder_schedule.request_feeders,
    # After _open_round: only decisions that take minutes depend on these, or none.
    _record_deadline_risk,
    _record_machine_times,
    # The rules below call a cloud API and may block the leader's decisions for seconds.
    _submit_pending_groups,
    _release_lost_groups,
    validation_schedule.release_validators,
    validation_schedule.release_idle_groups,
    feeder_schedule.release_feeders,
)

_RULES_AFTER_END: tuple[Rule, ...] = (_release_after_end, _record_machine_times)


# --- Rendezvous -----------------------------------------------------------------------------------


# Several rounds in a row may fail quickly, for example while the network is unstable. After five
# rounds without a commit, retries slow down to one in 30 s: a round that always fails then costs
# little, and one that would succeed is delayed little.
_ROUNDS_BEFORE_BACKOFF = 5
_MIN_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0


def next_round(view: View, state: LeaderState, now: float) -> Round | Wait:
    """Return the round to open now, or a `Wait` until it is decided again, with what is missing.

    Waits for `min_workers`, for workers of the last round to stop, up to `round_fill_timeout_s` for
    machines that boot, and longer after rounds without a checkpoint. The round has the next number,
    the assignments of all ranks, and the checkpoint or memory snapshot to resume from. `now` is the
    leader's `Clock.now()` in seconds. Called by the scheduler between rounds; the caller appends
    `RoundOpened`.
    """
    failures = view.rounds_without_progress - _ROUNDS_BEFORE_BACKOFF
    backoff_s = exponential_backoff_s(failures, shortest_s=_MIN_BACKOFF_S, longest_s=_MAX_BACKOFF_S)
    backoff_ends_at = state.phase.since + backoff_s
    if failures > 0 and now < backoff_ends_at:
        reason = f"{view.rounds_without_progress} rounds in a row ended without a checkpoint"
        return Wait(backoff_ends_at, reason)
    members = usable_members(view, state)
    stopping = [status for status in members if status.running_round is not None]
    if stopping:
        return Wait(now + 1.0, f"workers of the last round are stopping on {len(stopping)} nodes")
    slots = sum(status.member.slots for status in members)
    if slots < max(1, view.spec.min_workers):
        return Wait(now + 5.0, f"slots for {slots} of at least {view.spec.min_workers} workers")
    fill_timeout_at = state.phase.since + view.spec.timing.round_fill_timeout_s
    # After a refusal, the pending machines are not expected soon.
    is_refused = view.last_refusal is not None and now < next_request_at(view, state)
    may_grow = (
        slots < view.spec.max_workers and capacity.is_start_expected(view, state) and not is_refused
    )
    if may_grow and now < fill_timeout_at:
        reason = f"slots for {slots} of {view.spec.max_workers} workers; more machines are booting"
        return Wait(fill_timeout_at, reason)
    # Prefer machines that the backend would restart, if they suffice for a full round.
    members = round_members(view, state)
    staying = sum(status.member.slots for status in staying_members(view, state))
    is_full = staying >= view.spec.max_workers
    if not is_full and (rejoin := _wait_for_chosen_machines(view, state, now)) is not None:
        return rejoin
    return _form_round(view, members)


def _wait_for_chosen_machines(view: View, state: LeaderState, now: float) -> Wait | None:
    """A `Wait` for the machines of the chosen offer, after a move to them that changed the leader.

    A round with some of the others would be interrupted once more. None after the time that agents
    take to connect to a new leader.
    """
    until = max(state.phase.since, state.leading_since) + view.spec.timing.rejoin_timeout_s
    choice, members = view.market.choice, usable_members(view, state)
    is_moving = any(capacity.is_of_other_offer(view, one.member.token) for one in members)
    if choice is None or not is_moving or now >= until:
        return None
    # Those of another network do not connect: the run changes to it, see `network_change`.
    requests = view.market.requests.items()
    if any(view.stands_by(token) for token, one in requests if one.offer in choice.workers):
        return None
    chosen = sum(capacity.slots_of_offer(view, state, name) for name in choice.workers)
    if chosen < view.spec.max_workers:
        return None
    return Wait(until, f"machines of {', '.join(choice.workers)} connect to the leader")


def _form_round(view: View, members: Sequence[MemberStatus]) -> Round:
    """Assign ranks to the members, up to `max_workers`."""
    # Members of the last round come first and in the same order, so that ranks keep their local
    # shards.
    last = view.last_round.assignments if view.last_round else ()
    node_ranks = {one.agent: float(one.node_rank) for one in last}
    ordered = sorted(
        (status.member for status in members),
        key=lambda member: (node_ranks.get(member.agent, math.inf), member.token, member.node),
    )
    first_rank = 0
    assignments: list[NodeAssignment] = []
    for member in ordered:
        num_workers = min(member.slots, view.spec.max_workers - first_rank)
        if num_workers == 0:
            break
        node_rank = len(assignments)
        assignments.append(
            member.assign(node_rank=node_rank, first_rank=first_rank, num_workers=num_workers)
        )
        first_rank += num_workers
    number = view.last_round.number + 1 if view.last_round else 1
    latest = view.latest_checkpoint
    round_ = Round(
        number=number,
        assignments=tuple(assignments),
        checkpoint_name=latest.name if latest else None,
    )
    memory = plan_memory_recovery(view, assignments, members)
    if memory is None:
        return round_
    return replace(round_, memory_snapshot=memory.snapshot_id, shard_holders=memory.shard_holders)


# --- How long to delay the next round for checkpoint uploads --------------------------------------


def wait_for_uploads(view: View, state: LeaderState, now: float) -> Wait | None:
    """Return the `Wait` for uploads of the last round, or None if there is nothing to wait for.

    A commit saves the work done since the last commit, `uncommitted_work_s`; whether it will
    succeed is unknown. Waiting at most that long costs at most twice the optimal choice (the ski
    rental argument). If no round follows, all uploads are awaited for up to `upload_timeout_s`: the
    nodes' memory is lost then. `now` is the leader's `Clock.now()` in seconds.
    """
    last, phase = view.last_round, state.phase
    if not isinstance(phase, NoRound) or last is None:
        return None
    is_final = fit_ended_by_budget(view) is not None
    connected = [one for one in last.assignments if one.agent in state.members]
    members = state.members.values()
    # The snapshot in memory is at least as new as the one that is being uploaded.
    if not is_final and plan_memory_recovery(view, connected, members) is not None:
        return None
    timing = view.spec.timing
    worth_s = math.inf if is_final else phase.uncommitted_work_s
    until = phase.since + min(worth_s, timing.upload_timeout_s)
    uploading = [status for status in members if status.uploading_round == last.number]
    if uploading and now < until:
        return Wait(until, f"{len(uploading)} nodes are still uploading a checkpoint")
    # Only after its workers have stopped does a node report the uploads they left to it.
    stop_at = phase.since + min(worth_s, timing.stop_timeout_s)
    if now < stop_at and any(status.running_round == last.number for status in members):
        return Wait(stop_at, "workers of the last round are stopping and may leave uploads")
    return None
