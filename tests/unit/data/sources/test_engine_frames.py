"""Rows that another library writes once: records, keys, content, failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError, IntegrityError
from spotfit.data.plans.unit_manifest import UnitManifest
from spotfit.data.sources.engine_frames import WrittenFrame, frames_written_in
from spotfit.store.factory import open_store
from spotfit.store.local import MemoryStore
from spotfit.store.url import RootUrl
from tests.unit.data.sources.source_suite import rows_of


@dataclass
class PartWriter:
    """Writes a file for each part, as the libraries do, from this process."""

    parts: Sequence[Sequence[int]]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: Sequence[str] | None = None
    lost: int = 0
    """Files that the lister does not find, as on another machine's disk."""
    error: Exception | None = None
    writes: int = field(default=0, init=False)
    library = "engine"

    def write(self, folder: RootUrl) -> Sequence[str] | None:
        self.writes += 1
        if self.error is not None:
            raise self.error
        path = Path(folder.path)
        path.mkdir(parents=True)
        names = self.names or [f"part-{n}.parquet" for n in range(len(self.parts))]
        for name, part in list(zip(names, self.parts, strict=True))[self.lost :]:
            pq.write_table(pa.table({"id": part}), path / name, row_group_size=2)
        (path / "_SUCCESS").touch()
        return self.names


def ids_of(frame: WrittenFrame) -> list[int]:
    ids: list[int] = rows_of(frame.to_source())["id"].to_pylist()
    return ids


def digest_of(frame: WrittenFrame) -> str:
    return UnitManifest.of_source(frame.to_source()).digest


def files_in(folder: Path) -> set[Path]:
    return {*folder.rglob("*.parquet")}


def test_rows_are_read_by_row_group(tmp_path: Path) -> None:
    source = WrittenFrame(PartWriter([[0, 1, 2], [3]]), str(tmp_path)).to_source()
    assert source.list_units().unit_rows.tolist() == [2, 1, 1]
    assert rows_of(source)["id"].to_pylist() == [0, 1, 2, 3]


def test_files_with_random_names_are_in_the_order_of_the_rows(tmp_path: Path) -> None:
    writer = PartWriter([[0], [1], [2]], names=["c.parquet", "a.parquet", "b.parquet"])
    frame = WrittenFrame(writer, str(tmp_path))
    assert ids_of(frame) == ids_of(frame) == [0, 1, 2]


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}])
def test_rows_of_a_key_are_written_once(tmp_path: Path, options: dict[str, Any]) -> None:
    writer = PartWriter([[0, 1]], options)
    first = digest_of(WrittenFrame(writer, str(tmp_path), "v1"))
    assert digest_of(WrittenFrame(writer, str(tmp_path), "v1")) == first
    assert writer.writes == 1


def test_rows_of_a_key_are_written_again_with_other_options(tmp_path: Path) -> None:
    written = [
        ids_of(WrittenFrame(PartWriter([part], options), str(tmp_path), "v1"))
        for part, options in (
            ([0], {}),
            ([1], {"schema": pa.schema([("id", pa.int32())])}),
            ([2], {"schema": pa.schema([("id", pa.int64())])}),
        )
    ]
    assert written == [[0], [1], [2]]


def test_other_credentials_do_not_write_rows_again(tmp_path: Path) -> None:
    writers = [PartWriter([[0]], {"storage_options": {"token": token}}) for token in "ab"]
    for writer in writers:
        assert ids_of(WrittenFrame(writer, str(tmp_path), "v1")) == [0]
    assert [writer.writes for writer in writers] == [1, 0]


