"""What the writers of other libraries have in common; `make engines` runs the libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.sources import frame_writers
from spotfit.data.sources.frame_writers import DaskWriter, check_can_write, spark_url
from spotfit.store.url import RootUrl
from tests.unit.data.sources.partitioned_frame import DataFrame


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("s3://bucket/a b?region=eu-west-1", "s3a://bucket/a b"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://box/a?account_name=acc", "abfss://box@acc.dfs.core.windows.net/a"),
        ("/folder/a", "file:///folder/a"),
    ],
)
def test_spark_has_addresses_of_hadoop(address: str, expected: str) -> None:
    assert spark_url(RootUrl.parse(address)) == expected


def written(frame: DataFrame, folder: Path, **options: Any) -> list[pq.ParquetFile]:
    """The files of a frame, in the order of their names."""
    DaskWriter(frame, options).write(RootUrl.parse(folder / "rows"))
    return [pq.ParquetFile(path) for path in sorted(folder.glob("rows/*.parquet"))]


def test_row_groups_have_rows_for_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_writers, "ROW_GROUP_BYTES", 120)
    rows = pd.DataFrame({"x": np.arange(25.0), "y": np.arange(25, dtype=np.float32)})
    (file,) = written(DataFrame(rows), tmp_path)
    groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert groups == [10, 10, 5]


def test_files_are_named_in_the_order_of_their_partitions(tmp_path: Path) -> None:
    partitions = [pd.DataFrame({"n": [number]}, index=[7]) for number in range(11)]
    files = written(DataFrame(*partitions), tmp_path)
    assert [file.read().to_pydict() for file in files] == [{"n": [n]} for n in range(11)]


def test_options_of_the_user_replace_others(tmp_path: Path) -> None:
    rows = pd.DataFrame({"text": ["a"] * 8})
    (file,) = written(DataFrame(rows), tmp_path, row_group_size=7, compression="zstd")
    assert file.metadata.row_group(0).num_rows == 7
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_memory_of_this_process_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="the memory of this process"):
        check_can_write("dask", RootUrl.parse("memory://x"))


@pytest.mark.parametrize("value", [pd.DataFrame(), pa.table({}), "dask", None])
def test_objects_of_other_libraries_are_refused(value: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"from_dask\(\) has a") as error:
        DaskWriter(value)
    assert "DataFrame of dask" in str(error.value.do)


def test_subclasses_are_accepted() -> None:
    class Special(DataFrame):
        pass

    assert DaskWriter(Special(pd.DataFrame())).library == "dask"
