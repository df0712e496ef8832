"""Files: which are looked at, and how a new text gets into one."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.migrate.scripts import scripts_in, write


def test_a_directory_is_looked_through_but_not_what_others_wrote(tmp_path: Path) -> None:
    for name in (
        "train.py",
        "models/net.py",
        "models/weights.bin",
        ".git/hook.py",
        ".venv/x.py",
        "env/pyvenv.cfg",
        "env/lib/x.py",
        "lib/site-packages/x.py",
        "__pycache__/x.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert scripts_in([tmp_path]) == [tmp_path / "train.py", tmp_path / "models/net.py"]


def test_a_script_that_is_named_is_taken_once_whatever_it_is_called(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.touch()
    assert scripts_in([script, script]) == [script]


def test_a_place_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no .*nothing\.py"):
        scripts_in([tmp_path / "nothing.py"])


def test_a_script_keeps_its_permissions_and_its_link(tmp_path: Path) -> None:
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    script.write_text("old")
    script.chmod(0o750)
    link.symlink_to(script)
    write(link, b"new")
    assert script.read_text() == "new"
    assert script.stat().st_mode & 0o777 == 0o750
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "train.py"]
