"""The environment of a machine: rendered by provisioners, parsed by the agent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.provision.launch import (
    AGENT_COMMAND,
    AgentAssignment,
    AgentExitCode,
    AgentLaunchSpec,
    describe_exit_code,
)
from spotfit.testing.builders import RUN_ID

LAUNCH = AgentLaunchSpec("s3://bucket/runs/digits", RUN_ID, "c2VjcmV0", ("aws", "signal"))


def test_assignment_round_trips_through_the_environment() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 3, 8)
    assert AgentAssignment.from_environment(environment) == AgentAssignment(
        LAUNCH, Token("t-1"), 3, 8
    )
    assert all(isinstance(text, str) for text in environment.values())


def test_node_index_may_come_from_a_variable_of_the_scheduler() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 0, 8, node_index_variable="ARRAY_INDEX")
    assert AgentAssignment.from_environment({**environment, "ARRAY_INDEX": "5"}).node == 5
    with pytest.raises(ConfigError, match="ARRAY_INDEX='' must be a non-negative integer"):
        AgentAssignment.from_environment(environment)


def test_agent_command_is_fixed() -> None:
    assert AGENT_COMMAND == ("python", "-m", "spotfit.agent")


def test_repr_does_not_show_the_secret() -> None:
    assert LAUNCH.secret not in repr(LAUNCH)
    assert LAUNCH.secret not in repr(AgentAssignment(LAUNCH, Token("t-1"), 0, 1))


def test_storage_credentials_are_passed_but_not_shown() -> None:
    launch = replace(LAUNCH, storage_credentials='{"s3://bucket": {}}')
    environment = launch.environment_for(Token("t-1"), 0, 1)
    assert environment["SPOTFIT_STORAGE_KEYS"] == launch.storage_credentials
    assert AgentAssignment.from_environment(environment).launch_spec == launch
    assert 's3://bucket"' not in repr(launch)
    assert "SPOTFIT_STORAGE_KEYS" not in LAUNCH.environment_for(Token("t-1"), 0, 1)


def test_modules_to_preload_are_passed() -> None:
    launch = replace(LAUNCH, preload=("lightning.pytorch", "sklearn"))
    environment = launch.environment_for(Token("t-1"), 0, 1)
    assert AgentAssignment.from_environment(environment).launch_spec == launch
    assert "SPOTFIT_PRELOAD" not in LAUNCH.environment_for(Token("t-1"), 0, 1)


def test_secrets_are_removed_from_what_a_machine_has_printed() -> None:
    credentials = '{"s3://b ": {"secret_access_key": "wJalrXUtnFEMI", "allow_http": "true"}}'
    launch = replace(LAUNCH, storage_credentials=credentials)
    printed = f"+ export SPOTFIT_RUN_SECRET={launch.secret} SPOTFIT_STORAGE_KEYS='{credentials}'"
    shown = launch.without_secrets(printed)
    assert launch.secret not in shown
    assert "wJalrXUtnFEMI" not in shown
    assert '"allow_http": "true"' in shown
    assert LAUNCH.without_secrets("no such file") == "no such file"
    assert replace(LAUNCH, storage_credentials="{").without_secrets("x") == "x"


def test_all_missing_variables_are_reported_together() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 0, 1)
    del environment["SPOTFIT_TOKEN"]
    environment["SPOTFIT_RUN_URL"] = ""
    with pytest.raises(ConfigError, match="SPOTFIT_RUN_URL, SPOTFIT_TOKEN are not set"):
        AgentAssignment.from_environment(environment)


@pytest.mark.parametrize("name", ["SPOTFIT_NODE", "SPOTFIT_SLOTS"])
@pytest.mark.parametrize("text", ["-1", "two", "1.5"])
def test_invalid_number_is_reported(name: str, text: str) -> None:
    environment = {**LAUNCH.environment_for(Token("t-1"), 0, 1), name: text}
    with pytest.raises(ConfigError, match=f"{name}='{text}' must be a non-negative integer"):
        AgentAssignment.from_environment(environment)


def test_default_notice_source_is_signal() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 0, 1)
    del environment["SPOTFIT_NOTICES"]
    assert AgentAssignment.from_environment(environment).launch_spec.notice_sources == ("signal",)


def test_the_exit_code_of_a_machine_without_the_run_names_the_cause() -> None:
    assert "storage_path of the run is not shared" in describe_exit_code(
        AgentExitCode.RUN_NOT_FOUND
    )
    assert describe_exit_code(70) == "exit code 70"
