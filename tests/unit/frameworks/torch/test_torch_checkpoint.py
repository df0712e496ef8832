"""TorchCheckpoint stores weights and loads them into a model."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from spotfit.frameworks.torch.torch_checkpoint import NoModelError, TorchCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:TorchCheckpoint:DeprecationWarning")


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def same(one: nn.Module, other: nn.Module) -> bool:
    weights = other.state_dict()
    return all(torch.equal(weight, weights[name]) for name, weight in one.state_dict().items())


def test_torch_checkpoint_is_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="TorchCheckpoint is deprecated"):
        TorchCheckpoint.from_state_dict({})
    with pytest.warns(DeprecationWarning, match="pickles the model"):
        TorchCheckpoint.from_model(nn.Linear(1, 1))


def test_a_state_dict_is_loaded_into_a_given_model() -> None:
    model = nn.Linear(2, 2)
    checkpoint = TorchCheckpoint.from_state_dict(model.state_dict())
    filled = checkpoint.get_model(empty := nn.Linear(2, 2))
    assert filled is empty
    assert same(filled, model)


def test_the_ddp_prefix_is_removed_from_a_copy() -> None:
    model = nn.BatchNorm1d(2)
    wrapped = nn.Module()
    wrapped.module = model
    state_dict_before = wrapped.state_dict()
    checkpoint = TorchCheckpoint.from_state_dict(state_dict_before)
    assert same(checkpoint.get_model(nn.BatchNorm1d(2)), model)
    assert all(name.startswith("module.") for name in state_dict_before)
    assert "module" in state_dict_before._metadata  # type: ignore[attr-defined]  # torch keeps it there


def test_a_stored_model_ignores_the_argument() -> None:
    model = nn.Linear(2, 2)
    checkpoint = TorchCheckpoint.from_model(model)
    assert same(checkpoint.get_model(), model)
    with pytest.warns(UserWarning, match="is ignored"):
        assert same(checkpoint.get_model(nn.Linear(2, 2)), model)


def test_a_state_dict_without_a_model_is_rejected() -> None:
    with pytest.raises(ValueError, match="got no model"):
        TorchCheckpoint.from_state_dict({}).get_model()


def test_other_objects_are_rejected(tmp_path: Path) -> None:
    torch.save(torch.ones(1), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="contains a Tensor"):
        TorchCheckpoint.from_directory(tmp_path).get_model()


def test_a_checkpoint_without_the_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"does not contain model\.pt") as caught:
        TorchCheckpoint.from_directory(tmp_path).get_model()
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), NoModelError)


def test_the_preprocessor_is_stored() -> None:
    checkpoint = TorchCheckpoint.from_state_dict({}, preprocessor={"mean": 0.5})
    assert checkpoint.get_preprocessor() == {"mean": 0.5}
