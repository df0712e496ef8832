"""Files of which each is one row."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_binary_files
from spotfit.data.files import FileSet
from spotfit.data.source import Source
from spotfit.data.sources import whole_files
from spotfit.data.sources.partitioning import Partitioning
from tests.unit.data.sources.source_suite import FileSourceSuite, read_values, source_of


def names_and_bodies(folder: Path) -> tuple[list[str], list[bytes]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in paths], [path.read_bytes() for path in paths]


class TestBinaryFiles(FileSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for split in ("test", "train"):
            (tmp_path / f"split={split}").mkdir()
            for number in range(40):
                (tmp_path / f"split={split}" / f"{number:02}").write_bytes(bytes(number))
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_binary_files(folder, partitioning="hive", include_paths=True))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        paths, bodies = names_and_bodies(folder)
        splits = [Path(path).parent.name.removeprefix("split=") for path in paths]
        return pa.table({"bytes": bodies, "split": splits, "path": paths})


def test_a_unit_has_at_most_64_files_and_16_mib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_files, "UNIT_BYTES", 1000)
    for number in range(70):
        (tmp_path / f"a{number:02}").write_bytes(b"x")
    for number in range(5):
        (tmp_path / f"b{number}").write_bytes(b"x" * 400)
    (tmp_path / "c").write_bytes(b"x" * 5000)
    manifest = read_binary_files(tmp_path).manifest
    assert manifest.unit_rows.tolist() == [64, 8, 2, 1, 1]
    assert manifest.unit_bytes.tolist() == [64, 806, 800, 400, 5000]


def test_files_are_read_without_their_paths(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    rows = read_binary_files(tmp_path).take_all()
    assert rows == [{"bytes": b"a"}, {"bytes": b"b"}]


def test_files_are_not_read_for_other_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    manifest = read_binary_files(tmp_path, include_paths=True).manifest
    monkeypatch.delattr(FileSet, "read")
    assert manifest.read_part(0, 0, 1, ["path"]).to_pydict() == {"path": [str(tmp_path / "a")]}


def test_folders_below_a_base_are_columns(tmp_path: Path) -> None:
    (tmp_path / "cat" / "7").mkdir(parents=True)
    (tmp_path / "cat" / "7" / "a").write_bytes(b"x")
    folders = Partitioning(
        "dir", base_dir=str(tmp_path), field_names=["label", "fold"], field_types={"fold": int}
    )
    dataset = read_binary_files(tmp_path, partitioning=folders)
    assert read_values(dataset) == {"bytes": [b"x"], "label": ["cat"], "fold": [7]}


def test_decompression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not decompress"):
        read_binary_files(tmp_path, arrow_open_stream_args={"compression": "gzip"})
