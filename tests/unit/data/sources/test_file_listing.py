"""Inspection of files: once per version of a file, and with the result of complete reads."""

from __future__ import annotations

import csv
import io
import json
import os
import string
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.file_readers import (
    read_csv,
    read_json,
    read_text,
    read_tfrecords,
    read_webdataset,
)
from spotfit.data.files import FileSet
from spotfit.data.source import DataFile
from spotfit.data.sources import file_listing, line_files, tfrecords, webdataset
from tests.unit.data.sources.source_suite import read_values
from tests.unit.data.sources.test_tfrecords import encode
from tests.unit.data.sources.test_webdataset import write_tar


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_listing, "_MIN_CACHED_BYTES", 1)
    return tmp_path / "cache/spotfit/listings"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the names and lengths of all reads of files."""
    found = []
    read_view = FileSet.read_view

    def counted(self: FileSet, file: DataFile, start: int = 0, length: int | None = None) -> Any:
        body = read_view(self, file, start, length)
        found.append((Path(file.key).name, len(body)))
        return body

    monkeypatch.setattr(FileSet, "read_view", counted)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.csv").write_text(f"id,name\n1,{name}\n2,{name}\n")
    return folder


# --- Cache ----------------------------------------------------------------------------------------


def test_a_later_listing_reads_nothing(folder: Path, reads: list[tuple[str, int]]) -> None:
    first = read_csv(folder).manifest
    assert reads
    reads.clear()
    again = read_csv(folder)
    assert again.manifest.digest == first.digest
    assert again.manifest.schema == first.schema
    assert not reads
    assert read_values(again) == {"id": [1, 2, 1, 2], "name": ["a", "a", "b", "b"]}


def test_only_new_and_changed_files_are_inspected(
    folder: Path, reads: list[tuple[str, int]]
) -> None:
    _ = read_csv(folder).manifest
    (folder / "b.csv").write_text("id,name\n7,changed\n")
    (folder / "c.csv").write_text("id,name\n8,new\n")
    reads.clear()
    assert read_csv(folder).count() == 4
    assert {name for name, _ in reads} == {"b.csv", "c.csv"}


def test_a_file_of_equal_size_and_another_time_is_inspected(
    folder: Path, reads: list[tuple[str, int]]
) -> None:
    _ = read_csv(folder).manifest
    found = (folder / "a.csv").stat()
    os.utime(folder / "a.csv", ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    reads.clear()
    _ = read_csv(folder).manifest
    assert {name for name, _ in reads} == {"a.csv"}


def test_other_options_are_another_listing(folder: Path) -> None:
    assert read_csv(folder).count() == 4
    options = pyarrow.csv.ReadOptions(column_names=["id", "name"])
    assert read_csv(folder, read_options=options).count() == 6


def test_functions_for_invalid_rows_are_options(folder: Path) -> None:
    (folder / "a.csv").write_text("id,name\n1,a\n2\n")

    def handled(answer: str) -> Dataset:
        return read_csv(
            folder,
            parse_options=pyarrow.csv.ParseOptions(
                invalid_row_handler=lambda row: answer if row.text != "keep" else "error"
            ),
        )

    assert handled("skip").count() == 3
    assert handled("skip").manifest.digest == handled("skip").manifest.digest
    with pytest.raises(ConfigError, match="cannot be parsed"):
        handled("error").count()


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"schemas": [], "files": [[["a","b",1,"v"],0,[]]]}']
)
def test_a_damaged_cache_is_ignored(folder: Path, cache: Path, body: bytes) -> None:
    digest = read_csv(folder).manifest.digest
    (index,) = cache.iterdir()
    index.write_bytes(body)
    assert read_csv(folder).manifest.digest == digest


def test_small_files_are_not_cached(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_listing, "_MIN_CACHED_BYTES", 1000)
    _ = read_csv(folder).manifest
    assert not cache.exists()


def test_the_oldest_listings_are_deleted(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_listing, "_CACHED_LISTINGS", 1)
    for name in ("a.csv", "b.csv"):
        _ = read_csv(folder / name).manifest
    assert len([*cache.iterdir()]) == 1


def test_large_contents_are_skipped(tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    image = os.urandom(200_000)
    (tmp_path / "a.tfrecords").write_bytes(
        encode([{"image": [image], "label": [n]} for n in range(3)])
    )
    write_tar(tmp_path / "a.tar", {f"{n}.{end}": image for n in range(3) for end in ("jpg", "b")})
    for dataset, size in (
        (read_tfrecords(tmp_path), 3 * 200_000),
        (read_webdataset(tmp_path), 6 * 200_000),
    ):
        reads.clear()
        assert dataset.count() == 3
        assert sum(length for _, length in reads) < size / 10


# --- The rows of complete reads -------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LINES = st.lists(
    st.one_of(
        TEXT, st.sampled_from(["", " ", "\t\r", "\u3000", "\x85", "a\x0bb", "\u2028", "\xa0x"])
    )
)
CELLS = st.lists(
    st.tuples(
        st.integers(-(2**40), 2**40),
        st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False), st.integers()),
        st.text(string.ascii_letters + ' ,"', max_size=8),
    ),
    min_size=1,
)

exactly = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Dataset]:
    """Return a function that reads a file with this content, in small units by several threads."""
    for module in (line_files, tfrecords, webdataset):
        monkeypatch.setattr(module, "UNIT_BYTES", 64)
    monkeypatch.setattr(file_listing, "_MIN_CACHED_BYTES", 2**40)
    monkeypatch.setattr("spotfit.host.machine.cpu_count", lambda: 3)
    numbers: Iterator[int] = iter(range(10**6))

    def read(reader: Callable[..., Dataset], body: bytes, end: str, **options: Any) -> Dataset:
        path = tmp_path / f"{next(numbers)}.{end}"
        path.write_bytes(body)
        return reader(path, **options)

    return read


def assert_counted(dataset: Dataset, expected: dict[str, list[Any]]) -> None:
    """Compare the listed numbers of rows of each unit, and the rows, with a complete read."""
    assert_counts(dataset)
    assert read_values(dataset) == expected


def assert_counts(dataset: Dataset) -> None:
    counts = dataset.manifest.unit_rows.tolist()
    (source,), (units,) = dataset.manifest.sources, dataset.manifest.source_units
    assert [source.read_unit(units, unit).num_rows for unit in range(len(counts))] == counts


@exactly
@given(lines=LINES, end=st.sampled_from(["\n", "\r\n"]), drop=st.booleans())
def test_lines_are_those_of_python(
    listed: Callable[..., Dataset], lines: list[str], end: str, drop: bool
) -> None:
    text = end.join(lines)
    expected = [line for line in text.splitlines() if line.strip() or not drop]
    if expected:
        dataset = listed(read_text, text.encode(), "txt", drop_empty_lines=drop)
        assert_counted(dataset, {"text": expected})


@exactly
@given(rows=CELLS)
def test_rows_of_csv_are_those_of_pyarrow(listed: Callable[..., Dataset], rows: list[Any]) -> None:
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\n").writerows([("a", "b", "c"), *rows])
    body = stream.getvalue().encode()
    expected = pyarrow.csv.read_csv(pa.BufferReader(body)).to_pydict()
    assert_counted(listed(read_csv, body, "csv"), expected)


@exactly
@given(
    rows=st.lists(
        st.fixed_dictionaries({"a": st.integers(-9, 9)}, optional={"b": TEXT}), min_size=1
    )
)
def test_rows_of_json_are_those_of_python(
    listed: Callable[..., Dataset], rows: list[dict[str, Any]]
) -> None:
    rows = [{"a": 0, "b": "text"}, *rows]  # text that looks like a time would be one
    body = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    expected = {name: [row.get(name) for row in rows] for name in ("a", "b")}
    assert_counted(listed(read_json, body, "jsonl"), expected)


@exactly
@given(rows=st.lists(st.tuples(st.integers(0, 2**62), st.binary(max_size=200)), min_size=1))
def test_rows_of_records_are_those_written(listed: Callable[..., Dataset], rows: list[Any]) -> None:
    body = encode([{"id": [number], "bytes": [content]} for number, content in rows])
    expected = {"bytes": [content for _, content in rows], "id": [number for number, _ in rows]}
    assert_counted(listed(read_tfrecords, body, "tfrecords"), expected)


@exactly
@given(contents=st.lists(st.binary(max_size=2000), min_size=1, max_size=20))
def test_samples_of_tar_files_are_those_written(
    listed: Callable[..., Dataset], contents: list[bytes]
) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number, content in enumerate(contents):
            member = tarfile.TarInfo(f"{number:03d}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    dataset = listed(read_webdataset, stream.getvalue(), "tar", decoder=None)
    assert_counts(dataset)
    assert read_values(dataset)["bin"] == contents
