"""Ray's variables are heard, or it is told what holds instead."""

from __future__ import annotations

from spotfit.host import env
from spotfit.host.theirs import WITHOUT_EFFECT, without_effect


def test_what_is_heard_is_not_told_to_be_without_effect() -> None:
    assert list(without_effect({"RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "5"})) == []


def test_what_is_not_heard_says_what_holds() -> None:
    told = dict(without_effect({"RAY_TRAIN_V2_ENABLED": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0"}))
    assert told["RAY_TRAIN_V2_ENABLED"] == "there is no other API than V2's"
    assert "working_dir" in told["RAY_CHDIR_TO_TRIAL_DIR"]


def test_who_says_what_holds_anyway_is_not_bothered() -> None:
    usual = {name: theirs.usual for name, theirs in WITHOUT_EFFECT.items()}
    assert list(without_effect(usual)) == []
    assert list(without_effect({"RAY_TRAIN_V2_ENABLED": "", "RAY_ADDRESS": "auto"})) == []


def test_a_name_nobody_knows_is_told_too() -> None:
    told = dict(without_effect({"RAY_TRAIN_COLECTIVE_TIMEOUT_S": "5"}))
    assert told == {"RAY_TRAIN_COLECTIVE_TIMEOUT_S": "there is nothing of that name here"}


def test_none_is_both_heard_and_without_effect() -> None:
    heard = {setting.also for setting in env.SETTINGS}
    assert not heard & WITHOUT_EFFECT.keys()