def test_options_that_cannot_be_compared_are_refused_with_a_key(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        writer = PartWriter([[0]], {"provider": file})
        with pytest.raises(ConfigError, match="cannot compare write_options provider"):
            WrittenFrame(writer, str(tmp_path), "v1").to_source()
        assert ids_of(WrittenFrame(writer, str(tmp_path))) == [0]


def test_equal_files_are_kept_once(tmp_path: Path) -> None:
    first = digest_of(WrittenFrame(PartWriter([[0], [1]]), str(tmp_path)))
    files = files_in(tmp_path)
    assert digest_of(WrittenFrame(PartWriter([[0], [1]]), str(tmp_path))) == first
    assert files_in(tmp_path) == files


@pytest.mark.parametrize("parts", [[[1], [0]], [[0, 1]], [[0], [2]]])
def test_other_rows_are_other_files(tmp_path: Path, parts: list[list[int]]) -> None:
    first = digest_of(WrittenFrame(PartWriter([[0], [1]]), str(tmp_path)))
    frame = WrittenFrame(PartWriter(parts), str(tmp_path))
    assert digest_of(frame) != first
    assert ids_of(frame) == [row for part in parts for row in part]


def test_files_of_an_interrupted_write_are_not_read(tmp_path: Path) -> None:
    PartWriter([[7]]).write(RootUrl.parse(tmp_path / "interrupted"))
    assert ids_of(WrittenFrame(PartWriter([[0]]), str(tmp_path), "v1")) == [0]


def test_rows_of_a_run_are_in_its_directory(tmp_path: Path) -> None:
    with frames_written_in(open_store(tmp_path / "run")):
        assert ids_of(WrittenFrame(PartWriter([[0]]))) == [0]
    assert files_in(tmp_path) == files_in(tmp_path / "run" / ".spotfit" / "data") != set()


def test_a_missing_place_is_reported() -> None:
    with pytest.raises(ConfigError, match="no place for them was given") as error:
        WrittenFrame(PartWriter([[0]])).to_source()
    assert "Pass path=" in str(error.value.do)


def test_the_memory_of_a_run_is_refused() -> None:
    with frames_written_in(MemoryStore()), pytest.raises(ConfigError, match="memory of this"):
        WrittenFrame(PartWriter([[0]])).to_source()


def test_an_error_of_the_library_is_reported(tmp_path: Path) -> None:
    writer = PartWriter([[0]], error=PermissionError("AccessDenied"))
    with pytest.raises(ConfigError, match="PermissionError: AccessDenied"):
        WrittenFrame(writer, str(tmp_path)).to_source()


@pytest.mark.parametrize("names", [None, ["a.parquet", "b.parquet"]])
def test_files_that_are_not_found_are_reported(tmp_path: Path, names: list[str] | None) -> None:
    writer = PartWriter([[0], [1]], names=names, lost=2 if names is None else 1)
    with pytest.raises(ConfigError, match="could not write"):
        WrittenFrame(writer, str(tmp_path)).to_source()


@pytest.mark.parametrize("body", [b"", b"{}", b'{"folder": 1, "files": []}'])
def test_a_damaged_record_is_reported(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "engine-v1.json").write_bytes(body)
    with pytest.raises(ConfigError, match="is not a record of files"):
        WrittenFrame(PartWriter([[0]]), str(tmp_path), "v1").to_source()


@pytest.mark.parametrize("name", ["../other/a.parquet", "/etc/a.parquet", "a//b.parquet", "", "."])
@pytest.mark.parametrize("field", ["folder", "file"])
def test_a_record_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, name: str, field: str
) -> None:
    root = tmp_path / "rows"
    other = tmp_path / "other"
    PartWriter([[7]], names=["a.parquet"]).write(RootUrl.parse(other))
    size = (other / "a.parquet").stat().st_size
    folder, file = (name, "a.parquet") if field == "folder" else ("folder", name)
    record = {"folder": folder, "files": [[file, size]]}
    root.mkdir()
    (root / "engine-v1.json").write_bytes(msgspec.json.encode(record))
    with pytest.raises(IntegrityError, match="names a file that spotfit has not written"):
        WrittenFrame(PartWriter([[0]]), str(root), "v1").to_source()


@pytest.mark.parametrize("change", [Path.unlink, lambda path: path.write_bytes(b"else")])
def test_changed_files_are_reported(tmp_path: Path, change: Callable[[Path], object]) -> None:
    frame = WrittenFrame(PartWriter([[0], [1]]), str(tmp_path), "v1")
    frame.to_source()
    change(min(files_in(tmp_path)))
    with pytest.raises(ConfigError, match="were changed or deleted"):
        frame.to_source()
