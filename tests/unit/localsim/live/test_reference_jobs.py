"""The trainings that chaos disturbs have one result, wherever they go on from."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

import spotfit
from spotfit_localsim.live import reference_jobs

CONFIG = {"steps": 12, "save_every": 5, "step_s": 0.0}


class OneWorker:
    """The worker's world, for one rank in this process."""

    def __init__(self, saved: Path | None = None) -> None:
        self.saved = saved
        self.kept: list[bytes] = []
        self.told: list[dict[str, Any]] = []
        self.collective = self

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("report", "get_checkpoint", "get_context", "collective"):
            monkeypatch.setattr(spotfit, name, getattr(self, name), raising=False)

    def barrier(self) -> None:
        """Nobody to wait for."""

    def get_world_rank(self) -> int:
        return 0

    def get_context(self) -> "OneWorker":
        return self

    def get_checkpoint(self) -> spotfit.Checkpoint | None:
        return spotfit.Checkpoint.from_directory(str(self.saved)) if self.saved else None

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        self.told.append(metrics)
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                self.kept.append(Path(folder, "rank-0").read_bytes())


def test_counting_has_one_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = OneWorker()
    whole.enter(monkeypatch)
    assert reference_jobs.train_hash_chain(CONFIG) == reference_jobs.expected_hash_chain(12)
    assert [told["step"] for told in whole.told] == list(range(1, 13))
    assert len(whole.kept) == 2

    (tmp_path / "rank-0").write_bytes(whole.kept[1])
    resumed = OneWorker(tmp_path)
    resumed.enter(monkeypatch)
    assert reference_jobs.train_hash_chain(CONFIG) == reference_jobs.expected_hash_chain(12)
    assert resumed.told == [{"step": 11, "steps": 11}, {"step": 12, "steps": 12}]


def test_the_chain_is_what_it_says() -> None:
    first = hashlib.sha256(b"/1").hexdigest()
    assert (
        reference_jobs.expected_hash_chain(2) == hashlib.sha256(f"{first}/2".encode()).hexdigest()
    )
