"""Derived properties of `View`."""

import pytest

from spotfit.model.events import FitEnded
from spotfit.model.view import JournalView, MachineGroup
from spotfit.testing.builders import a_committed_checkpoint, a_group, a_view, an_agent_id


@pytest.mark.parametrize(
    ("group", "pending", "active_nodes"),
    [
        (a_group(), False, (0, 1)),
        (a_group(handle=None), True, (0, 1)),
        (a_group(handle=None, refusal="full"), False, ()),
        (a_group(is_released=True), False, ()),
        (a_group(lost_nodes=frozenset({0})), False, (1,)),
    ],
    ids=["granted", "planned", "refused", "released", "one lost"],
)
def test_active_nodes_are_neither_lost_nor_released(
    group: MachineGroup, pending: bool, active_nodes: tuple[int, ...]
) -> None:
    assert (group.is_pending, group.active_nodes) == (pending, active_nodes)
    assert tuple(node for node in range(-1, 4) if group.is_node_active(node)) == active_nodes


def test_a_fit_is_active_from_start_to_end() -> None:
    assert not JournalView().is_active
    assert a_view().is_active
    assert not a_view(fit_end=FitEnded(outcome="finished")).is_active


def test_there_is_no_leader_before_the_first_election() -> None:
    assert (JournalView().epoch, JournalView().is_leader(an_agent_id(0))) == (0, False)
    assert a_view().is_leader(an_agent_id(0))
    assert not a_view().is_leader(an_agent_id(1))


def test_the_latest_checkpoint_is_the_last_committed() -> None:
    assert JournalView().latest_checkpoint is None
    view = a_view(
        checkpoints=(
            a_committed_checkpoint("c2", metrics={"loss": 2}),
            a_committed_checkpoint("c1"),
        )
    )
    assert view.latest_checkpoint == a_committed_checkpoint("c1")
    assert view.metrics_of("c2") == {"loss": 2}
    assert view.metrics_of("c3") is None


def test_a_requested_name_refers_to_the_latest_checkpoint_of_that_name() -> None:
    again = a_committed_checkpoint("last@2-7", round=2, report_index=7)
    view = a_view(
        checkpoints=(a_committed_checkpoint("last"), again, a_committed_checkpoint("c")),
        dropped_checkpoints=("gone",),
    )
    message = [
        view.latest_checkpoint_named(name) for name in ("last", "last@2-7", "c", "gone", "new")
    ]
    assert message == ["last@2-7", "last@2-7", "c", "", None]
    only_again = a_view(checkpoints=(again,), dropped_checkpoints=("last",))
    assert only_again.latest_checkpoint_named("last") == "last@2-7"
