"""Arguments of Ray Train's V1 trainers."""

from typing import Any

import pytest

from spotfit.boosting.v1_arguments import OwnedLoop, parse_v1_arguments
from spotfit.core.errors import ConfigError

NONE = {
    "params": None,
    "datasets": None,
    "label_column": None,
    "num_boost_round": None,
    "rounds_per_segment": None,
}
V1 = {**NONE, "params": {"eta": 0.1}, "datasets": {"train": print}, "label_column": "y"}


def parse(fn: Any, arguments: dict[str, Any], **train_kwargs: Any) -> OwnedLoop | None:
    return parse_v1_arguments(
        "XGBoostTrainer", fn, arguments, train_kwargs=train_kwargs, known_kwargs=("obj",)
    )


def test_a_function_needs_no_other_arguments() -> None:
    assert parse(print, NONE) is None


@pytest.mark.parametrize(
    ("name", "value"), [("params", {}), ("label_column", "y"), ("num_boost_round", 3)]
)
def test_arguments_of_v1_beside_a_function_raise_as_in_ray(name: str, value: Any) -> None:
    with pytest.raises(DeprecationWarning, match=name):
        parse(print, {**NONE, name: value})


def test_arguments_of_v1_describe_a_training() -> None:
    loop = parse(None, V1, obj=abs)
    assert loop == OwnedLoop({"eta": 0.1}, {"train": print}, "y", 10, 10, {"obj": abs})


@pytest.mark.parametrize(
    ("fn", "arguments", "kwargs", "message"),
    [
        (None, NONE, {}, "neither a training function nor params"),
        (None, {**V1, "params": [("eta", 1)]}, {}, "must be a dictionary, not a list"),
        (None, {**V1, "params": {"booster": "gblinear"}}, {}, '"booster": "gblinear"'),
        (None, {**V1, "params": {"boosting": "random_forest"}}, {}, '"boosting": "random_forest"'),
        (None, V1, {"objs": 1}, "Did you mean 'obj'"),
        (None, {**V1, "num_boost_round": 0}, {}, "must be at least 1"),
        (print, {**NONE, "rounds_per_segment": 3}, {}, "unexpected argument 'rounds_per_segment'"),
        (print, NONE, {"obj": abs}, "unexpected argument 'obj'"),
    ],
)
def test_invalid_arguments_are_rejected(
    fn: Any, arguments: dict[str, Any], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(fn, arguments, **kwargs)
