"""View: what follows from the journal without a word of its own."""

import pytest

from spotfit.model.events import FitEnded
from spotfit.model.view import Group, View
from spotfit.testing.builders import a_commit, a_group, a_view, an_agent


@pytest.mark.parametrize(
    ("group", "pending", "standing"),
    [
        (a_group(), False, (0, 1)),
        (a_group(handle=None), True, (0, 1)),
        (a_group(handle=None, refused="full"), False, ()),
        (a_group(released=True), False, ()),
        (a_group(lost=frozenset({0})), False, (1,)),
    ],
    ids=["granted", "asked for", "refused", "let go", "one lost"],
)
def test_which_machines_stand(group: Group, pending: bool, standing: tuple[int, ...]) -> None:
    assert (group.pending, group.standing) == (pending, standing)
    assert tuple(node for node in range(-1, 4) if group.stands(node)) == standing


def test_a_fit_is_active_from_its_start_to_its_end() -> None:
    assert not View().active
    assert a_view().active
    assert not a_view(ended=FitEnded("finished")).active


def test_nobody_leads_before_the_first_election() -> None:
    assert (View().epoch, View().leads(an_agent(0))) == (0, False)
    assert a_view().leads(an_agent(0))
    assert not a_view().leads(an_agent(1))


def test_the_latest_checkpoint_is_the_last_committed() -> None:
    assert View().latest_checkpoint is None
    view = a_view(checkpoints=(a_commit("c2", metrics={"loss": 2}), a_commit("c1")))
    assert view.latest_checkpoint == a_commit("c1")
    assert view.metrics_of("c2") == {"loss": 2}
    assert view.metrics_of("c3") is None


def test_what_users_know_by_a_name_is_the_last_that_was_called_so() -> None:
    again = a_commit("last@2-7", round=2, report=7)
    view = a_view(checkpoints=(a_commit("last"), again, a_commit("c")), dropped=("gone",))
    told = [view.last_called(name) for name in ("last", "last@2-7", "c", "gone", "new")]
    assert told == ["last@2-7", "last@2-7", "c", "", None]
    only_again = a_view(checkpoints=(again,), dropped=("last",))
    assert only_again.last_called("last") == "last@2-7"
