"""The environment: read once, all mistakes together, each with its remedy."""

import pytest

from spotfit.core.errors import ConfigError, ConfigErrors
from spotfit.host import env


def test_without_a_variable_the_default_holds() -> None:
    assert env.value(env.LOG_LEVEL, {}) == "INFO"
    assert env.value(env.LEAVE_S, {}) == 30.0


def test_an_empty_variable_counts_as_unset() -> None:
    assert env.value(env.PORT, {"SPOTFIT_PORT": ""}) == 0


def test_texts_become_what_they_mean() -> None:
    assert env.value(env.LOG_LEVEL, {"SPOTFIT_LOG_LEVEL": "debug"}) == "DEBUG"
    assert env.value(env.LEAVE_S, {"TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1m"}) == 60.0


def test_the_name_a_user_knows_is_heard_where_ours_is_not_set() -> None:
    theirs = {"RAY_TRAIN_CALLBACKS": "their.Callback"}
    assert env.value(env.CALLBACKS, theirs) == ("their.Callback",)
    both = {**theirs, "SPOTFIT_CALLBACKS": "our.First, our.Second,"}
    assert env.value(env.CALLBACKS, both) == ("our.First", "our.Second")


@pytest.mark.parametrize(
    ("setting", "text"),
    [(env.DETECT_HANGS, "perhaps"), (env.HANG_ACTION, "shout"), (env.HANG_CONFIRM_S, "0")],
)
def test_what_cannot_be_meant_is_told(setting: env.Setting[object], text: str) -> None:
    with pytest.raises(ConfigError, match=setting.name):
        env.value(setting, {setting.name: text})


def test_a_mistake_names_the_variable_and_what_would_hold_without_it() -> None:
    with pytest.raises(ConfigError, match="SPOTFIT_PORT") as caught:
        env.value(env.PORT, {"SPOTFIT_PORT": "seventy"})
    assert "0 holds" in caught.value.do


def test_a_pause_is_never_nothing() -> None:
    theirs = {"RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S": "0"}
    with pytest.raises(ConfigError, match="RAY_TRAIN_COLLECTIVE_WARN_INTERVAL_S"):
        env.value(env.COLLECTIVE_WARN_S, theirs)
    assert env.value(env.COLLECTIVE_TIMEOUT_S, {"RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "5"}) == 5.0


def test_all_mistakes_are_told_together() -> None:
    with pytest.raises(ConfigErrors) as caught:
        env.check({"SPOTFIT_PORT": "99999", "SPOTFIT_LOG_LEVEL": "loud"})
    assert len(caught.value.errors) == 2


def test_every_setting_says_what_it_means() -> None:
    assert all(setting.meaning for setting in env.SETTINGS)
    assert len({setting.name for setting in env.SETTINGS}) == len(env.SETTINGS)


def test_defaults_never_overrule_what_somebody_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIRS", "set")
    monkeypatch.delenv("OURS", raising=False)
    env.set_defaults({"THEIRS": "ours", "OURS": "ours"})
    assert (env.lookup("THEIRS"), env.lookup("OURS")) == ("set", "ours")
    env.forget("OURS", "NEVER_THERE")
    assert env.lookup("OURS") is None
