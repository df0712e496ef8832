"""Status of machines and groups."""

import pytest

from spotfit.model.group import GroupStatus, NodeState, NodeStatus, missing_group_status
from spotfit.testing.builders import a_group_status


@pytest.mark.parametrize(
    ("state", "over"),
    [
        (NodeState.WAITING, False),
        (NodeState.RUNNING, False),
        (NodeState.GONE, True),
        (NodeState.FAILED, True),
    ],
)
def test_a_terminated_state_is_permanent(state: NodeState, over: bool) -> None:
    assert NodeStatus(state=state).is_terminated is over


def test_a_group_is_terminated_with_its_last_machine() -> None:
    assert not a_group_status(NodeState.GONE, NodeState.WAITING).is_terminated
    assert a_group_status(NodeState.GONE, NodeState.FAILED).is_terminated


def test_a_missing_group_has_only_gone_machines() -> None:
    status = missing_group_status(3, "expired")
    assert status == GroupStatus(
        nodes=(NodeStatus(state=NodeState.GONE, reason="expired", is_known=False),) * 3
    )
    assert status.is_terminated
