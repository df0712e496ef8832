"""Finding scripts and replacing their content."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotfit.core.errors import ConfigError
from spotfit.migrate.command import find_scripts, write_script


def test_a_directory_is_searched_except_installed_packages(tmp_path: Path) -> None:
    for name in (
        "train.py",
        "models/net.py",
        "tutorial.ipynb",
        ".ipynb_checkpoints/tutorial.ipynb",
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
    found = [path.relative_to(tmp_path).as_posix() for path in find_scripts([tmp_path])]
    assert found == ["train.py", "tutorial.ipynb", "models/net.py"]


def test_an_explicit_file_is_returned_once(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.touch()
    assert find_scripts([script, script]) == [script]


def test_a_missing_path_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.py does not exist"):
        find_scripts([tmp_path / "nothing.py"])


def test_permissions_and_links_are_preserved(tmp_path: Path) -> None:
    script, link = tmp_path / "train.py", tmp_path / "link.py"
    script.write_text("old")
    script.chmod(0o750)
    link.symlink_to(script)
    write_script(link, b"new")
    assert script.read_text() == "new"
    assert script.stat().st_mode & 0o777 == 0o750
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.py", "train.py"]
