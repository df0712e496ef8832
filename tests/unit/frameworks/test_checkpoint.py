"""A checkpoint of old scripts: it warns, and keeps what prepares inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.checkpoint.handle import Checkpoint
from spotfit.frameworks.checkpoint import FrameworkCheckpoint


def test_it_is_a_checkpoint_that_says_it_is_old(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="use spotfit.Checkpoint") as said:
        old = FrameworkCheckpoint.from_directory(tmp_path)
    assert isinstance(old, Checkpoint)
    assert old.path == str(tmp_path)
    assert len(said) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_prepares_inputs_travels_in_its_metadata(tmp_path: Path) -> None:
    old = FrameworkCheckpoint(str(tmp_path))
    assert old.get_preprocessor() is None
    old.set_metadata({"by": "me"})
    old.set_preprocessor({"mean": 0.5})
    again = FrameworkCheckpoint(str(tmp_path))
    assert again.get_preprocessor() == {"mean": 0.5}
    assert again.get_metadata()["by"] == "me"
