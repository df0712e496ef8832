"""Mapping of the output of scripts on hosts, complete by what they can print."""

from __future__ import annotations

import re

import pytest

from spotfit.model.group import NodeState, NodeStatus
from spotfit.provision.launch import AgentExitCode, describe_exit_code
from spotfit_provisioners.ssh import render, states


def _printed(script: str) -> set[str]:
    return set(re.findall(r"echo ([a-z]+)", script)) | set(re.findall(r"state=([a-z]+)", script))


def test_every_state_of_a_machine_is_mapped() -> None:
    assert _printed(render.machine_status_script("f/h/t.0").partition("any_alive")[2]) == set(
        states.STATES
    )


def test_every_state_of_a_host_is_mapped() -> None:
    assert _printed(render.host_status_script("f/h/t.0", "false")) == set(states.REFUSAL_REASONS)


def test_every_agent_exit_is_mapped() -> None:
    assert set(states.EXIT_STATES) == set(AgentExitCode)


@pytest.mark.parametrize(
    ("expected", "status"),
    [
        ("running", NodeStatus(state=NodeState.RUNNING)),
        ("unknown", NodeStatus(state=NodeState.GONE, reason="its host does not know it")),
        ("over", NodeStatus(state=NodeState.GONE, reason="killed, or its host was rebooted")),
        ("over 0", NodeStatus(state=NodeState.GONE, reason="its agent has exited", exit_code=0)),
        ("over 85", NodeStatus(state=NodeState.GONE, reason="exit code 85", exit_code=85)),
        (
            "over 66",
            NodeStatus(state=NodeState.FAILED, reason=describe_exit_code(66), exit_code=66),
        ),
        ("over 70", NodeStatus(state=NodeState.FAILED, reason="exit code 70", exit_code=70)),
        ("over 127", NodeStatus(state=NodeState.FAILED, reason="exit code 127", exit_code=127)),
        ("over 137", NodeStatus(state=NodeState.GONE, reason="ended by signal 9")),
    ],
)
def test_machine_state_has_its_reason(expected: str, status: NodeStatus) -> None:
    assert states.parse_node_status(expected) == status


@pytest.mark.parametrize(
    ("output", "times"),
    [
        ("running\n100", (100_000, None)),
        ("running\n100\n160", (100_000, None)),
        ("over 0\n100\n160", (100_000, 160_000)),
        ("over \n100", (100_000, None)),
        ("unknown", (None, None)),
    ],
)
def test_times_are_those_of_the_host(output: str, times: tuple[int | None, int | None]) -> None:
    status = states.parse_node_status(output)
    assert (status.started_at_ms, status.ended_at_ms) == times


def test_survey_output_is_parsed() -> None:
    assert states.parse_host_status("free -") == states.SshHostStatus("free")
    assert states.parse_host_status("busy 127\n0\n3") == states.SshHostStatus("busy", 127, (0, 3))


def test_host_with_a_failed_agent_is_unhealthy() -> None:
    assert states.SshHostStatus("free").is_healthy
    assert states.SshHostStatus("free", 85).is_healthy
    assert not states.SshHostStatus("free", 127).is_healthy
