"""Builders: what they make holds together, and says what it was told to."""

from spotfit.core.codec import decoder, encode
from spotfit.model.events import FitStarted
from spotfit.model.view import View
from spotfit.policy.actions import Write
from spotfit.policy.conduct import conduct
from spotfit.testing.builders import (
    RUN,
    a_member,
    a_round,
    a_seat,
    a_spec,
    a_view,
    a_watch,
    an_entry,
    told,
)


def test_what_is_made_fits_together() -> None:
    view, watch = a_view(), a_watch()
    action = conduct(view, watch, 1.0)
    assert isinstance(action, Write), "with all agents seated the first thing is a round"
    assert view.leads(watch.me)
    assert decoder(View).decode(encode(view)) == view


def test_an_override_wins_and_takes_what_belongs_to_it_along() -> None:
    assert a_seat(3, running=2).member == a_member(3)
    assert a_view(round=a_round(7)).last_round == a_round(7)
    assert a_spec(workers_max=4).workers_min == 4
    elastic = a_spec(workers_min=1, workers_max=4)
    assert (elastic.workers_min, elastic.elastic) == (1, True)


def test_a_round_gives_every_member_its_ranks() -> None:
    round_ = a_round(members=[a_member(0, slots=3), a_member(1, slots=2)])
    assert [list(place.ranks) for place in round_.places] == [[0, 1, 2], [3, 4]]


def test_events_are_told_one_after_the_other() -> None:
    view = told(FitStarted(a_spec()))
    assert (view.next_slot, view.run_id, view.active) == (1, RUN, True)
    assert an_entry(FitStarted(a_spec())).run_id == RUN
