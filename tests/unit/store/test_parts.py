from pathlib import Path

import pytest

from spotfit.store.parts import appearing, beside, is_part


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with appearing(file) as part:
        part.write_bytes(b"half")
        assert not file.exists()
        part.write_bytes(b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"whole"


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), appearing(file) as part:
        assert part.write_bytes(b"half") / 0
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


def test_no_two_writers_share_a_part(tmp_path: Path) -> None:
    assert beside(tmp_path / "file") != beside(tmp_path / "file")


def test_a_part_is_known_by_its_name(tmp_path: Path) -> None:
    assert is_part(beside(tmp_path / "file").name)
    assert not is_part(".spotfit-part-1")
    assert not is_part("file")
