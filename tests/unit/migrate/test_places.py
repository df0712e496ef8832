"""The map: every public name of Ray Train leads to its namesake, whatever module it comes from."""

from __future__ import annotations

import importlib

import pytest

from spotfit.host.theirs import WITHOUT_EFFECT
from spotfit.migrate.places import ADVICE, FACADES, Here, Stays, find, variable, what_holds

INTO = {
    ".".join(theirs): ours
    for theirs, ours in FACADES.items()
    if theirs[1] == "train" and importlib.util.find_spec(ours)
}


@pytest.mark.parametrize(("theirs", "ours"), INTO.items())
def test_every_public_name_of_ours_is_found_by_rays_path(theirs: str, ours: str) -> None:
    for name in importlib.import_module(ours).__all__:
        path = (*theirs.split("."), name)
        if path not in FACADES:
            assert find(path) == Here(ours, name, len(path))


def test_what_follows_a_name_is_not_looked_at() -> None:
    assert find(("ray", "train", "Checkpoint", "from_directory")) == Here(
        "spotfit", "Checkpoint", 3
    )


@pytest.mark.parametrize(
    "path",
    [
        "ray",
        "ray.data.Dataset",
        "ray.remote",
        "ray.train.xgboost.XGBoostTrainer",
        "ray.air.nothing",
    ],
)
def test_what_stays_is_told_why(path: str) -> None:
    place = find(tuple(path.split(".")))
    assert isinstance(place, Stays)
    assert place.do.endswith(".")


def test_advice_is_given_for_what_is_not_here_only() -> None:
    for path in ADVICE.keys() - FACADES.keys():
        assert isinstance(find(path), Stays), path


def test_a_variable_is_ours_or_nobodys() -> None:
    assert variable("RAY_TRAIN_COLLECTIVE_TIMEOUT_S") == "SPOTFIT_COLLECTIVE_TIMEOUT_S"
    assert variable("RAY_TRAIN_NO_SUCH_THING") is None
    assert variable("PATH") is None


def test_of_a_variable_that_nothing_reads_it_is_told_what_holds() -> None:
    for name, theirs in WITHOUT_EFFECT.items():
        assert what_holds(name) == theirs.instead
        assert variable(name) is None
    assert what_holds("RAY_TRAIN_NO_SUCH_THING") == "there is nothing of that name here"
