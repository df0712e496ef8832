"""Which files are written, and with which rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import AlreadyExistsError, ConfigError, MissingExtraError
from spotfit.data.dataset import Dataset
from spotfit.data.operations.file_encoders import parquet_encoder
from spotfit.data.operations.writers import (
    WriteOptions,
    export_to,
    import_library,
    materialize,
    open_folder,
    write_files,
    write_rows,
)

BLOCKS = [pa.table({"x": np.arange(first, first + 10)}) for first in range(0, 50, 10)]


def write(
    path: Path, blocks: Sequence[pa.Table] = BLOCKS, **arguments: Any
) -> tuple[list[str], list[int]]:
    """The keys of the files, and their numbers of rows."""
    options, others = WriteOptions.of_arguments("write_parquet", arguments)
    assert others == {}
    store = open_folder(path, options.filesystem)
    keys = write_files(store, blocks, "parquet", parquet_encoder(), options)
    return keys, [pq.read_metadata(path / key).num_rows for key in keys]


def test_small_blocks_share_a_file(tmp_path: Path) -> None:
    keys, counts = write(tmp_path)
    assert counts == [50]
    assert pq.read_table(tmp_path / keys[0])["x"].to_pylist() == list(range(50))


def test_large_blocks_are_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotfit.data.operations.writers.FILE_BYTES", 150)
    assert write(tmp_path)[1] == [20, 20, 10]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"min_rows_per_file": 15}, [20, 20, 10]),
        ({"num_rows_per_file": 15}, [20, 20, 10]),
        ({"max_rows_per_file": 15}, [15, 15, 15, 5]),
        ({"max_rows_per_file": 4}, [4] * 12 + [2]),
        ({"min_rows_per_file": 12, "max_rows_per_file": 15}, [15, 15, 15, 5]),
    ],
)
def test_files_have_the_stated_numbers_of_rows(
    tmp_path: Path, arguments: dict[str, int], expected: list[int]
) -> None:
    keys, counts = write(tmp_path, BLOCKS, **arguments)
    assert counts == expected
    rows = [value for key in keys for value in pq.read_table(tmp_path / key)["x"].to_pylist()]
    assert rows == list(range(50))


def test_partitions_are_directories_as_in_hive(tmp_path: Path) -> None:
    rows = pa.table({"k": ["a", "b", None, "a"], "n": [1, 1, 2, 2], "x": [0, 1, 2, 3]})
    keys, _ = write(tmp_path, [rows], partition_cols=["k", "n"])
    assert sorted(str(Path(key).parent) for key in keys) == [
        "k=__HIVE_DEFAULT_PARTITION__/n=2",
        "k=a/n=1",
        "k=a/n=2",
        "k=b/n=1",
    ]
    table = pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table()
    assert table.sort_by("x").to_pydict() == {
        "x": [0, 1, 2, 3],
        "k": ["a", "b", None, "a"],
        "n": [1, 1, 2, 2],
    }


def test_an_unknown_partition_column_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'y'"):
        write(tmp_path, partition_cols=["y"])


def test_append_adds_files(tmp_path: Path) -> None:
    assert set(write(tmp_path)[0]).isdisjoint(write(tmp_path)[0])
    assert len(list(tmp_path.iterdir())) == 2


def test_overwrite_replaces_files(tmp_path: Path) -> None:
    write(tmp_path)
    keys, _ = write(tmp_path, mode="overwrite")
    assert [path.name for path in tmp_path.iterdir()] == keys


def test_ignore_keeps_files(tmp_path: Path) -> None:
    write(tmp_path)
    assert write(tmp_path, mode="ignore") == ([], [])
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("mode", ["error", "create"])
def test_existing_files_are_an_error_on_request(tmp_path: Path, mode: str) -> None:
    write(tmp_path, mode=mode)
    with pytest.raises(AlreadyExistsError, match="1 objects"):
        write(tmp_path, mode=mode)


@pytest.mark.parametrize(
    "arguments", [{"mode": "upsert"}, {"mode": "replace"}, {"min_rows_per_file": 0}]
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WriteOptions.of_arguments("write_parquet", arguments)


def test_arguments_of_the_format_are_returned() -> None:
    arguments = {
        "compression": "gzip",
        "concurrency": 3,
        "try_create_dir": True,
        "arrow_parquet_args_fn": lambda: {"row_group_size": 5},
    }
    _, others = WriteOptions.of_arguments("write_parquet", arguments)
    assert others == {"compression": "gzip", "row_group_size": 5}


def test_files_are_written_to_a_file_system_of_the_user(tmp_path: Path) -> None:
    keys, counts = write(tmp_path, filesystem=pyarrow.fs.LocalFileSystem())
    assert (len(keys), counts) == (1, [50])


def test_a_provider_of_the_user_names_the_files(tmp_path: Path) -> None:
    class Names:
        def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
            assert write_uuid
            return f"rows-{task_index}.parquet"

        def get_filename_for_row(self, row: Any, *_indices: Any) -> str:
            return f"row-{row['x']}.txt"

    assert write(tmp_path / "files", filename_provider=Names())[0] == ["rows-0.parquet"]
    options, _ = WriteOptions.of_arguments("write_images", {"filename_provider": Names()})
    folder = open_folder(tmp_path / "rows")
    assert write_rows(folder, BLOCKS[:1], "txt", lambda row: str(row["x"]).encode(), options) == 10
    assert (tmp_path / "rows/row-7.txt").read_text() == "7"


def test_materialized_tensors_are_bytes_in_the_file_and_tensors_when_read(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    rows = pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    source = materialize(open_folder(tmp_path), [rows], rows.schema, 8 * 2**20)
    (path,) = tmp_path.glob("*.parquet")
    assert pq.read_schema(path).field("t").type == pa.binary(24)
    (block,) = Dataset.of_source(source).blocks()
    assert block["t"].combine_chunks().to_numpy_ndarray().tolist() == values.tolist()


def test_complete_files_are_not_written_again(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    materialize(folder, BLOCKS, BLOCKS[0].schema, 100)
    names = sorted(path.name for path in tmp_path.iterdir())
    source = materialize(folder, [], BLOCKS[0].schema, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert Dataset.of_source(source).count() == 50


def test_incomplete_files_are_replaced(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    materialize(folder, BLOCKS, BLOCKS[0].schema, 100)
    (tmp_path / "_SUCCESS").unlink()
    source = materialize(folder, BLOCKS[:2], BLOCKS[0].schema, 100)
    assert Dataset.of_source(source).count() == 20


def test_an_empty_dataset_keeps_its_columns(tmp_path: Path) -> None:
    source = materialize(open_folder(tmp_path), [], BLOCKS[0].schema, 100)
    dataset = Dataset.of_source(source)
    assert dataset.count() == 0
    assert dataset.columns() == ["x"]


def test_another_library_reads_what_was_written(tmp_path: Path) -> None:
    frame = export_to(pd.read_parquet, tmp_path, BLOCKS)
    assert frame["x"].tolist() == list(range(50))


def test_a_missing_library_is_named() -> None:
    with pytest.raises(MissingExtraError, match="no_such_library") as caught:
        import_library("no_such_library.frames")
    assert "pip install no_such_library" in caught.value.do


def test_another_library_needs_a_place_for_the_files() -> None:
    with pytest.raises(ConfigError, match="no place"):
        export_to(pd.read_parquet, None, BLOCKS)
