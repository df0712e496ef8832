from pathlib import Path

import pytest

from spotfit.store.local import atomic_write, is_partial_file, temporary_path


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with atomic_write(file) as part:
        part.write_bytes(b"half")
        assert not file.exists()
        part.write_bytes(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"whole"


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), atomic_write(file) as part:
        assert part.write_bytes(b"half") / 0
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_temporary_paths_are_unique(tmp_path: Path) -> None:
    assert temporary_path(tmp_path / "file") != temporary_path(tmp_path / "file")


def test_partial_files_are_recognized_by_name(tmp_path: Path) -> None:
    assert is_partial_file(temporary_path(tmp_path / "file").name)
    assert not is_partial_file(".spotfit-part-1")
    assert not is_partial_file("file")
