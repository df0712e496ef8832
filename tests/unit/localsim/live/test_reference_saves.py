"""The training functions of save plans resume from saves and detect corrupt state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.worker import training_api
from spotfit.worker.local_session import LocalSession
from spotfit_localsim.live import reference_jobs, reference_saves


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    with training_api.use_session(session):
        yield session


def config(folder: Path, steps: int) -> dict[str, Any]:
    return {"steps": steps, "save_every": 5, "step_s": 0.0, "folder": str(folder)}


def test_training_resumes_from_its_last_save(session: LocalSession, tmp_path: Path) -> None:
    reference_saves.train_with_snapshots(config(tmp_path, 7))
    assert session.metrics == {"step": 5, "steps": 5}
    assert reference_saves.train_with_snapshots(
        config(tmp_path, 15)
    ) == reference_jobs.expected_hash_chain(15)
    assert session.metrics == {"step": 15, "steps": 15}


def test_corrupt_restore_is_recorded(
    session: LocalSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference_saves.train_with_snapshots(config(tmp_path, 7))
    monkeypatch.setattr(
        reference_saves, "_repeat_to_size", lambda _seed, size_bytes: bytes(size_bytes)
    )
    with pytest.raises(reference_saves.CorruptRestoreError):
        reference_saves.train_with_snapshots(config(tmp_path, 15))
    assert "of step 5" in (tmp_path / "corruption").read_text()
