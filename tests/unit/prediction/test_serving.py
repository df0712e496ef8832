"""Layouts of model servers: names, versions, and the order in which files are written."""

from __future__ import annotations

from pathlib import Path

import pytest

import spotfit
from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.prediction.serving import export_for_serving
from spotfit.store.local import LocalStore


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files, in the order in which they are written."""
    names: list[str] = []
    put, put_file = LocalStore.put, LocalStore.put_file

    def record_put(self: LocalStore, key: str, body: bytes) -> None:
        names.append(key)
        put(self, key, body)

    def record_put_file(self: LocalStore, key: str, path: Path) -> None:
        names.append(key)
        put_file(self, key, path)

    monkeypatch.setattr(LocalStore, "put", record_put)
    monkeypatch.setattr(LocalStore, "put_file", record_put_file)
    return names


@pytest.mark.parametrize(
    ("name", "served_as"),
    [("clf.joblib", "model.joblib"), ("model.ubj", "model.bst"), ("model.txt", "model.bst")],
)
def test_kserve_gets_one_file_with_the_suffix_of_its_server(
    name: str, served_as: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"model")
    url = export_for_serving(tmp_path / name, tmp_path / "out", layout="kserve")
    assert url == str(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        served_as: b"model"
    }


def test_an_estimator_in_the_layout_of_kserve_is_loaded_again(tmp_path: Path) -> None:
    joblib = pytest.importorskip("joblib")
    linear_model = pytest.importorskip("sklearn.linear_model")
    (tmp_path / "checkpoint").mkdir()
    estimator = linear_model.LinearRegression().fit([[0.0], [1.0]], [1.0, 3.0])
    joblib.dump(estimator, tmp_path / "checkpoint/model.joblib")
    (tmp_path / "checkpoint/metrics.txt").touch()
    checkpoint = spotfit.Checkpoint.from_directory(tmp_path / "checkpoint")
    export_for_serving(checkpoint, tmp_path / "out", layout="kserve")
    loaded = joblib.load(tmp_path / "out/model.joblib")
    assert loaded.predict([[2.0]]) == estimator.predict([[2.0]])


def test_kserve_gets_a_pretrained_folder_with_its_configuration_last(
    tmp_path: Path, written: list[str]
) -> None:
    folder = tmp_path / "pretrained"
    (folder / "sub").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "sub/vocab.txt"):
        (folder / name).write_text(name)
    url = export_for_serving(folder, tmp_path / "out", layout="kserve")
    assert written[-1] == "config.json"
    assert {path.name for path in Path(url).rglob("*.*")} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "vocab.txt",
    }


def test_kserve_reads_one_model_per_folder(tmp_path: Path) -> None:
    (tmp_path / "model.txt").touch()
    export_for_serving(tmp_path / "model.txt", tmp_path / "out", layout="kserve")
    with pytest.raises(ConfigError, match="not empty"):
        export_for_serving(tmp_path / "model.txt", tmp_path / "out", layout="kserve")


def test_triton_gets_numbered_versions_and_its_configuration_last(
    tmp_path: Path, written: list[str]
) -> None:
    (tmp_path / "digits.pt").write_bytes(b"script")
    repository = tmp_path / "models"
    for number in range(1, 12):
        url = export_for_serving(
            tmp_path / "digits.pt", repository, layout="triton", config=f"version {number}"
        )
        assert url == str(repository / f"digits/{number}")
        assert written[-2:] == ["model.pt", "config.pbtxt"]
    assert (repository / "digits/config.pbtxt").read_text() == "version 11"
    assert (repository / "digits/1/model.pt").read_bytes() == b"script"


def test_triton_needs_a_configuration_for_other_models(tmp_path: Path) -> None:
    (tmp_path / "digits.pt").touch()
    with pytest.raises(ConfigError, match=r"config\.pbtxt for digits\.pt"):
        export_for_serving(tmp_path / "digits.pt", tmp_path / "models", layout="triton")


def test_an_onnx_model_needs_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    (tmp_path / "digits.onnx").touch()
    with pytest.raises(MissingExtraError, match=r"spotfit\[onnx\]"):
        export_for_serving(tmp_path / "digits.onnx", tmp_path / "models", layout="triton")


def test_unsuitable_sources_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="does not exist"):
        export_for_serving(tmp_path / "missing", out, layout="triton")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="0 model files"):
        export_for_serving(tmp_path / "empty", out, layout="triton")
    with pytest.raises(ConfigError, match="layout='torchserve'"):
        export_for_serving(tmp_path, out, layout="torchserve")  # type: ignore[arg-type]
