"""Programs of torch models; ONNX is tested in tests/frameworks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, MissingExtraError
from spotfit.torch import export_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning")


class Nested(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Takes a dictionary and a list, as models of sequences do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.dropout = torch.nn.Dropout()

    def forward(self, inputs: dict[str, Any], offsets: list[Any]) -> Any:
        return self.dropout(self.layer(inputs["x"])) + offsets[0]


def rows(count: int) -> tuple[Any, Any]:
    values = torch.arange(count * 3, dtype=torch.float32).reshape(count, 3)
    return {"x": values}, [torch.ones(count, 2)]


def test_a_program_takes_batches_of_any_size(tmp_path: Path) -> None:
    model = Nested()
    export_model(model, tmp_path / "model.pt2", rows(2))
    program = torch.export.load(tmp_path / "model.pt2").module()
    assert torch.equal(program(*rows(5)), model.eval()(*rows(5)))


def test_a_fixed_batch_has_the_size_of_the_example(tmp_path: Path) -> None:
    export_model(Nested(), tmp_path / "model.pt2", rows(2), dynamic_batch=False)
    program = torch.export.load(tmp_path / "model.pt2").module()
    with pytest.raises(AssertionError):
        program(*rows(5))


def test_the_mode_of_the_model_is_restored(tmp_path: Path) -> None:
    model = Nested()
    model.layer.eval()
    export_model(model, tmp_path / "model.pt2", rows(2))
    assert (model.training, model.layer.training, model.dropout.training) == (True, False, True)


def test_an_existing_file_stays_if_the_export_fails(tmp_path: Path) -> None:
    class Fails(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, values: Any) -> Any:
            raise ValueError("no such input")

    (tmp_path / "model.pt2").write_bytes(b"before")
    with pytest.raises(ConfigError, match="cannot export the model"):
        export_model(Fails(), tmp_path / "model.pt2", (torch.ones(2, 2),))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [
        ("model.pt2", b"before")
    ]


@pytest.mark.parametrize("name", ["model.pt", "model", "model.safetensors"])
def test_other_suffixes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not select a format"):
        export_model(Nested(), tmp_path / name, rows(2))


def test_inputs_that_are_no_tuple_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a tuple"):
        export_model(Nested(), tmp_path / "model.pt2", torch.ones(2))


def test_a_directory_without_permission_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        export_model(Nested(), tmp_path / "file/model.pt2", rows(2))


def test_onnx_needs_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"spotfit\[onnx\]"):
        export_model(Nested(), tmp_path / "model.onnx", rows(2))
