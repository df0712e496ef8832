"""Changes of the network: a run trains in one, and moves to machines of another that stand by.

Machines of two networks cannot connect to each other, so that those of another one do not join
(`View.stands_by`). Their agents report through the storage (`LeaderState.standby`). Between two
rounds the leader hands the run over by one entry, `LeaderElected` with another network: the agents
of the old network stand by from then on, those of the new one join its leader.

    state of the other network             | state of the run            | next
    ---------------------------------------|-----------------------------|----------------------
    enough ready machines of chosen offers | a round is open             | closed after a commit
    enough ready machines of chosen offers | no round                    | handed over
    enough ready machines of any offers    | no round, too few members   | handed over later
    the run has returned from it without a | a round is open             | machines are released
    round there                            |                             |

The machines of the old network are kept until a round is open in the new one. Until then the run
returns to them if the new ones are lost or cannot connect.
"""

from __future__ import annotations

from collections.abc import Iterable

from spotfit.model.events import LeaderElected
from spotfit.model.group import find_node_status
from spotfit.model.leader_state import LeaderState, NoRound
from spotfit.model.offer import Market
from spotfit.model.topology import Member
from spotfit.model.view import View
from spotfit.policy import election
from spotfit.policy.capacity import is_of_other_offer, usable_members

# Members of a network usually join a new leader within `rejoin_timeout_s`. A change is a restart of
# all workers, so that twice the time is given to those that are late.
_JOIN_TIMEOUTS = 2


def is_change_ready(view: View, state: LeaderState) -> bool:
    """Whether all workers of the open round could continue on chosen machines of another network.

    Then the leader lets the workers save, and the round ends after the commit.
    """
    return bool(_successors(view, state, is_chosen=True, slots=_slots_needed(view)))


def change_network(view: View, state: LeaderState, now: float) -> LeaderElected | None:
    """Return the entry that hands the run over to machines of another network; None to stay. Pure.

    Only between rounds, and once the checkpoints of the last one are known. To machines of the
    chosen offers at once. To others that suffice for a round if the network of the run has had none
    for longer than its agents take to connect. `now` is the leader's `Clock.now()` in seconds.
    """
    phase = state.phase
    if view.round is not None or not isinstance(phase, NoRound) or not phase.bucket_searched:
        return None
    successors = _successors(view, state, is_chosen=True, slots=_slots_needed(view))
    reason = "the run moves to machines of another network"
    if not successors:
        smallest = max(1, view.spec.min_workers)
        joined = sum(one.member.slots for one in usable_members(view, state))
        timing = view.spec.timing
        # They read the change in the storage.
        timeout_s = timing.journal_poll_interval_s + _JOIN_TIMEOUTS * timing.rejoin_timeout_s
        if joined >= smallest or now < max(phase.since, state.leading_since) + timeout_s:
            return None
        successors = _successors(view, state, is_chosen=False, slots=smallest)
        reason = "too few machines of the run's network have joined, and others are ready"
    return election.handover(view, successors[0], reason=reason) if successors else None


def _slots_needed(view: View) -> int:
    """The slots of the last round of this fit, whose workers had machines; else of all workers.

    While on-demand machines are chosen, those of all that are chosen: they start together.
    """
    largest, last, choice = view.spec.max_workers, view.last_round, view.market.choice
    if last is None or last.number < view.first_round:
        return largest
    offers = {one.name: one.market for one in view.spec.cost.offers}
    workers = {} if choice is None else choice.workers
    if any(offers.get(name) is Market.ON_DEMAND for name in workers):
        return min(largest, max(last.world_size, sum(workers.values())))
    return min(largest, last.world_size)


def _successors(view: View, state: LeaderState, *, is_chosen: bool, slots: int) -> list[Member]:
    """The ready machines of one other network that have `slots`, the first leader first."""
    by_network: dict[str, list[Member]] = {}
    for member in _ready_members(view, state):
        if not is_chosen or _is_chosen(view, member):
            by_network.setdefault(view.network_of(member.token), []).append(member)
    for members in by_network.values():
        if sum(one.slots for one in members) >= slots:
            return sorted(members, key=lambda one: (one.token, one.node))
    return []


def _ready_members(view: View, state: LeaderState) -> Iterable[Member]:
    return (
        status.report.member
        for agent, status in state.standby.items()
        if status.is_ready
        and agent not in view.lost_agents
        and view.stands_by(status.report.member.token)
        and _is_usable(view, state, status.report.member)
    )


def _is_usable(view: View, state: LeaderState, member: Member) -> bool:
    group = view.groups[member.token]
    status = find_node_status(state.group_statuses, member.token, member.node)
    has_ended = status is not None and status.is_terminated
    return group.is_node_active(member.node) and not group.is_left and not has_ended


def _is_chosen(view: View, member: Member) -> bool:
    choice = view.market.choice
    is_choosing = choice is not None and bool(choice.workers)
    return is_choosing and not is_of_other_offer(view, member.token)
