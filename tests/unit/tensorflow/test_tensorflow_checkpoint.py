"""TensorflowCheckpoint, without TensorFlow."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import NotFoundError
from spotfit.tensorflow import TensorflowCheckpoint
from tests.unit.tensorflow import fake_tensorflow
from tests.unit.tensorflow.fake_tensorflow import Model

pytestmark = pytest.mark.filterwarnings("ignore:TensorflowCheckpoint is deprecated")


@pytest.fixture(autouse=True)
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tensorflow.install(monkeypatch)


def test_a_model_is_stored_with_a_preprocessor() -> None:
    checkpoint = TensorflowCheckpoint.from_model(Model(5.0), preprocessor={"mean": 1})
    assert checkpoint.get_model().weight == 5.0
    assert checkpoint.get_preprocessor() == {"mean": 1}


def test_a_file_and_a_directory_are_copied(tmp_path: Path) -> None:
    Model(3.0).save(str(tmp_path / "model.h5"))
    assert TensorflowCheckpoint.from_h5(tmp_path / "model.h5").get_model().weight == 3.0
    stored = Path(TensorflowCheckpoint.from_saved_model(tmp_path).get_model())
    assert (stored / "model.h5").exists()
    assert stored.resolve() != tmp_path.resolve()


def test_a_model_that_does_not_exist_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no file"):
        TensorflowCheckpoint.from_h5(tmp_path / "model.h5")
    with pytest.raises(NotFoundError, match="no directory"):
        TensorflowCheckpoint.from_saved_model(tmp_path / "model")
    with pytest.raises(NotFoundError, match="names no model"):
        TensorflowCheckpoint.from_directory(str(tmp_path)).get_model()


def test_the_class_is_deprecated(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="TensorflowCheckpoint"):
        TensorflowCheckpoint(str(tmp_path))
