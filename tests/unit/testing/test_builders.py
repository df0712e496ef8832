"""Builders create consistent structs."""

from spotfit.core.codec import decoder, encode
from spotfit.model.events import FitStarted
from spotfit.model.view import View
from spotfit.policy.actions import AppendEvent
from spotfit.policy.scheduler import next_action
from spotfit.testing.builders import (
    RUN_ID,
    a_leader_state,
    a_member,
    a_member_status,
    a_round,
    a_spec,
    a_view,
    an_entry,
    fold_events,
)


def test_default_structs_are_consistent() -> None:
    view, watch = a_view(), a_leader_state()
    action = next_action(view, watch, 1.0)
    assert isinstance(action, AppendEvent), (
        "with all agents connected the first action opens a round"
    )
    assert view.is_leader(watch.agent_id)
    assert decoder(View).decode(encode(view)) == view


def test_an_override_updates_dependent_fields() -> None:
    assert a_member_status(3, running_round=2).member == a_member(3)
    assert a_view(round=a_round(7)).last_round == a_round(7)
    assert a_spec(max_workers=4).min_workers == 4
    elastic = a_spec(min_workers=1, max_workers=4)
    assert (elastic.min_workers, elastic.is_elastic) == (1, True)


def test_a_round_assigns_ranks_to_every_member() -> None:
    round_ = a_round(members=[a_member(0, slots=3), a_member(1, slots=2)])
    assert [list(place.ranks) for place in round_.assignments] == [[0, 1, 2], [3, 4]]


def test_events_are_folded_in_order() -> None:
    view = fold_events(FitStarted(spec=a_spec()))
    assert (view.next_slot, view.run_id, view.is_active) == (1, RUN_ID, True)
    assert an_entry(FitStarted(spec=a_spec())).run_id == RUN_ID
