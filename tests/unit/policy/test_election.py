"""Leader election: when a claim is made and when it is due."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.model.events import FitEnded, LeaderElected
from spotfit.model.group import GroupHandle
from spotfit.model.spec import RunTiming
from spotfit.model.view import MachineGroup, View
from spotfit.policy.election import (
    CLEANUP_LEASE_TIMEOUT_S,
    LeaderObservation,
    after_lease_read,
    handover,
    leadership_claim,
)
from spotfit.testing.builders import (
    TOKEN,
    a_group,
    a_member,
    a_round,
    a_spec,
    a_view,
    an_agent_id,
)

ME = an_agent_id(1)
SPEC = a_spec(timing=RunTiming(lease_timeout_s=20.0))
LOST_LEADER_VIEW = a_view(spec=SPEC, round=a_round(members=[a_member(n) for n in range(3)]))
ALIVE = LeaderObservation(lease_changed_at=100.0)


def view(**fields: Any) -> View:
    return a_view(**{"spec": SPEC, **fields})


@pytest.mark.parametrize(
    ("view", "observation"),
    [
        (view(leader=LeaderElected(leader=ME, epoch=1, coordinator_address="h:1")), ALIVE),
        (LOST_LEADER_VIEW, LeaderObservation(100.0, is_connected=True)),
        (LOST_LEADER_VIEW, LeaderObservation(100.0, vanished_at=100.0, is_connected=True)),
        (view(fit_end=FitEnded(outcome="finished")), ALIVE),
    ],
    ids=["leads itself", "connected", "vanished but connected", "ended"],
)
def test_a_healthy_leader_is_not_claimed(view: View, observation: LeaderObservation) -> None:
    assert leadership_claim(view, ME, observation) is None


def test_without_an_agent_leading_any_agent_may_claim_at_once() -> None:
    for leader in (None, LeaderElected(leader=an_agent_id(9), epoch=1, coordinator_address=None)):
        claimed = leadership_claim(view(leader=leader), ME, ALIVE)
        assert claimed is not None
        assert claimed.not_before == float("-inf")
        assert claimed.lost_leader is None


def test_a_vanished_leader_is_succeeded_in_rank_order_and_recorded_as_lost() -> None:
    vanished_leader = LeaderObservation(lease_changed_at=100.0, vanished_at=105.0)
    first, second = (
        leadership_claim(LOST_LEADER_VIEW, an_agent_id(1), vanished_leader),
        leadership_claim(LOST_LEADER_VIEW, an_agent_id(2), vanished_leader),
    )
    assert first is not None
    assert second is not None
    assert (first.not_before, second.not_before) == (105.0, 105.1)
    assert first.lost_leader == an_agent_id(0)
    assert first.reason == "the previous leader's port is closed"


def test_an_agent_of_another_network_leaves_the_lead_to_those_of_the_network() -> None:
    headless = view(leader=LeaderElected(leader=an_agent_id(9), epoch=1, coordinator_address=None))
    claimed = leadership_claim(headless, ME, ALIVE, stands_by=True)
    assert claimed is not None
    assert claimed.not_before == 105.0
    own = leadership_claim(LOST_LEADER_VIEW, ME, ALIVE)
    other = leadership_claim(LOST_LEADER_VIEW, ME, ALIVE, stands_by=True)
    assert own is not None
    assert other is not None
    assert other.not_before == own.not_before + 5.0


def test_a_handover_names_the_network_of_the_successor() -> None:
    plan = a_group().plan
    handle = GroupHandle(token=TOKEN, provisioner="local", name="t", network="b")
    groups = {TOKEN: MachineGroup(plan=plan, handle=handle)}
    assert handover(view(groups=groups), a_member(1), reason="").network == "b"


def test_a_silent_leader_is_claimed_after_the_lease_timeout() -> None:
    claimed = leadership_claim(LOST_LEADER_VIEW, ME, ALIVE)
    assert claimed is not None
    assert claimed.not_before == 120.0
    assert claimed.reason == "the leader's lease has not changed for 20 s"
    assert claimed.lost_leader is None, "it may be alive behind a broken connection"


def test_agents_outside_the_round_claim_last_with_a_bounded_delay() -> None:
    large_group = a_view(spec=SPEC, round=a_round(members=[a_member(n) for n in range(100)]))
    observation = LeaderObservation(lease_changed_at=0.0, vanished_at=0.0)
    ats = [leadership_claim(large_group, an_agent_id(n), observation) for n in (1, 2, 99, 500)]
    assert [one.not_before for one in ats if one] == pytest.approx([0.0, 0.1, 3.0, 3.0])


def test_a_headless_leader_claims_at_once_if_all_machines_terminated() -> None:
    vanished = LeaderObservation(lease_changed_at=100.0, vanished_at=101.0)
    claimed = leadership_claim(LOST_LEADER_VIEW, an_agent_id(7), vanished, headless=True)
    assert claimed is not None
    assert (claimed.not_before, claimed.lost_leader) == (101.0, None)


def test_a_headless_leader_waits_for_the_lease_of_another() -> None:
    retained = view(leader=LeaderElected(leader=an_agent_id(9), epoch=1, coordinator_address=None))
    claimed = leadership_claim(retained, ME, ALIVE, headless=True)
    assert claimed is not None
    assert claimed.not_before == 120.0


def test_after_the_end_only_a_headless_leader_claims_and_only_for_cleanup() -> None:
    left = view(fit_end=FitEnded(outcome="finished"))
    claimed = leadership_claim(left, ME, ALIVE, headless=True)
    assert claimed is not None
    assert claimed.not_before == 100.0 + CLEANUP_LEASE_TIMEOUT_S
    pending = view(fit_end=FitEnded(outcome="finished"), groups={TOKEN: a_group(handle=None)})
    assert leadership_claim(pending, ME, ALIVE, headless=True) == claimed, (
        "it may have been granted"
    )
    for outcome in ({"is_released": True}, {"handle": None, "refusal": "full"}):
        done = view(fit_end=FitEnded(outcome="finished"), groups={TOKEN: a_group(**outcome)})
        assert leadership_claim(done, ME, ALIVE, headless=True) is None


@given(
    st.floats(0, 1e6),
    st.none() | st.floats(0, 1e6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "h:1"]),
)
def test_a_claim_is_not_due_before_its_time(
    lease_at: float,
    vanished_at: float | None,
    is_connected: bool,
    headless_leader: bool,
    coordinator: str | None,
) -> None:
    view_with_leader = view(
        leader=LeaderElected(leader=an_agent_id(0), epoch=1, coordinator_address=coordinator)
    )
    claimed = leadership_claim(
        view_with_leader,
        ME,
        LeaderObservation(lease_at, vanished_at, is_connected),
        headless=headless_leader,
    )
    if claimed is None:
        assert is_connected
    elif coordinator is not None or headless_leader:
        assert claimed.not_before >= min(
            lease_at + 20.0, lease_at + 20.0 if vanished_at is None else vanished_at
        )


# --- observation of the lease --------------------------------------------------------------------


def observed(*read_times: float, lease_changed_at: float = 100.0) -> LeaderObservation:
    """The observation after reads of an unchanged lease at the given times."""
    observation = LeaderObservation(lease_changed_at)
    for now in read_times:
        observation = after_lease_read(observation, now, has_changed=False)
    return observation


def test_a_lease_observed_unchanged_for_the_timeout_is_expired() -> None:
    claimed = leadership_claim(LOST_LEADER_VIEW, ME, observed(*range(100, 122)))
    assert claimed is not None
    assert (claimed.not_before, claimed.is_due(120.9)) == (120.0, True)


def test_a_lease_that_could_not_be_read_is_not_expired() -> None:
    """The bucket hangs from 105 to 150: the lease is neither renewed nor read."""
    unread = observed(*range(100, 106))
    claimed = leadership_claim(LOST_LEADER_VIEW, ME, unread)
    assert claimed is not None
    assert not claimed.is_due(149.0)
    again = after_lease_read(unread, 150.0, has_changed=False)
    claimed = leadership_claim(LOST_LEADER_VIEW, ME, again)
    assert claimed is not None
    assert claimed.not_before == pytest.approx(120.0 + 45.0 - 2.0), (
        "the unobserved time does not count"
    )
    assert after_lease_read(again, 151.0, has_changed=True).lease_changed_at == 151.0


def test_other_claims_do_not_depend_on_lease_reads() -> None:
    for observation in (LeaderObservation(100.0, vanished_at=105.0), LeaderObservation(100.0)):
        view_with_leader = LOST_LEADER_VIEW if observation.vanished_at else view(leader=None)
        claimed = leadership_claim(view_with_leader, ME, observation)
        assert claimed is not None
        assert claimed.is_due(110.0)
