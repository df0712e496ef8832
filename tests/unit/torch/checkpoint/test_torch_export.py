"""Exports are files that torch.load reads without spotfit."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from spotfit.checkpoint.export import export_safetensors
from spotfit.checkpoint.reader import MemoryShardReader, ReadRequest, SavedState
from spotfit.checkpoint.shm_segment import ShmSegment
from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.torch.checkpoint.torch_export import assemble_state, export_program, export_torch
from tests.unit.torch.checkpoint.test_load_plan import a_state, saved_by


def test_an_exported_model_is_its_state_dict(tmp_path: Path) -> None:
    saved = saved_by(3, tmp_path, a_state(2.0))
    export_torch(saved, tmp_path / "m.pt")
    model = torch.load(tmp_path / "m.pt", weights_only=True)
    assert model.keys() == {f"w{n}" for n in range(5)}
    assert model["w4"].tolist() == [[6.0] * 4] * 5


def test_exporting_the_model_reads_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_by(2, tmp_path, a_state(2.0, 0.5, ema={"shadow": torch.ones(3)}))
    read: list[ReadRequest] = []
    monkeypatch.setattr(saved, "read", read.extend)
    assert assemble_state(saved, section="model").keys() == {"model"}
    assert {one.piece.key[0] for one in read} == {"model"}


def test_corrupt_values_of_other_objects_do_not_affect_the_model(tmp_path: Path) -> None:
    saved_by(1, tmp_path, a_state(2.0))
    part = MemoryShardReader(ShmSegment.open(tmp_path / "0"))
    body = io.BytesIO()  # as it was saved before every save looked at its values
    torch.save([ReadRequest] * len(part.index.value_keys), body)
    part.index = msgspec.structs.replace(part.index, encoded_values=body.getvalue())
    assert assemble_state(SavedState([part]), section="model").keys() == {"model"}
    with pytest.raises(IntegrityError, match="saved are corrupt"):
        assemble_state(SavedState([part]))


def test_an_export_of_everything_keeps_the_nesting(tmp_path: Path) -> None:
    ema = {"shadow": torch.ones(3), 7: "seven"}
    saved = saved_by(2, tmp_path, a_state(2.0, 0.5, ema=ema))
    export_torch(saved, tmp_path / "all.pt", everything=True)
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert state.keys() == {"model", "optimizer", "ema"}
    assert state["optimizer"] == {"param_groups": [{"lr": 0.5, "params": ["w0"]}]}
    assert state["ema"]["shadow"].tolist() == [1.0] * 3
    assert state["ema"][7] == "seven"


def test_the_safetensors_library_reads_the_export(tmp_path: Path) -> None:
    state = a_state(2.0)
    state["model"] |= {
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
    }
    saved = saved_by(2, tmp_path, state)
    export_safetensors(saved, tmp_path / "m.safetensors")
    export_torch(saved, tmp_path / "m.pt")
    from_safetensors = load_file(tmp_path / "m.safetensors")
    from_torch = torch.load(tmp_path / "m.pt", weights_only=True)
    assert from_safetensors.keys() == from_torch.keys() >= {"half", "count", "mask"}
    for name, tensor in from_safetensors.items():
        assert tensor.dtype == from_torch[name].dtype
        assert torch.equal(tensor, from_torch[name])


def test_a_program_has_the_weights_of_the_snapshot(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    weights = {name: torch.full_like(value, 2.0) for name, value in layer.state_dict().items()}
    saved = saved_by(2, tmp_path, {"model": weights})
    export_program(saved, tmp_path / "m.pt2", layer, (torch.ones(2, 3),))
    program = torch.export.load(tmp_path / "m.pt2").module()
    assert program(torch.ones(4, 3)).tolist() == [[8.0, 8.0]] * 4


def test_a_program_needs_the_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the model"):
        export_program(saved_by(1, tmp_path, a_state(2.0)), tmp_path / "m.pt2", None, None)
