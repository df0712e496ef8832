"""One file that torch.load reads, without us: the model, or all there is."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from spotfit.checkpoint.export import export_safetensors
from spotfit.checkpoint.saved import InMemory, Saved, Wanted
from spotfit.checkpoint.segment import Segment
from spotfit.core.errors import IntegrityError
from spotfit.frameworks.torch.export import export_torch, whole_state
from tests.unit.frameworks.torch.test_reading import a_state, saved_by


def test_the_model_is_read_as_its_state_dict(tmp_path: Path) -> None:
    saved = saved_by(3, tmp_path, a_state(2.0))
    export_torch(saved, tmp_path / "m.pt")
    model = torch.load(tmp_path / "m.pt", weights_only=True)
    assert model.keys() == {f"w{n}" for n in range(5)}
    assert model["w4"].tolist() == [[6.0] * 4] * 5


def test_for_the_model_alone_nothing_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = saved_by(2, tmp_path, a_state(2.0, 0.5, ema={"shadow": torch.ones(3)}))
    read: list[Wanted] = []
    monkeypatch.setattr(saved, "read", read.extend)
    assert whole_state(saved, only="model").keys() == {"model"}
    assert {one.piece.key[0] for one in read} == {"model"}


def test_values_of_others_that_nobody_can_read_are_in_no_models_way(tmp_path: Path) -> None:
    saved_by(1, tmp_path, a_state(2.0))
    part = InMemory(Segment.open(tmp_path / "0"))
    body = io.BytesIO()  # as it was saved before every save looked at its values
    torch.save([Wanted] * len(part.index.leaves), body)
    part.index = msgspec.structs.replace(part.index, plain=body.getvalue())
    assert whole_state(Saved([part]), only="model").keys() == {"model"}
    with pytest.raises(IntegrityError, match="values cannot be read"):
        whole_state(Saved([part]))


def test_everything_is_nested_as_it_was(tmp_path: Path) -> None:
    ema = {"shadow": torch.ones(3), 7: "seven"}
    saved = saved_by(2, tmp_path, a_state(2.0, 0.5, ema=ema))
    export_torch(saved, tmp_path / "all.pt", everything=True)
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert state.keys() == {"model", "optimizer", "ema"}
    assert state["optimizer"] == {"param_groups": [{"lr": 0.5, "params": ["w0"]}]}
    assert state["ema"]["shadow"].tolist() == [1.0] * 3
    assert state["ema"][7] == "seven"


def test_the_library_reads_what_we_call_safetensors(tmp_path: Path) -> None:
    state = a_state(2.0)
    state["model"] |= {
        "half": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
    }
    saved = saved_by(2, tmp_path, state)
    export_safetensors(saved, tmp_path / "m.safetensors")
    export_torch(saved, tmp_path / "m.pt")
    theirs = load_file(tmp_path / "m.safetensors")
    ours = torch.load(tmp_path / "m.pt", weights_only=True)
    assert theirs.keys() == ours.keys() >= {"half", "count", "mask"}
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        assert torch.equal(tensor, ours[name])
