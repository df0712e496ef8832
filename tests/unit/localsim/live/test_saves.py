"""What stories of saves train: it goes on from memory or the bucket, and notices what is torn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotfit.worker import current
from spotfit.worker.local import LocalSession
from spotfit_localsim.live import jobs, saves


@pytest.fixture
def session() -> Iterator[LocalSession]:
    session = LocalSession("run")
    with current.entered(session):
        yield session


def config(folder: Path, steps: int) -> dict[str, Any]:
    return {"steps": steps, "save_every": 5, "pace_s": 0.0, "folder": str(folder)}


def test_it_goes_on_from_what_it_saved_last(session: LocalSession, tmp_path: Path) -> None:
    saves.keep(config(tmp_path, 7))
    assert session.metrics == {"step": 5, "steps": 5}
    assert saves.keep(config(tmp_path, 15)) == jobs.counted(15)
    assert session.metrics == {"step": 15, "steps": 15}


def test_what_is_torn_and_nobody_said_so_is_noticed(
    session: LocalSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves.keep(config(tmp_path, 7))
    monkeypatch.setattr(saves, "_expanded", lambda _seed, size_bytes: bytes(size_bytes))
    with pytest.raises(saves.TornState):
        saves.keep(config(tmp_path, 15))
    assert "of step 5" in (tmp_path / "torn").read_text()
