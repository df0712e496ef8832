"""A folder of shared memory, or of the disk where there is none, goes with its owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spotfit.host import shared_memory
from spotfit.host.shared_memory import folder_for


def test_it_lies_in_shared_memory_and_goes_with_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    with folder_for("me") as folder:
        assert folder == tmp_path / f"spotfit-{os.getuid()}-me"
        assert folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_without_shared_memory_it_lies_among_the_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with folder_for("me") as folder:
        assert folder.parent == tmp_path
