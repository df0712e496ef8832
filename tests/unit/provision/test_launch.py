"""The contract of every machine: what it is started with, and what it makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotfit.core.errors import ConfigError
from spotfit.core.ids import Token
from spotfit.provision.launch import AGENT_COMMAND, AgentAssignment, AgentLaunchSpec
from spotfit.testing.builders import RUN_ID

LAUNCH = AgentLaunchSpec("s3://bucket/runs/digits", RUN_ID, "c2VjcmV0", ("aws", "signal"))


def test_a_machine_reads_what_its_provisioner_wrote() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 3, 8)
    assert AgentAssignment.from_environment(environment) == AgentAssignment(
        LAUNCH, Token("t-1"), 3, 8
    )
    assert all(isinstance(text, str) for text in environment.values())


def test_a_scheduler_s_own_number_tells_machines_apart_that_are_told_the_same() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 0, 8, node_index_variable="ARRAY_INDEX")
    assert AgentAssignment.from_environment({**environment, "ARRAY_INDEX": "5"}).node == 5
    with pytest.raises(ConfigError, match="ARRAY_INDEX='' must be a non-negative integer"):
        AgentAssignment.from_environment(environment)


def test_every_machine_starts_with_the_same_command() -> None:
    assert AGENT_COMMAND == ("python", "-m", "spotfit.agent")


def test_the_secret_is_not_shown() -> None:
    assert LAUNCH.secret not in repr(LAUNCH)
    assert LAUNCH.secret not in repr(AgentAssignment(LAUNCH, Token("t-1"), 0, 1))


def test_credentials_of_the_bucket_are_told_where_there_are_any_and_never_shown() -> None:
    launch = replace(LAUNCH, storage_credentials='{"s3://bucket": {}}')
    environment = launch.environment_for(Token("t-1"), 0, 1)
    assert environment["SPOTFIT_STORAGE_KEYS"] == launch.storage_credentials
    assert AgentAssignment.from_environment(environment).launch_spec == launch
    assert 's3://bucket"' not in repr(launch)
    assert "SPOTFIT_STORAGE_KEYS" not in LAUNCH.environment_for(Token("t-1"), 0, 1)


def test_everything_that_is_missing_is_named_at_once() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 0, 1)
    del environment["SPOTFIT_TOKEN"]
    environment["SPOTFIT_RUN_URL"] = ""
    with pytest.raises(ConfigError, match="SPOTFIT_RUN_URL, SPOTFIT_TOKEN are not set"):
        AgentAssignment.from_environment(environment)


@pytest.mark.parametrize("name", ["SPOTFIT_NODE", "SPOTFIT_SLOTS"])
@pytest.mark.parametrize("text", ["-1", "two", "1.5"])
def test_a_number_that_is_none_is_told(name: str, text: str) -> None:
    environment = {**LAUNCH.environment_for(Token("t-1"), 0, 1), name: text}
    with pytest.raises(ConfigError, match=f"{name}='{text}' must be a non-negative integer"):
        AgentAssignment.from_environment(environment)


def test_without_a_word_on_notices_signals_are_watched() -> None:
    environment = LAUNCH.environment_for(Token("t-1"), 0, 1)
    del environment["SPOTFIT_NOTICES"]
    assert AgentAssignment.from_environment(environment).launch_spec.notice_sources == ("signal",)
