"""Environment variables are parsed, and invalid values reported together."""

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.host import env


def test_an_unset_variable_has_its_default() -> None:
    assert env.read(env.LOG_LEVEL, {}) == "INFO"
    assert env.read(env.PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, {}) == 30.0


def test_an_empty_variable_counts_as_unset() -> None:
    assert env.read(env.PORT, {"SPOTFIT_PORT": ""}) == 0


def test_values_are_parsed() -> None:
    assert env.read(env.LOG_LEVEL, {"SPOTFIT_LOG_LEVEL": "debug"}) == "DEBUG"
    assert (
        env.read(
            env.PROCESS_GROUP_SHUTDOWN_TIMEOUT_S, {"TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1m"}
        )
        == 60.0
    )


def test_the_variable_of_ray_is_read_if_that_of_spotfit_is_unset() -> None:
    ray_only = {"RAY_TRAIN_CALLBACKS": "their.Callback"}
    assert env.read(env.CALLBACKS, ray_only) == ("their.Callback",)
    both = {**ray_only, "SPOTFIT_CALLBACKS": "our.First, our.Second,"}
    assert env.read(env.CALLBACKS, both) == ("our.First", "our.Second")


@pytest.mark.parametrize(
    ("setting", "text"),
    [(env.DETECT_HANGS, "perhaps"), (env.HANG_ACTION, "shout"), (env.HANG_CONFIRM_S, "0")],
)
def test_invalid_values_are_refused(setting: env.EnvVar[object], text: str) -> None:
    with pytest.raises(ConfigError, match=setting.name):
        env.read(setting, {setting.name: text})


def test_an_error_names_the_variable_and_its_default() -> None:
    with pytest.raises(ConfigError, match="SPOTFIT_PORT") as caught:
        env.read(env.PORT, {"SPOTFIT_PORT": "seventy"})
    assert "the default 0" in caught.value.do


def test_an_interval_must_be_positive() -> None:
    ray_only = {"RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S": "0"}
    with pytest.raises(ConfigError, match="RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S"):
        env.read(env.COLLECTIVE_WARN_INTERVAL_S, ray_only)
    assert env.read(env.COLLECTIVE_TIMEOUT_S, {"RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "5"}) == 5.0


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        env.check_all({"SPOTFIT_PORT": "99999", "SPOTFIT_LOG_LEVEL": "loud"})
    assert len(caught.value.errors) == 2


def test_every_variable_has_a_description() -> None:
    assert all(setting.description for setting in env.ENV_VARS)
    assert len({setting.name for setting in env.ENV_VARS}) == len(env.ENV_VARS)


def test_set_defaults_keeps_existing_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXISTING", "set")
    monkeypatch.delenv("MISSING", raising=False)
    env.set_defaults({"EXISTING": "default", "MISSING": "default"})
    assert (env.lookup("EXISTING"), env.lookup("MISSING")) == ("set", "default")
    env.unset("MISSING", "NEVER_THERE")
    assert env.lookup("MISSING") is None
