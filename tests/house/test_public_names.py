"""The public names are pinned in public_names.txt, and documented."""

import inspect
from typing import Any

import pytest

import spotfit
from spotfit.core.input_checks import DEPRECATED
from spotfit.torch import Checkpointer, TorchConfig, TorchTrainer
from tests.house.tree import ROOT

PINNED = (ROOT / "tests/house/public_names.txt").read_text().split()


def test_the_public_names_are_the_pinned_ones() -> None:
    assert sorted(spotfit.__all__) == PINNED, (
        "the public names changed: update public_names.txt and add a fragment to changes/"
    )


@pytest.mark.parametrize("name", PINNED)
def test_a_public_name_has_a_docstring(name: str) -> None:
    value = getattr(spotfit, name)
    if inspect.isclass(value) or callable(value):
        assert inspect.getdoc(value), f"spotfit.{name} has no docstring"
        assert not inspect.isclass(value) or "__doc__" in vars(value)


def test_dir_lists_the_public_names() -> None:
    assert set(PINNED) <= set(dir(spotfit))


def test_an_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError):
        getattr(spotfit, "no_such_name")  # noqa: B009  # a misspelled attribute


@pytest.mark.parametrize(
    "cls",
    [
        *(
            spotfit.ScalingConfig,
            spotfit.RunConfig,
            spotfit.FailureConfig,
            spotfit.CheckpointConfig,
        ),
        *(spotfit.LoggingConfig, spotfit.DataConfig, spotfit.ValidationConfig),
        *(spotfit.ValidationTaskConfig, spotfit.DataParallelTrainer, TorchTrainer, TorchConfig),
        Checkpointer,
    ],
)
def test_an_unknown_argument_of_a_public_class_gets_a_suggestion(cls: Any) -> None:
    parameters = inspect.signature(cls).parameters.values()
    known = [one.name for one in parameters if one.default is not DEPRECATED][-1]  # not removed
    with pytest.raises(spotfit.ConfigError, match=f"Did you mean '{known}'"):
        cls(**{f"{known}x": 1})
