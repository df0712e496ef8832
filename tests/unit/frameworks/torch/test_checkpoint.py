"""TorchCheckpoint: weights in, a model out."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from spotfit.frameworks.torch.checkpoint import NoModelError, TorchCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:TorchCheckpoint:DeprecationWarning")


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def same(one: nn.Module, other: nn.Module) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(weight, theirs[name]) for name, weight in one.state_dict().items())


def test_it_says_that_it_is_old() -> None:
    with pytest.warns(DeprecationWarning, match="TorchCheckpoint is deprecated"):
        TorchCheckpoint.from_state_dict({})
    with pytest.warns(DeprecationWarning, match="pickles the model"):
        TorchCheckpoint.from_model(nn.Linear(1, 1))


def test_weights_fill_a_model_of_the_same_shape() -> None:
    model = nn.Linear(2, 2)
    kept = TorchCheckpoint.from_state_dict(model.state_dict())
    filled = kept.get_model(empty := nn.Linear(2, 2))
    assert filled is empty
    assert same(filled, model)


def test_names_lose_what_a_wrapper_put_before_them_and_the_given_ones_stay() -> None:
    model = nn.BatchNorm1d(2)
    wrapped = nn.Module()
    wrapped.module = model
    given = wrapped.state_dict()
    kept = TorchCheckpoint.from_state_dict(given)
    assert same(kept.get_model(nn.BatchNorm1d(2)), model)
    assert all(name.startswith("module.") for name in given)
    assert "module" in given._metadata  # type: ignore[attr-defined]  # torch keeps it there


def test_a_whole_model_needs_none_and_takes_none() -> None:
    model = nn.Linear(2, 2)
    kept = TorchCheckpoint.from_model(model)
    assert same(kept.get_model(), model)
    with pytest.warns(UserWarning, match="yours is not used"):
        assert same(kept.get_model(nn.Linear(2, 2)), model)


def test_weights_alone_are_no_model() -> None:
    with pytest.raises(ValueError, match="no model was given"):
        TorchCheckpoint.from_state_dict({}).get_model()


def test_other_things_are_no_model(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="holds a Tensor"):
        TorchCheckpoint.from_directory(tmp_path).get_model()


def test_a_checkpoint_without_the_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has no model\.pt") as caught:
        TorchCheckpoint.from_directory(tmp_path).get_model()
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), NoModelError)


def test_what_prepares_inputs_comes_along() -> None:
    kept = TorchCheckpoint.from_state_dict({}, preprocessor={"mean": 0.5})
    assert kept.get_preprocessor() == {"mean": 0.5}
