"""FrameworkCheckpoint is deprecated and stores a preprocessor."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.checkpoint.checkpoint_dir import Checkpoint
from spotfit.frameworks.framework_checkpoint import FrameworkCheckpoint


def test_a_framework_checkpoint_is_deprecated(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="use spotfit.Checkpoint") as warnings:
        old = FrameworkCheckpoint.from_directory(tmp_path)
    assert isinstance(old, Checkpoint)
    assert old.path == str(tmp_path)
    assert len(warnings) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_preprocessor_is_stored_in_the_metadata(tmp_path: Path) -> None:
    old = FrameworkCheckpoint(str(tmp_path))
    assert old.get_preprocessor() is None
    old.set_metadata({"by": "me"})
    old.set_preprocessor({"mean": 0.5})
    again = FrameworkCheckpoint(str(tmp_path))
    assert again.get_preprocessor() == {"mean": 0.5}
    assert again.get_metadata()["by"] == "me"
