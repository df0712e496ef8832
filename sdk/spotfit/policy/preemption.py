"""Preemption: what to save before a node's deadline, when to replace nodes, and when to resize.

After a notice the group keeps training while the replacement boots. The leader decides when to end
the round (`replace_preempted_nodes`), rank 0 decides when to save (`decide_final_save`):

    state of the round with a notice              | event                                | next
    ----------------------------------------------|--------------------------------------|-----------
    training, waiting for the replacement         | replacement ready and saved          | closed
    training, waiting for the replacement         | deadline                             | closed
    replacement ready, no save since the notice   | commit, or replica on nodes that stay| closed
    replacement ready, old snapshot in flight     | commit of a newer one, or replica    | closed
    replacement ready                             | `_DEADLINE_MARGIN_S` before deadline | closed
    replacement granted and saved; a backend that | `exit_margin_s` before the deadline  | closed
    restarts machines                             |                                      |

Closing directly after a save loses no steps (docs/decisions/0014); a replica on a peer that stays
is as good as a commit, because the next round resumes from memory (docs/decisions/0037).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from spotfit.core.ids import AgentId
from spotfit.core.units import format_seconds
from spotfit.model.events import FailureCause, RoundClosed
from spotfit.model.failure_model import SaveCostEstimate
from spotfit.model.leader_state import LeaderState, Training
from spotfit.model.topology import NodeAssignment, Notice, Round
from spotfit.model.view import View
from spotfit.policy import network_change
from spotfit.policy.actions import Wait
from spotfit.policy.capacity import (
    chosen_members,
    is_last_attempt,
    is_of_other_offer,
    is_replaced,
    is_start_expected,
    joining_slots,
    round_members,
    usable_members,
)
from spotfit.policy.failure_detection import is_missing
from spotfit.policy.idle_machines import reason_to_repeat
from spotfit.policy.retry_budget import preempted_nodes, round_closed_by_failure
from spotfit.protocol.agent_peer import REPLICATION_BYTES_PER_S

# The time to a deadline that a notice does not specify. AWS terminates two minutes after its
# notice; the sources of clouds with shorter notices specify the time.
DEFAULT_NOTICE_S = 120.0

# A round is only closed this soon after a commit: closing later would discard the steps since then.
_FRESH_COMMIT_S = 0.25

# Upper bound of a wait for a commit. The commit itself wakes the leader, so this is only a safety
# net.
_COMMIT_POLL_S = 1.0

# The round is closed this long before the deadline, even without a fresh commit: stopping the
# workers cleanly is then still possible, and resuming from memory needs the node's replicas only.
_DEADLINE_MARGIN_S = 2.0

# An agent that has a replacement exits this long before the deadline, or a fifth of its notice if
# that is shorter: otherwise its backend would restart the lost machine as well. It stops its
# workers and stores its last log lines before.
_EXIT_MARGIN_S = 5.0
_EXIT_MARGIN_FRACTION = 0.2

# Safety margins on the estimated duration of the final save: a fifth for varying throughput, and a
# second for the manifests and the journal entry, which are written after the last upload.
_SLOWDOWN_MARGIN = 0.2
_COMMIT_MARGIN_S = 1.0

# Assumed probability that a machine is terminated before the announced deadline. Work worth more
# than a save's costs at this probability is saved at once.
_EARLY_LOSS_FRACTION = 0.01

_SAVED_REASON = "checkpoint saved after the preemption notice"

SaveTarget = Literal["bucket", "peer"]
"""Where the leaving node uploads its shard of the snapshot first."""


class PreDeadlineState(msgspec.Struct, frozen=True):
    """The input of `decide_final_save`, for the rank with the largest shard."""

    time_left_s: float
    """Seconds until the machine is terminated."""
    unsaved_work_s: float
    """Training time since the last snapshot that is committed or in flight."""
    step_s: float
    costs: SaveCostEstimate
    size_bytes: int
    """Size of the largest shard that a rank must upload."""
    bucket_bytes_per_s: float
    """Measured throughput of earlier saves, from the snapshot to the commit."""
    peer_bytes_per_s: float = 0.0
    """Throughput to a peer that stays; 0 if there is none."""
    in_flight_remaining_s: float | None = None
    """Seconds until the save in flight is committed; None if none is in flight."""
    has_free_slot: bool = True
    """Whether memory for another snapshot is free. Otherwise a save would block the training until
    an earlier one is uploaded."""
    replacement_ready: bool = False
    """Whether the next round could be opened at once."""
    max_step_s: float = 0.0
    """Duration of the slowest step, such as one with an evaluation."""


class FinalSave(NamedTuple):
    """Take a snapshot at the next step and upload it to `target` first."""

    target: SaveTarget
    reason: str


class ContinueTraining(NamedTuple):
    """Continue training for `for_s` seconds, then decide again."""

    for_s: float
    reason: str


class AwaitSaveInFlight(NamedTuple):
    """Take no further snapshot: it would slow down the save in flight."""

    reason: str


class NoTimeToSave(NamedTuple):
    """No save can be completed before the deadline."""

    reason: str


def replace_preempted_nodes(
    view: View, state: LeaderState, training: Training, now: float
) -> RoundClosed | Wait | None:
    """Decide when a round with a notice ends: once replaced and saved, or at the deadline.

    Returns the end of the round, a `Wait` until it is decided again, or None if no assigned node
    has a preemption notice. The deadline is the announced one, or `DEFAULT_NOTICE_S` after the
    notice, plus `preemption_grace_s`. `now` is the leader's `Clock.now()` in seconds. Called by the
    scheduler in every decision during a round.
    """
    leaving = [one for one in training.round.assignments if one.agent in view.notices]
    if not leaving:
        return None
    deadline = min(_deadline(view, state, assignment.agent) for assignment in leaving)
    if now >= deadline:
        preempted = preempted_nodes(leaving, view, drain_timed_out=True)
        reason = "the preemption deadline has passed"
        return RoundClosed(
            round_number=training.round.number,
            cause=FailureCause.PREEMPTION,
            reason=reason,
            preempted=preempted,
        )
    replicated_at = _replicated_at(state, training, leaving)
    is_committed = _is_saved_since_notice(view, [assignment.agent for assignment in leaving])
    is_saved = is_committed or replicated_at is not None
    if is_saved and state.requeues_itself and _must_exit(view, state, leaving, now=now):
        return RoundClosed(
            round_number=training.round.number,
            cause=FailureCause.PREEMPTION,
            reason="the preemption deadline is near, and a replacement was granted",
            preempted=preempted_nodes(leaving, view),
            state_replicated=replicated_at is not None,
        )
    if not is_saved or not is_replacement_ready(view, state):
        margin_s = exit_margin_s(view.notices[leaving[0].agent]) if state.requeues_itself else 0.0
        wake_at = deadline - margin_s if now < deadline - margin_s else deadline
        return Wait(wake_at, f"{len(leaving)} nodes leave in {deadline - now:.0f} s")
    if (
        now >= deadline - _DEADLINE_MARGIN_S
        or (replicated_at is not None and now - replicated_at <= _FRESH_COMMIT_S)
        or (
            is_committed
            and _committed_just_now(training, now)
            and not _newer_snapshot_coming(view, training, time_left_s=deadline - now)
        )
    ):
        return _close_after_save(view, state, training, leaving=leaving)
    reason = "replacement ready; the round ends at the next save"
    return Wait(deadline - _DEADLINE_MARGIN_S, reason)


def _replicated_at(
    state: LeaderState, training: Training, leaving: list[NodeAssignment]
) -> float | None:
    """When the leaving nodes had replicated one snapshot, taken after their notices, to nodes that
    stay; None if a shard is missing. Nodes that stay hold their own shards. The other nodes of an
    instance that leaves do not stay: their own notices arrive later."""
    staying = {
        one.peer_store_address
        for one in training.round.assignments
        if one not in leaving and not any(one.shares_instance(other) for other in leaving)
    }
    replicas = [training.replica_locations.get(rank) for one in leaving for rank in one.ranks]
    safe = [one for one in replicas if one is not None and one.peer_store_address in staying]
    if len(safe) < len(replicas) or len({replica.step for replica in safe}) != 1:
        return None
    reported_at = [replica.reported_at for replica in safe]
    return max(reported_at) if min(reported_at) > _latest_notice_at(state, leaving) else None


def _latest_notice_at(state: LeaderState, leaving: list[NodeAssignment]) -> float:
    return max(state.notice_received_at.get(one.agent, state.leading_since) for one in leaving)


def _newer_snapshot_coming(view: View, training: Training, time_left_s: float) -> bool:
    """Whether nodes that stay will soon hold a newer snapshot than the one just committed.

    That is so if the committed snapshot was taken before the workers were notified that the
    replacement is ready (they take another one then), and if a replica can arrive before the
    deadline.
    """
    taken_at = _snapshot_taken_at(training)
    ready_at = training.replacement_ready_at
    if taken_at is None or ready_at is None or taken_at >= ready_at:
        return False
    staying = [one for one in training.round.assignments if one.agent not in view.notices]
    can_replicate = bool(staying) and all(one.peer_store_address for one in staying)
    # The latest checkpoint is the best estimate of the snapshot's size; shards are of similar size.
    latest = view.latest_checkpoint
    shard_bytes = latest.size_bytes / len(training.round.assignments) if latest is not None else 0.0
    transfer_s = (1 + _SLOWDOWN_MARGIN) * shard_bytes / REPLICATION_BYTES_PER_S + _COMMIT_MARGIN_S
    # The leaving machine does not exist any more during the grace period.
    machine_left_s = time_left_s - view.spec.failure_limits.preemption_grace_s
    return can_replicate and transfer_s < machine_left_s - _DEADLINE_MARGIN_S


def _close_after_save(
    view: View, state: LeaderState, training: Training, leaving: list[NodeAssignment]
) -> RoundClosed:
    """Close the round without loss: as PREEMPTION, or as RESIZE if an elastic group shrinks."""
    is_replicated = _replicated_at(state, training, leaving) is not None
    taken_at = _snapshot_taken_at(training)
    is_older = taken_at is not None and taken_at < _latest_notice_at(state, leaving)
    saved = _SAVED_REASON
    if is_older and not is_replicated:
        saved = "checkpoint saved before the preemption notice was committed"
    slots = _warm_slots(view, state)
    if slots < view.spec.max_workers:
        return RoundClosed(
            round_number=training.round.number,
            cause=FailureCause.RESIZE,
            reason=f"{saved}; continuing with {slots} workers",
            state_replicated=is_replicated,
        )
    return RoundClosed(
        round_number=training.round.number,
        cause=FailureCause.PREEMPTION,
        reason=f"{saved}; replacement ready",
        preempted=preempted_nodes(leaving, view),
        state_replicated=is_replicated,
    )


def decide_final_save(
    deadline_state: PreDeadlineState,
) -> FinalSave | ContinueTraining | AwaitSaveInFlight | NoTimeToSave:
    """Decide when to take the last snapshot before the deadline, and where to upload it. Pure.

    Called by rank 0 in its periodic checks after a preemption notice; times in the input and the
    result are relative, in seconds. Normally as late as it is certain to be complete in time: all
    work until then is kept. At once if the replacement is ready, because then the round waits for
    nothing else, or if much work is unsaved. `AwaitSaveInFlight` and `NoTimeToSave` mean that no
    snapshot is taken. None is taken while the training would block on an earlier save.
    """
    time_left = f"{format_seconds(max(0.0, deadline_state.time_left_s))} left"
    targets: tuple[SaveTarget, ...] = ("bucket", "peer")
    reachable = (
        one for one in targets if _time_needed_s(deadline_state, one) <= deadline_state.time_left_s
    )
    # The bucket is preferred: a checkpoint there also survives the loss of the peer.
    if (target := next(reachable, None)) is None:
        if deadline_state.in_flight_remaining_s is not None:
            return AwaitSaveInFlight(f"{time_left}: not enough for another save")
        return NoTimeToSave(f"{time_left}: not enough for a save")
    if deadline_state.replacement_ready and deadline_state.in_flight_remaining_s is not None:
        return _decide_beside_in_flight(deadline_state)
    needed_s = _time_needed_s(deadline_state, target)
    duration = f"a save to the {target} takes {format_seconds(needed_s)}"
    spare_s = deadline_state.time_left_s - needed_s
    if deadline_state.replacement_ready:
        return FinalSave(target, f"replacement ready; {duration}")
    if not deadline_state.has_free_slot:
        return ContinueTraining(
            max(spare_s, deadline_state.step_s), "no memory for another snapshot is free"
        )
    if spare_s < deadline_state.step_s + _next_check_in_s(deadline_state):
        return FinalSave(target, f"{time_left}; {duration}")
    expected_loss_s = _EARLY_LOSS_FRACTION * deadline_state.unsaved_work_s
    if (
        deadline_state.in_flight_remaining_s is None
        and expected_loss_s > deadline_state.costs.cost_per_save_s
    ):
        unsaved = f"{format_seconds(deadline_state.unsaved_work_s)} of unsaved work"
        return FinalSave(target, f"{unsaved}; {duration}")
    return ContinueTraining(spare_s - _next_check_in_s(deadline_state), f"{time_left}; {duration}")


def _decide_beside_in_flight(deadline_state: PreDeadlineState) -> FinalSave | AwaitSaveInFlight:
    """With the replacement ready and a save in flight: wait for that, or save newer work to a peer.

    A newer snapshot is worth it once more was trained since the last one than is trained while the
    newer one is taken and replicated.
    """
    needed_s = _time_needed_s(deadline_state, "peer")
    if (
        deadline_state.has_free_slot
        and needed_s <= deadline_state.time_left_s
        and needed_s < deadline_state.unsaved_work_s
    ):
        unsaved = f"{format_seconds(deadline_state.unsaved_work_s)} of unsaved work"
        duration = f"a save to the peer takes {format_seconds(needed_s)}"
        return FinalSave("peer", f"replacement ready; {unsaved}; {duration}")
    return AwaitSaveInFlight("replacement ready; waiting for the save in flight")


def _next_check_in_s(deadline_state: PreDeadlineState) -> float:
    """The longest time until the next decision: one step."""
    # The next step may be the slowest one. But saving earlier for its sake is only worth it if at
    # least as much work is unsaved as that step would be late.
    if deadline_state.unsaved_work_s < deadline_state.max_step_s:
        return deadline_state.step_s
    return max(deadline_state.step_s, deadline_state.max_step_s)


def _time_needed_s(deadline_state: PreDeadlineState, target: SaveTarget) -> float:
    """Seconds until a snapshot taken at the next step is safe; infinite if there is no such
    target."""
    bytes_per_s = (
        deadline_state.bucket_bytes_per_s if target == "bucket" else deadline_state.peer_bytes_per_s
    )
    if bytes_per_s <= 0:
        return float("inf")
    transfer_s = (1 + _SLOWDOWN_MARGIN) * deadline_state.size_bytes / bytes_per_s
    # Uploads to the bucket run one after the other; replication to a peer uses another connection.
    queued_s = (deadline_state.in_flight_remaining_s or 0.0) if target == "bucket" else 0.0
    snapshot_s = deadline_state.step_s + deadline_state.costs.stall_s
    return queued_s + snapshot_s + transfer_s + _COMMIT_MARGIN_S


def may_continue_without(view: View, assignment: NodeAssignment) -> bool:
    """Whether the remaining ranks may continue and save after the assigned node was disconnected.

    That requires a preemption notice of the node, an option that enables it
    (`relax_collectives_on_preemption` or `preemption_grace_s`), and rank 0 on another node: rank 0
    decides about saves and reports the metrics. Otherwise the leader ends the round at once.
    """
    is_enabled = view.spec.relax_collectives or view.spec.failure_limits.preemption_grace_s > 0
    return is_enabled and assignment.agent in view.notices and 0 not in assignment.ranks


def close_after_preemption(
    view: View, state: LeaderState, training: Training, now: float
) -> RoundClosed | Wait | None:
    """Decide when a round with disconnected or lost nodes ends, so that other ranks save first.

    Returns the end of the round, charged to its cause, a `Wait` while the remaining ranks save, or
    None if no node is missing. They may finish a checkpoint that needs no lost rank and, with
    relaxed collectives, start one; both until the deadline plus `preemption_grace_s`, and only
    after a notice. `now` is the leader's `Clock.now()` in seconds. Called by the scheduler.
    """
    lost = [one for one in training.round.assignments if is_missing(view, state, one)]
    if not lost:
        return None
    agents = [assignment.agent for assignment in lost if assignment.agent in view.notices]
    until = min((_deadline(view, state, agent) for agent in agents), default=now)
    lost_ranks = {rank for assignment in lost for rank in assignment.ranks}
    can_finish = bool(training.uploading_ranks) and lost_ranks.isdisjoint(training.uploading_ranks)
    can_start = view.spec.relax_collectives and not _is_saved_since_notice(view, agents)
    if now < until and (can_finish or can_start):
        return Wait(until, f"ranks {sorted(lost_ranks)} are lost; the remaining ranks are saving")
    return round_closed_by_failure(view, state, training.round)


def replace_working_nodes(
    view: View, state: LeaderState, training: Training, now: float
) -> RoundClosed | Wait | None:
    """Decide when a round ends to replace machines that still work.

    Those that their backend would not restart again, and those of an offer that is not chosen any
    more. The end comes directly after a commit, so that no step is lost, with the cause RESIZE;
    before that a `Wait`, unless the next round has more workers and `idle_machines` does not wait.
    Returns None if no assigned machine is to be replaced, or if not enough other machines are
    ready. `now` is the leader's `Clock.now()` in seconds. Called by the scheduler.
    """
    last = [
        one for one in training.round.assignments if is_last_attempt(state, one.token, one.node)
    ]
    other = _moving_nodes(view, state, training.round)
    if not (last or other) or not _can_replace_all(view, state, training.round):
        return None
    names = ", ".join(assignment.machine_name for assignment in last)
    reason = f"the backend would not restart {names} again"
    if other and view.market.choice is not None:
        reason = f"moving to {', '.join(view.market.choice.workers)}"
    ready = f"{reason}; replacement ready"
    if not _is_commit_fresh(view, training, now):
        slots = min(view.spec.max_workers, _chosen_warm_slots(view, state))
        repeated = _reason_to_repeat(view, state, training, now, slots=slots)
        if not repeated:
            return Wait(now + _COMMIT_POLL_S, f"{reason}; replacing after the next commit")
        ready = f"{ready}; {repeated}"
    return RoundClosed(round_number=training.round.number, cause=FailureCause.RESIZE, reason=ready)


def is_move_ready(view: View, state: LeaderState) -> bool:
    """Whether all workers of the open round could move to machines of another offer at once.

    The leader then asks the workers to save: `replace_working_nodes` ends the round after that.
    """
    if view.round is None:
        return False
    is_moving = bool(_moving_nodes(view, state, view.round))
    return is_moving and _can_replace_all(view, state, view.round)


def _moving_nodes(view: View, state: LeaderState, round_: Round) -> list[NodeAssignment]:
    """The nodes of the round that the run is to replace by those that it has chosen.

    Of an offer that is not chosen any more, and in an elastic run also those beyond the number of
    workers that are chosen on their offer.
    """
    other = [one for one in round_.assignments if is_of_other_offer(view, one.token)]
    if other or not view.spec.is_elastic or view.market.choice is None:
        return other
    chosen = {one.member.agent for one in chosen_members(view, state)}
    usable = {one.member.agent for one in usable_members(view, state)}
    return [one for one in round_.assignments if one.agent in usable - chosen]


def _can_replace_all(view: View, state: LeaderState, round_: Round) -> bool:
    """Whether machines that stay, or those of another network, could continue the open round."""
    is_warm = _are_replacements_warm(view, state, round_)
    return is_warm or network_change.is_change_ready(view, state)


def _are_replacements_warm(view: View, state: LeaderState, round_: Round) -> bool:
    """Whether the machines that stay could train with as many workers as a move needs."""
    return _chosen_warm_slots(view, state) >= view.workers_to_move(round_.world_size)


def _chosen_warm_slots(view: View, state: LeaderState) -> int:
    return sum(one.member.slots for one in chosen_members(view, state) if one.is_warm)


def resize_group(
    view: View, state: LeaderState, training: Training, now: float
) -> RoundClosed | Wait | None:
    """Decide when the round of an elastic group ends so that the next one has more workers.

    The end comes directly after a commit, so that no step is lost, or before one if
    `idle_machines.reason_to_repeat` has a reason, and not before
    `elastic_resize_monitor_interval_s` since the round was opened; before that a `Wait`. Returns
    None if the group cannot grow. `now` is the leader's `Clock.now()` in seconds. Called by the
    scheduler.
    """
    workers, slots = training.round.world_size, _slots_to_grow(view, state, training.round)
    if slots <= workers:
        return None
    due_at = training.since + view.spec.resize_interval_s
    if now < due_at:
        reason = f"slots for {slots} workers; waiting for elastic_resize_monitor_interval_s"
        return Wait(due_at, reason)
    reason = f"growing from {workers} to {slots} workers"
    if not _is_commit_fresh(view, training, now):
        repeated = _reason_to_repeat(view, state, training, now, slots=slots)
        if not repeated:
            reason = f"slots for {slots} workers; growing after the next commit"
            return Wait(now + max(view.spec.resize_interval_s, _COMMIT_POLL_S), reason)
        reason = f"{reason}; {repeated}"
    return RoundClosed(round_number=training.round.number, cause=FailureCause.RESIZE, reason=reason)


def is_growth_due(view: View, state: LeaderState, now: float) -> bool:
    """Whether the open round of an elastic group only waits for a commit to grow.

    The leader then asks the workers to save: `resize_group` ends the round after that. `now` is the
    leader's `Clock.now()` in seconds.
    """
    match state.phase:
        case Training(round=round_, since=since):
            is_due = now >= since + view.spec.resize_interval_s
            return is_due and _slots_to_grow(view, state, round_) > round_.world_size
        case _:
            return False


def _slots_to_grow(view: View, state: LeaderState, round_: Round) -> int:
    """How many workers the next round could have at once; 0 in a group that may not grow."""
    if not view.spec.is_elastic or round_.world_size >= view.spec.max_workers:
        return 0
    warm = (one.member.slots for one in round_members(view, state) if one.is_warm)
    return min(view.spec.max_workers, sum(warm))


def _reason_to_repeat(
    view: View, state: LeaderState, training: Training, now: float, *, slots: int
) -> str:
    # Before the deadline of a notice the workers save for the last time.
    if any(one.agent in view.notices for one in training.round.assignments):
        return ""
    is_expected = is_start_expected(view, state)
    return reason_to_repeat(view, training, now, slots=slots, is_start_expected=is_expected)


def _snapshot_taken_at(training: Training) -> float | None:
    return training.last_commit.snapshot_taken_at if training.last_commit is not None else None


def _committed_just_now(training: Training, now: float) -> bool:
    commit = training.last_commit
    return commit is not None and now - commit.committed_at <= _FRESH_COMMIT_S


def _is_commit_fresh(view: View, training: Training, now: float) -> bool:
    """Whether the open round has committed just now (not an upload left by an earlier round)."""
    return (
        _committed_just_now(training, now) and view.latest_committed_slot > view.round_opened_slot
    )


def is_replacement_ready(view: View, state: LeaderState) -> bool:
    """Whether the next round could be opened at once without the machines that have a notice.

    True if usable agents whose workers start without delay have slots for `max_workers` or, in an
    elastic run without pending machines, for `min_workers`. The leader then informs the workers,
    which save for the last time.
    """
    slots = _warm_slots(view, state)
    if slots >= view.spec.max_workers:
        return True
    # An elastic group does not wait for machines that were not even granted.
    can_shrink = view.spec.is_elastic and joining_slots(view, state) == 0
    return can_shrink and slots >= view.spec.min_workers


def _warm_slots(view: View, state: LeaderState) -> int:
    return sum(one.member.slots for one in usable_members(view, state) if one.is_warm)


def _is_saved_since_notice(view: View, agents: list[AgentId]) -> bool:
    return all(view.latest_committed_slot > view.notice_slots[agent] for agent in agents)


def exit_margin_s(notice: Notice) -> float:
    """Return how long before its deadline an agent with that notice exits if it is replaced.

    In seconds. It then exits by itself, and its backend does not restart the machine.
    """
    notice_s = DEFAULT_NOTICE_S if notice.seconds_left is None else notice.seconds_left
    return min(_EXIT_MARGIN_S, _EXIT_MARGIN_FRACTION * notice_s)


def _must_exit(
    view: View, state: LeaderState, leaving: list[NodeAssignment], *, now: float
) -> bool:
    """Whether a leaving node has to exit now so that its backend does not restart it."""
    grace_s = view.spec.failure_limits.preemption_grace_s
    return any(
        now >= _deadline(view, state, one.agent) - grace_s - exit_margin_s(view.notices[one.agent])
        and is_replaced(view, one.token, one.node)
        for one in leaving
    )


def _deadline(view: View, state: LeaderState, agent: AgentId) -> float:
    """The deadline of a notice plus `preemption_grace_s`, by the leader's clock."""
    # When an earlier leader received the notice is lost: assume the election of this one.
    received_at = state.notice_received_at.get(agent, state.leading_since)
    seconds_left = view.notices[agent].seconds_left
    notice_s = DEFAULT_NOTICE_S if seconds_left is None else seconds_left
    return float(received_at + notice_s + view.spec.failure_limits.preemption_grace_s)
