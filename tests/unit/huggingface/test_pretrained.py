"""An exported directory has the files that `from_pretrained` reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import spotfit
from spotfit.huggingface import export_pretrained
from spotfit.torch import Checkpointer
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession

CONFIG = '{"model_type": "bert", "hidden_size": 4}'


class Progress:
    """State as `prepare_trainer(every=...)` saves it."""

    def state_dict(self) -> dict[str, Any]:
        return {"config": CONFIG}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == self.state_dict()


class Config:
    """A configuration of transformers."""

    def to_json_string(self, *, use_diff: bool) -> str:
        return CONFIG if not use_diff else "{}"


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    with training_api.use_session(session):
        yield session
    shutil.rmtree(session.snapshot_channel.segment_dirs[0].parent, ignore_errors=True)


def saved(session: LocalSession, model: nn.Module, extra: dict[str, Any]) -> spotfit.Checkpoint:
    Checkpointer(model=model, extra=extra).save()
    checkpoint = session.latest_checkpoint()
    assert checkpoint is not None
    return checkpoint


def test_the_directory_contains_configuration_weights_and_tokenizer(
    session: LocalSession, tmp_path: Path
) -> None:
    model = nn.Linear(2, 3)
    checkpoint = saved(session, model, {"trainer": Progress()})
    export_pretrained(checkpoint, tmp_path / "out", processing_class=Tokenizer())
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(CONFIG)
    assert (tmp_path / "out/tokenizer.json").exists()
    weights = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(weights[name], one) for name, one in model.state_dict().items())


def test_without_a_saved_configuration_one_must_be_passed(
    session: LocalSession, tmp_path: Path
) -> None:
    checkpoint = saved(session, nn.Linear(2, 3), {})
    with pytest.raises(spotfit.ConfigError, match="no configuration of a transformers model"):
        export_pretrained(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_pretrained(checkpoint, tmp_path / "out", config=Config())
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(CONFIG)
