"""The reference training functions have one result, whatever checkpoint they resume from."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit_localsim.live import reference_jobs

CONFIG = {"steps": 12, "save_every": 5, "step_s": 0.0}


class OneWorker:
    """The training API for one rank in this process."""

    def __init__(self, saved: Path | None = None) -> None:
        self.saved = saved
        self.checkpoints: list[bytes] = []
        self.metrics: list[dict[str, Any]] = []
        self.collective = self

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("report", "get_checkpoint", "get_context", "collective"):
            monkeypatch.setattr(spotfit, name, getattr(self, name), raising=False)

    def barrier(self) -> None:
        """There is no other rank."""

    def get_world_rank(self) -> int:
        return 0

    def get_context(self) -> "OneWorker":
        return self

    def get_checkpoint(self) -> spotfit.Checkpoint | None:
        return spotfit.Checkpoint.from_directory(str(self.saved)) if self.saved else None

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        self.metrics.append(metrics)
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                self.checkpoints.append(Path(folder, "rank-0").read_bytes())


def test_hash_chain_has_one_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uninterrupted = OneWorker()
    uninterrupted.enter(monkeypatch)
    assert reference_jobs.train_hash_chain(CONFIG) == reference_jobs.expected_hash_chain(12)
    assert [metrics["step"] for metrics in uninterrupted.metrics] == list(range(1, 13))
    assert len(uninterrupted.checkpoints) == 2

    (tmp_path / "rank-0").write_bytes(uninterrupted.checkpoints[1])
    resumed = OneWorker(tmp_path)
    resumed.enter(monkeypatch)
    assert reference_jobs.train_hash_chain(CONFIG) == reference_jobs.expected_hash_chain(12)
    assert resumed.metrics == [{"step": 11, "steps": 11}, {"step": 12, "steps": 12}]


def test_expected_hash_chain_hashes_each_step() -> None:
    first = hashlib.sha256(b"/1").hexdigest()
    assert (
        reference_jobs.expected_hash_chain(2) == hashlib.sha256(f"{first}/2".encode()).hexdigest()
    )
