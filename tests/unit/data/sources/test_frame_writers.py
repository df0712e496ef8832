"""What the writers of other libraries have in common; `make engines` runs the libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.sources import frame_writers
from spotfit.data.sources.frame_writers import DaskWriter, check_can_write, check_frame, spark_url
from spotfit.store.url import RootUrl


class RecordedFrame:
    """Records the calls of its writer, which are those that the real libraries accept."""

    def __init__(self, **types: Any) -> None:
        self.dtypes = pd.DataFrame(types).dtypes
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def to_parquet(self, path: str, **options: Any) -> None:
        self.calls.append((path, options))


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


def test_row_groups_have_rows_for_their_size() -> None:
    frame = RecordedFrame(x=np.zeros(1), y=np.zeros(1, np.float32))
    DaskWriter(frame).write(RootUrl.parse("s3://bucket/rows"))
    ((path, options),) = frame.calls
    assert path == "s3://bucket/rows"
    assert options["row_group_size"] == frame_writers.ROW_GROUP_BYTES // 12
    assert options["name_function"](3) < options["name_function"](10)


def test_options_of_the_user_replace_others() -> None:
    frame = RecordedFrame(text=["a"])
    DaskWriter(frame, {"row_group_size": 7}).write(RootUrl.parse("s3://bucket/rows"))
    assert frame.calls[0][1]["row_group_size"] == 7


def test_memory_of_this_process_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="the memory of this process"):
        check_can_write("dask", RootUrl.parse("memory://x"))


@pytest.mark.parametrize("value", [pd.DataFrame(), pa.table({}), "dask", None])
def test_objects_of_other_libraries_are_refused(value: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"from_dask\(\) has a") as error:
        check_frame("from_dask", value, "dask", "DataFrame")
    assert "DataFrame of dask" in str(error.value.do)


def test_subclasses_are_accepted() -> None:
    class Special(pd.DataFrame):  # type: ignore[misc]
        pass

    check_frame("from_pandas", Special(), "pandas", "DataFrame")
