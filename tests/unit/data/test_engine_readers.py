"""Arguments of the readers of other libraries; `make engines` reads rows of the libraries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

import spotfit.data
from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.dataset import Dataset
from tests.unit.data.sources.partitioned_frame import DataFrame

READERS: dict[str, Callable[..., Dataset]] = {
    name: getattr(spotfit.data, name)
    for name in ("from_dask", "from_spark", "from_daft", "from_ray", "from_modin")
}


@pytest.fixture
def frame() -> DataFrame:
    """Rows in two partitions."""
    return DataFrame(pd.DataFrame({"id": [3, 1]}), pd.DataFrame({"id": [2]}))


@pytest.mark.parametrize("name", READERS)
def test_objects_of_other_types_are_refused(name: str) -> None:
    with pytest.raises(ConfigTypeError, match=rf"{name}\(\) has a pandas"):
        READERS[name](pd.DataFrame())


def test_nothing_is_written_before_rows_are_needed(frame: DataFrame, tmp_path: Path) -> None:
    READERS["from_dask"](frame, path=tmp_path / "rows")
    assert [*tmp_path.iterdir()] == []


def test_rows_are_those_of_the_partitions_in_their_order(frame: DataFrame, tmp_path: Path) -> None:
    dataset = READERS["from_dask"](frame, path=tmp_path / "rows", key="v1")
    assert [row["id"] for row in dataset.take_all()] == [3, 1, 2]
    frame.partitions = ()  # which are not written again
    again = READERS["from_dask"](frame, path=tmp_path / "rows", key="v1")
    assert again.take_all() == dataset.take_all()


@pytest.mark.parametrize("key", ["", "a/b", ".."])
def test_an_invalid_key_is_refused(frame: DataFrame, key: str) -> None:
    with pytest.raises(ConfigError):
        READERS["from_dask"](frame, path="s3://bucket/rows", key=key)


@pytest.mark.parametrize("path", ["s3:/bucket", "memory://rows"])
def test_an_invalid_path_is_refused_at_once(frame: DataFrame, path: str) -> None:
    with pytest.raises(ConfigError):
        READERS["from_dask"](frame, path=path)


def test_unknown_arguments_are_refused(frame: DataFrame) -> None:
    READERS["from_dask"](frame, override_num_blocks=3)
    with pytest.raises(ConfigError, match="no argument 'paths'"):
        READERS["from_dask"](frame, paths="s3://bucket/rows")


def test_the_readers_import_no_library() -> None:
    libraries = "{'dask', 'daft', 'modin', 'pyspark', 'ray'}"
    program = (
        f"import spotfit.data.engine_readers, sys; sys.exit(bool({libraries} & {{*sys.modules}}))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
