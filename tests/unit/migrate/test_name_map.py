"""Every public name of Ray Train maps to the spotfit name."""

from __future__ import annotations

import importlib

import pytest

from spotfit.host.env import UNSUPPORTED_RAY_VARIABLES
from spotfit.migrate.name_map import (
    ADVICE,
    MODULE_MAP,
    NoCounterpart,
    SpotfitName,
    explain_ignored_variable,
    find_counterpart,
    find_variable,
)

INTO = {
    ".".join(ray_module): module
    for ray_module, module in MODULE_MAP.items()
    if ray_module[1] in ("train", "torch") and importlib.util.find_spec(module)
}


@pytest.mark.parametrize(("ray_module", "module"), INTO.items())
def test_every_public_name_is_found_by_its_ray_path(ray_module: str, module: str) -> None:
    for name in importlib.import_module(module).__all__:
        path = (*ray_module.split("."), name)
        if path not in MODULE_MAP:
            assert find_counterpart(path) == SpotfitName(module, name, len(path))


def test_attributes_of_a_name_are_not_checked() -> None:
    assert find_counterpart(("ray", "train", "Checkpoint", "from_directory")) == SpotfitName(
        "spotfit", "Checkpoint", 3
    )


@pytest.mark.parametrize(
    "path",
    [
        "ray",
        "ray.data.read_kafka_v0",
        "ray.remote",
        "ray.train.horovod.nothing",
        "horovod.run",
        "horovod.tensorflow.init",
        "horovod.torch.nothing",
        "ray.air.nothing",
    ],
)
def test_names_without_counterpart_have_advice(path: str) -> None:
    place = find_counterpart(tuple(path.split(".")))
    assert isinstance(place, NoCounterpart)
    assert place.do.endswith(".")


def test_advice_exists_only_for_names_without_counterpart() -> None:
    for path in ADVICE.keys() - MODULE_MAP.keys():
        assert isinstance(find_counterpart(path), NoCounterpart), path


def test_variables_of_ray_map_to_those_of_spotfit_or_none() -> None:
    assert find_variable("RAY_TRAIN_COLLECTIVE_TIMEOUT_S") == "SPOTFIT_COLLECTIVE_TIMEOUT_S"
    assert find_variable("RAY_TRAIN_NO_SUCH_THING") is None
    assert find_variable("PATH") is None


def test_ignored_variables_are_explained() -> None:
    for name, ray_module in UNSUPPORTED_RAY_VARIABLES.items():
        assert explain_ignored_variable(name) == ray_module.explanation
        assert find_variable(name) is None
    assert (
        explain_ignored_variable("RAY_TRAIN_NO_SUCH_THING")
        == "spotfit has no variable of this name"
    )
