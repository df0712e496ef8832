"""The files that paths name."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.files import FileSet, PathOptions, next_listing, path_of
from spotfit.store.factory import open_store


def names_of(paths: Any, **options: Any) -> list[str]:
    files = FileSet.of_paths(paths, PathOptions(**options)).list_files()
    return [file.key.rpartition("/")[2] for file in files]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.csv", "a.csv", "sub/c.CSV", "sub/d.txt", "_SUCCESS", ".hidden/e.csv"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    return tmp_path


def test_files_of_a_folder_are_sorted_and_hidden_ones_skipped(folder: Path) -> None:
    assert names_of(folder) == ["a.csv", "b.csv", "c.CSV", "d.txt"]
    assert names_of(f"{folder}/") == ["a.csv", "b.csv", "c.CSV", "d.txt"]


def test_paths_keep_their_order(folder: Path) -> None:
    assert names_of([folder / "b.csv", folder / "sub", str(folder / "a.csv")]) == [
        *("b.csv", "c.CSV", "d.txt", "a.csv")
    ]


def test_a_named_file_may_be_hidden_and_have_another_extension(folder: Path) -> None:
    assert names_of(folder / "_SUCCESS", format_extensions=("csv",)) == ["_SUCCESS"]


def test_extensions_of_the_format_select_files_of_folders(folder: Path) -> None:
    assert names_of(folder, format_extensions=("csv",)) == ["a.csv", "b.csv", "c.CSV"]


def test_extensions_of_the_call_select_all_files(folder: Path) -> None:
    options = {"file_extensions": (".txt",), "format_extensions": ("csv",)}
    assert names_of([folder, folder / "a.csv"], **options) == ["d.txt"]


def test_a_filter_selects_paths(folder: Path) -> None:
    def is_short(paths: list[str]) -> list[str]:
        return [path for path in paths if not path.startswith(f"{folder}/sub")]

    assert names_of(folder, partition_filter=is_short) == ["a.csv", "b.csv"]


def test_missing_paths_are_reported_or_ignored(folder: Path) -> None:
    missing = folder / "missing"
    with pytest.raises(ConfigError, match="missing is neither a file nor a folder"):
        names_of([missing, folder])
    assert len(names_of([missing, folder], ignore_missing_paths=True)) == 4
    with pytest.raises(ConfigError, match="There are no files to read"):
        names_of([missing], ignore_missing_paths=True)


def test_patterns_are_refused_with_the_alternative(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"partition_filter: '\*' is not expanded"):
        names_of(f"{folder}/*.csv")


def test_no_matching_file_is_an_error_that_names_the_extensions(folder: Path) -> None:
    with pytest.raises(ConfigError, match="file_extensions other than parquet"):
        names_of([folder, folder], format_extensions=("parquet",))


@pytest.mark.parametrize("paths", [[], [1], "", "s3://", "s3://user:key@bucket/a", "nothing://a/b"])
def test_invalid_paths_are_refused_without_a_request(paths: Any) -> None:
    with pytest.raises(ConfigError) as error:
        FileSet.of_paths(paths, PathOptions())
    assert isinstance(error.value, ConfigTypeError) == (paths == [1])


def test_a_file_is_read_in_the_version_that_was_listed(folder: Path) -> None:
    files = pickle.loads(pickle.dumps(FileSet.of_paths(folder / "a.csv", PathOptions())))
    (file,) = files.list_files()
    assert path_of(file) == str(folder / "a.csv")
    assert (files.read(file), files.read(file, 1, 3)) == (b"a.csv", b".cs")
    os.utime(folder / "a.csv", ns=(1, 1))
    with pytest.raises(ConfigError, match=r"a\.csv was changed or deleted"):
        files.read(file)


def test_files_that_have_changed_since_a_listing_are_found_by_another_one(folder: Path) -> None:
    since = next_listing()
    files = FileSet.of_paths(folder, PathOptions())
    listed = files.list_files()
    (folder / "a.csv").write_text("other rows")
    (folder / "b.csv").unlink()
    assert files.find_changed(listed, since=since) == [], "a listing after `since` is recent"
    assert files.find_changed(listed, since=next_listing()) == [*listed[:2]]


def test_markers_of_folders_in_buckets_are_not_files() -> None:
    store = open_store("memory://markers")
    for key in ("folder", "folder/a", "folder/empty"):
        store.put(key, b"x" if key == "folder/a" else b"")
    assert names_of("memory://markers/") == ["a", "empty"]


def test_a_file_shorter_than_listed_is_reported() -> None:
    store = open_store("memory://short")
    store.put("a", b"12345")
    files = FileSet.of_paths("memory://short/a", PathOptions())
    (file,) = files.list_files()
    with pytest.raises(ConfigError, match="changed or deleted"):
        files.read(file._replace(size_bytes=6))
