"""Election: when may I lead, judged by my own clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotfit.model.events import FitEnded, LeaderElected
from spotfit.model.spec import Tempo
from spotfit.model.view import View
from spotfit.policy.election import LEFTOVERS_S, Sighting, claim, looked
from spotfit.testing.builders import (
    TOKEN,
    a_group,
    a_member,
    a_round,
    a_spec,
    a_view,
    an_agent,
)

ME = an_agent(1)
SPEC = a_spec(tempo=Tempo(lease_patience_s=20.0))
LED = a_view(spec=SPEC, round=a_round(members=[a_member(n) for n in range(3)]))
ALIVE = Sighting(lease_changed_at=100.0)


def view(**given: Any) -> View:
    return a_view(**{"spec": SPEC, **given})


@pytest.mark.parametrize(
    ("view", "sighting"),
    [
        (View(), ALIVE),
        (view(leader=LeaderElected(ME, 1, "h:1")), ALIVE),
        (LED, Sighting(100.0, in_touch=True)),
        (LED, Sighting(100.0, vanished_at=100.0, in_touch=True)),
        (view(ended=FitEnded("finished")), ALIVE),
    ],
    ids=["no run", "I lead", "in touch", "vanished but in touch", "ended"],
)
def test_nobody_claims_what_is_in_good_hands(view: View, sighting: Sighting) -> None:
    assert claim(view, ME, sighting) is None


def test_where_nobody_leads_who_has_a_machine_any_agent_may_at_once() -> None:
    for leader in (None, LeaderElected(an_agent(9), 1, hub=None)):
        claimed = claim(view(leader=leader), ME, ALIVE)
        assert claimed is not None
        assert claimed.at == float("-inf")
        assert claimed.lost is None


def test_a_leader_that_vanished_is_succeeded_in_turn_and_told_lost() -> None:
    vanished = Sighting(lease_changed_at=100.0, vanished_at=105.0)
    first, second = claim(LED, an_agent(1), vanished), claim(LED, an_agent(2), vanished)
    assert first is not None
    assert second is not None
    assert (first.at, second.at) == (105.0, 105.1)
    assert first.lost == an_agent(0)
    assert first.why == "nobody listens at the leader's hub"


def test_a_silent_leader_is_waited_for_as_long_as_its_lease_may_stand_still() -> None:
    claimed = claim(LED, ME, ALIVE)
    assert claimed is not None
    assert claimed.at == 120.0
    assert claimed.why == "the leader's lease has not changed for 20 s"
    assert claimed.lost is None, "it may live behind a broken wire"


def test_strangers_to_the_round_come_last_and_nobody_waits_for_ever() -> None:
    crowd = a_view(spec=SPEC, round=a_round(members=[a_member(n) for n in range(100)]))
    vanished = Sighting(lease_changed_at=0.0, vanished_at=0.0)
    ats = [claim(crowd, an_agent(n), vanished) for n in (1, 2, 99, 500)]
    assert [one.at for one in ats if one] == pytest.approx([0.0, 0.1, 3.0, 3.0])


def test_a_caretaker_waits_for_no_lease_where_no_machine_is_left() -> None:
    vanished = Sighting(lease_changed_at=100.0, vanished_at=101.0)
    claimed = claim(LED, an_agent(7), vanished, caretaker=True)
    assert claimed is not None
    assert (claimed.at, claimed.lost) == (101.0, None)


def test_a_caretaker_lets_another_caretaker_live() -> None:
    kept = view(leader=LeaderElected(an_agent(9), 1, hub=None))
    claimed = claim(kept, ME, ALIVE, caretaker=True)
    assert claimed is not None
    assert claimed.at == 120.0


def test_after_the_end_only_a_caretaker_comes_and_only_for_what_is_left() -> None:
    left = view(ended=FitEnded("finished"))
    claimed = claim(left, ME, ALIVE, caretaker=True)
    assert claimed is not None
    assert claimed.at == 100.0 + LEFTOVERS_S
    pending = view(ended=FitEnded("finished"), groups={TOKEN: a_group(handle=None)})
    assert claim(pending, ME, ALIVE, caretaker=True) == claimed, "it may have been granted"
    for fate in ({"released": True}, {"handle": None, "refused": "full"}):
        done = view(ended=FitEnded("finished"), groups={TOKEN: a_group(**fate)})
        assert claim(done, ME, ALIVE, caretaker=True) is None


@given(
    st.floats(0, 1e6),
    st.none() | st.floats(0, 1e6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "h:1"]),
)
def test_no_claim_is_made_before_its_reason(
    lease_at: float, vanished_at: float | None, in_touch: bool, caretaker: bool, hub: str | None
) -> None:
    led = view(leader=LeaderElected(an_agent(0), 1, hub))
    claimed = claim(led, ME, Sighting(lease_at, vanished_at, in_touch), caretaker=caretaker)
    if claimed is None:
        assert in_touch
    elif hub is not None or caretaker:
        assert claimed.at >= min(
            lease_at + 20.0, lease_at + 20.0 if vanished_at is None else vanished_at
        )


# --- looking at the lease ------------------------------------------------------------------------


def watched(*looks: float, lease_changed_at: float = 100.0) -> Sighting:
    """What looks at those moments tell of a lease that stands still."""
    sighting = Sighting(lease_changed_at)
    for now in looks:
        sighting = looked(sighting, now, changed=False)
    return sighting


def test_a_lease_seen_to_stand_still_for_its_patience_has_no_owner() -> None:
    claimed = claim(LED, ME, watched(*range(100, 122)))
    assert claimed is not None
    assert (claimed.at, claimed.due(120.9)) == (120.0, True)


def test_a_lease_nobody_could_look_at_has_not_been_seen_to_stand_still() -> None:
    """The bucket hangs from 105 to 150: its leader could not renew it, nor we read it."""
    blind = watched(*range(100, 106))
    claimed = claim(LED, ME, blind)
    assert claimed is not None
    assert not claimed.due(149.0)
    again = looked(blind, 150.0, changed=False)
    claimed = claim(LED, ME, again)
    assert claimed is not None
    assert claimed.at == pytest.approx(120.0 + 45.0 - 2.0), "most of it does not count"
    assert looked(again, 151.0, changed=True).lease_changed_at == 151.0


def test_other_claims_rest_on_no_look() -> None:
    for sighting in (Sighting(100.0, vanished_at=105.0), Sighting(100.0)):
        led = LED if sighting.vanished_at else view(leader=None)
        claimed = claim(led, ME, sighting)
        assert claimed is not None
        assert claimed.due(110.0)
