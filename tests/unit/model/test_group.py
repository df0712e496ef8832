"""Groups: what machines are, and when nothing of them is left."""

import pytest

from spotfit.model.group import GroupStatus, NodeState, NodeStatus, gone
from spotfit.testing.builders import a_status


@pytest.mark.parametrize(
    ("state", "over"),
    [
        (NodeState.WAITING, False),
        (NodeState.RUNNING, False),
        (NodeState.GONE, True),
        (NodeState.FAILED, True),
    ],
)
def test_a_machine_is_over_once_it_will_not_come_back(state: NodeState, over: bool) -> None:
    assert NodeStatus(state).over is over


def test_a_group_is_over_with_its_last_machine() -> None:
    assert not a_status(NodeState.GONE, NodeState.WAITING).over
    assert a_status(NodeState.GONE, NodeState.FAILED).over


def test_of_a_group_nobody_remembers_every_machine_is_gone() -> None:
    status = gone(3, "expired")
    assert status == GroupStatus((NodeStatus(NodeState.GONE, "expired"),) * 3)
    assert status.over
