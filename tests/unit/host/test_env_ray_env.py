"""Variables of Ray Train are supported, or reported as ignored."""

from __future__ import annotations

from spotfit.host import env
from spotfit.host.env import UNSUPPORTED_RAY_VARIABLES, ignored_ray_variables


def test_supported_variables_are_not_reported() -> None:
    assert list(ignored_ray_variables({"RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "5"})) == []


def test_ignored_variables_are_reported_with_a_reason() -> None:
    ignored = dict(
        ignored_ray_variables({"RAY_TRAIN_V2_ENABLED": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0"})
    )
    assert ignored["RAY_TRAIN_V2_ENABLED"] == "spotfit implements only the V2 API"
    assert "working_dir" in ignored["RAY_CHDIR_TO_TRIAL_DIR"]


def test_default_values_are_not_reported() -> None:
    defaults = {name: each.ray_default for name, each in UNSUPPORTED_RAY_VARIABLES.items()}
    assert list(ignored_ray_variables(defaults)) == []
    assert list(ignored_ray_variables({"RAY_TRAIN_V2_ENABLED": "", "RAY_ADDRESS": "auto"})) == []


def test_unknown_variables_are_reported() -> None:
    ignored = dict(ignored_ray_variables({"RAY_TRAIN_COLECTIVE_TIMEOUT_S": "5"}))
    assert ignored == {"RAY_TRAIN_COLECTIVE_TIMEOUT_S": "spotfit has no variable of this name"}


def test_no_variable_is_both_supported_and_ignored() -> None:
    supported = {setting.ray_name for setting in env.ENV_VARS}
    assert not supported & UNSUPPORTED_RAY_VARIABLES.keys()
