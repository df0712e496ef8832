"""A reported engine is loaded with the RNG states of its rank; other checkpoints are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.core.errors import ConfigError
from spotfit.deepspeed import load_checkpoint, report_checkpoint
from spotfit.torch.checkpoint.save_plan import encode_values
from spotfit.torch.checkpoint.training_state import rng_state
from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession
from spotfit.worker.training_api import report


class Engine:
    """Saves one number, as DeepSpeed's engine does its state; tests/frameworks has the real one."""

    def __init__(self, weight: int) -> None:
        self.weight = weight

    def save_checkpoint(self, directory: str, *, tag: str, client_state: dict[str, Any]) -> None:
        Path(directory, tag).mkdir()
        torch.save([self.weight, client_state], Path(directory, tag, "state.pt"))

    def load_checkpoint(self, directory: str, *, tag: str) -> tuple[str | None, Any]:
        path = Path(directory, tag, "state.pt")
        if not path.exists():
            return None, None
        self.weight, client_state = torch.load(path)
        return str(path), client_state


@pytest.fixture(autouse=True)
def session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    training_api.set_session(session)
    yield session
    training_api.clear_session()


def test_a_run_without_a_checkpoint_loads_nothing() -> None:
    assert load_checkpoint(Engine(1)) is None


def test_engine_client_state_and_random_numbers_continue() -> None:
    torch.manual_seed(3)
    report_checkpoint(Engine(7), {"loss": 1.0}, client_state={"step": 5})
    expected = torch.rand(2).tolist()
    engine = Engine(0)
    assert load_checkpoint(engine) == {"step": 5}
    assert engine.weight == 7
    assert torch.rand(2).tolist() == expected


def test_a_checkpoint_of_more_workers_is_rejected(tmp_path: Path) -> None:
    own = {"world_size": 4, "rng_state": rng_state()}
    (tmp_path / "rank-0.values").write_bytes(encode_values(own))
    report({}, checkpoint=Checkpoint.from_directory(tmp_path))
    with pytest.raises(ConfigError, match="by 4 workers; DeepSpeed cannot load it with 1"):
        load_checkpoint(Engine(0))


@pytest.mark.parametrize("has_rank_file", [False, True])
def test_a_checkpoint_of_other_files_is_rejected(tmp_path: Path, *, has_rank_file: bool) -> None:
    (tmp_path / "model.pt").touch()
    if has_rank_file:
        own = {"world_size": 1, "rng_state": rng_state()}
        (tmp_path / "rank-0.values").write_bytes(encode_values(own))
    report({}, checkpoint=Checkpoint.from_directory(tmp_path))
    with pytest.raises(ConfigError, match=r"not one of .*report_checkpoint: it has model\.pt"):
        load_checkpoint(Engine(0))
