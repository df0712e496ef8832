"""Leader election: when an agent or a headless leader may claim the leadership.

A claim is judged by the claimant's own clock only. A due claim is offered as a `LeaderElected`
entry; among several claimants the atomic create of the journal slot decides (docs/decisions/0003).

    observed state of the leader             | claimant         | claim is due
    -----------------------------------------|------------------|---------------------------------
    none elected, or headless                | agent            | at once, see below
    coordinator port closed                  | agent            | at once, staggered by node rank
    lease unchanged for `lease_timeout_s`    | agent, headless  | then, agents staggered
    all machines terminated (backend)        | headless         | at once
    fit ended, machines are not released     | headless         | after `CLEANUP_LEASE_TIMEOUT_S`
    connected                                | agent            | never

An agent that stands by in another network than the run's claims `_OTHER_NETWORK_DELAY_S` later than
those of the network, which continue with the machines that the run trains on.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from spotfit.core.ids import AgentId
from spotfit.model.events import LeaderElected
from spotfit.model.topology import Member
from spotfit.model.view import View

# After the end of a fit only machines are left to be released, which is idempotent: a second leader
# is harmless, so a shorter timeout than `lease_timeout_s` saves machine costs.
CLEANUP_LEASE_TIMEOUT_S = 4.0

# Leases are polled once per second. A longer gap between two reads means that the bucket was not
# reachable; the gap does not count against the leader, which could not renew its lease either.
_MAX_READ_GAP_S = 2.0

# Delay per node rank, longer than one write to the bucket: usually the first claimant's entry is
# visible before the second one claims. The maximum bounds the delay of large groups.
_STAGGER_S = 0.1
_MAX_STAGGER_S = 3.0


# Longer than the longest delay of an agent of the run's network, and than its write.
_OTHER_NETWORK_DELAY_S = 5.0


class LeaderObservation(msgspec.Struct, frozen=True):
    """What one process has observed of the leader; all times by its own clock."""

    lease_changed_at: float
    """When the leader's lease was last observed to change, or first read. `after_lease_read`
    advances it by the time for which the lease could not be read."""
    vanished_at: float | None = None
    """When the leader's port was found closed; for a headless leader, which does not connect to it,
    when the backend reported all machines as terminated."""
    is_connected: bool = False
    """Whether the connection to the leader's round coordinator is established."""
    lease_read_at: float | None = None
    """When the lease was last read, if it was."""


class LeadershipClaim(msgspec.Struct, frozen=True):
    """A claim to the leadership: its reason, and the earliest time at which it may be made.

    Times are seconds of the claimant's `Clock.now()`.
    """

    not_before: float
    reason: str
    lost_leader: AgentId | None = None
    """The previous leader, if its port was found closed."""
    lease_read_at: float = float("inf")
    """When the lease was last read, for a claim based on it: the lease must have been read and
    found unchanged after `not_before`."""

    def is_due(self, now: float) -> bool:
        """Whether the claimant may append its `LeaderElected` entry now.

        `now` is the claimant's `Clock.now()` in seconds. A claim for an unchanged lease is due only
        after the lease was read again at or after `not_before`.
        """
        return now >= self.not_before and self.lease_read_at >= self.not_before


def after_lease_read(
    observation: LeaderObservation, now: float, *, has_changed: bool
) -> LeaderObservation:
    """Return the observation after the leader's lease was read at `now`.

    `now` is the reader's `Clock.now()` in seconds; `has_changed` is True if the counter differs
    from the one read before. If the previous read was more than 2 s ago, the gap does not count as
    time without a renewal: neither this process nor the leader could reach the bucket.
    """
    previous_read_at = now if observation.lease_read_at is None else observation.lease_read_at
    unobserved_s = max(0.0, now - previous_read_at - _MAX_READ_GAP_S)
    changed_at = now if has_changed else min(now, observation.lease_changed_at + unobserved_s)
    return replace(observation, lease_changed_at=changed_at, is_connected=False, lease_read_at=now)


def leadership_claim(
    view: View,
    agent_id: AgentId,
    observation: LeaderObservation,
    *,
    headless: bool = False,
    stands_by: bool = False,
) -> LeadershipClaim | None:
    """Return when and why `agent_id` may claim the leadership; None while there is no reason to.

    None for the leader itself, for a process that is connected to the leader, and after the end of
    the fit, except for a headless process while machines are to be released. Judged by the view and
    `observation`, whose times are seconds of the claimant's own clock. `stands_by` as in
    `View.stands_by`, for an agent. Called repeatedly by agents and `HeadlessLeader`; the `is_due`
    of the claim shows whether it may be made now.
    """
    if view.is_leader(agent_id):
        return None
    if view.fit_end is not None:
        needs_cleanup = any(not group.is_closed for group in view.groups.values())
        if not headless or not needs_cleanup:
            return None
        reason = "the run has ended and machines are still to be released"
        return _claim_after_lease_timeout(observation, CLEANUP_LEASE_TIMEOUT_S, reason)
    if view.leader is None or (view.leader.coordinator_address is None and not headless):
        not_before = float("-inf")
        if stands_by:
            not_before = observation.lease_changed_at + _OTHER_NETWORK_DELAY_S
        return LeadershipClaim(not_before, "no agent was leading yet")
    if observation.is_connected:
        return None
    if observation.vanished_at is not None and headless:
        return LeadershipClaim(observation.vanished_at, "all machines have terminated")
    if observation.vanished_at is not None:
        not_before = observation.vanished_at + _stagger_delay_s(view, agent_id)
        reason = "the previous leader's port is closed"
        return LeadershipClaim(not_before, reason, view.leader.leader)
    timeout_s = view.spec.timing.lease_timeout_s
    reason = f"the leader's lease has not changed for {timeout_s:.0f} s"
    delay_s = timeout_s + _stagger_delay_s(view, agent_id)
    delay_s += _OTHER_NETWORK_DELAY_S if stands_by else 0.0
    return _claim_after_lease_timeout(observation, delay_s, reason)


def handover(view: View, successor: Member, *, reason: str) -> LeaderElected:
    """Return the entry by which the leader transfers the leadership to the agent `successor`.

    The agent is connected and on a machine that stays, or ready in another network. The caller
    appends the entry; the epoch is the next one. `reason` is shown to users.
    """
    return LeaderElected(
        leader=successor.agent,
        epoch=view.epoch + 1,
        coordinator_address=successor.coordinator_address,
        reason=reason,
        network=view.network_of(successor.token),
    )


def _claim_after_lease_timeout(
    observation: LeaderObservation, timeout_s: float, reason: str
) -> LeadershipClaim:
    read_at = float("-inf") if observation.lease_read_at is None else observation.lease_read_at
    return LeadershipClaim(observation.lease_changed_at + timeout_s, reason, lease_read_at=read_at)


def _stagger_delay_s(view: View, agent_id: AgentId) -> float:
    """Delay by the agent's position in the last round, so that few agents claim at the same
    time."""
    assignments = view.last_round.assignments if view.last_round else ()
    leader = view.leader.leader if view.leader else None
    order = [assignment.agent for assignment in assignments if assignment.agent != leader]
    position = order.index(agent_id) if agent_id in order else len(order)
    return min(position * _STAGGER_S, _MAX_STAGGER_S)
