"""What hosts say, in our words: every word that the scripts can print."""

from __future__ import annotations

import re

import pytest

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import Exit
from spotfit_provisioners.ssh import render, states


def _printed(script: str) -> set[str]:
    return set(re.findall(r"echo ([a-z]+)", script)) | set(re.findall(r"state=([a-z]+)", script))


def test_every_word_of_a_look_is_translated() -> None:
    assert _printed(render.look("f/h/t.0").partition("any_alive")[2]) == set(states.STATES)


def test_every_word_of_a_survey_is_translated() -> None:
    assert _printed(render.survey("f/h/t.0", "false")) == set(states.WHY_NOT)


def test_every_end_of_an_agent_is_translated() -> None:
    assert set(states.ENDS) == set(Exit)


@pytest.mark.parametrize(
    ("told", "status"),
    [
        ("running", NodeStatus(NodeState.RUNNING)),
        ("unknown", NodeStatus(NodeState.GONE, "its host knows nothing of it")),
        ("over", NodeStatus(NodeState.GONE, "killed, or its host was started anew")),
        ("over 0", NodeStatus(NodeState.GONE, "its agent has ended")),
        ("over 85", NodeStatus(NodeState.GONE, "exit code 85")),
        ("over 70", NodeStatus(NodeState.FAILED, "exit code 70")),
        ("over 127", NodeStatus(NodeState.FAILED, "exit code 127")),
        ("over 137", NodeStatus(NodeState.GONE, "ended by signal 9")),
    ],
)
def test_a_machine_is_told_with_its_reason(told: str, status: NodeStatus) -> None:
    assert states.node(told) == status


def test_a_survey_is_read() -> None:
    assert states.survey("free -") == states.Survey("free")
    assert states.survey("busy 127\n0\n3") == states.Survey("busy", 127, (0, 3))


def test_a_host_on_which_an_agent_failed_is_not_well() -> None:
    assert states.Survey("free").well
    assert states.Survey("free", 85).well
    assert not states.Survey("free", 127).well
