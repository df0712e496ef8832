"""Rows of Dask, Spark, Daft, Ray and Modin from files that these write, and files for them."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import spotfit
import spotfit.data
from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.source import Source
from spotfit.data.sources import frame_writers
from spotfit.data.sources.engine_frames import frames_written_in
from spotfit.store.factory import open_store
from tests.live.cloud import LiveTestCloud
from tests.s3_server import run_s3_server
from tests.unit.data.sources.source_suite import SourceSuite, rows_of, source_of, values_of

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the libraries, about themselves
    pytest.mark.timeout(300),  # Spark and Ray start their own processes
]

ROWS = 400
PARTITIONS = 12
"""More than 10, so that the order of numbers differs from that of texts."""


def installed(module: str) -> Any:
    """Return a module, or skip the test."""
    package = module.partition(".")[0]
    return pytest.importorskip(module, reason=f"{package} is not installed; `make engines`")


@pytest.fixture(autouse=True)
def _small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_writers, "ROW_GROUP_BYTES", 4096)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    ray = installed("ray")
    installed("ray.data")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    sql = installed("pyspark.sql")
    if shutil.which("java") is None:
        pytest.skip("java is not installed; apt-get install default-jre-headless")
    builder = sql.SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    session = builder.config("spark.driver.bindAddress", "127.0.0.1").getOrCreate()
    yield session
    session.stop()


def make_frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": np.arange(ROWS),
            "x": np.arange(ROWS) / 8,
            "text": [f"row {n}" if n % 7 else None for n in range(ROWS)],
            "values": [[n, n + 1] for n in range(ROWS)],
        }
    )


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*.parquet") if path.is_file()}


class EngineSuite(SourceSuite):
    """What holds for all libraries. A subclass provides `frame`, and the name of the reader."""

    reader: ClassVar[Callable[..., Dataset]]

    def read(self, frame: Any, **arguments: Any) -> Dataset:
        return type(self).reader(frame, **arguments)

    @pytest.fixture
    def source(self, frame: Any, tmp_path: Path) -> Source:
        return source_of(self.read(frame, path=tmp_path / "rows"))

    @pytest.fixture
    def expected(self) -> pa.Table:
        return pa.Table.from_pandas(make_frame())

    def test_equal_rows_are_found_again(self, frame: Any, tmp_path: Path) -> None:
        first = self.read(frame, path=tmp_path).manifest
        files = files_below(tmp_path)
        again = self.read(frame, path=tmp_path).manifest
        assert again.digest == first.digest
        assert files_below(tmp_path) == files

    def test_rows_of_a_key_are_written_once(self, frame: Any, tmp_path: Path) -> None:
        first = self.read(frame, path=tmp_path, key="v1").manifest
        other = self.read(frame, path=tmp_path, key="v2").manifest
        again = self.read(frame, path=tmp_path, key="v1").manifest
        assert first.digest == again.digest != other.digest

    def test_a_pickle_does_not_refer_to_the_library(self, frame: Any, tmp_path: Path) -> None:
        dataset = self.read(frame, path=tmp_path)
        package = type(frame).__module__.partition(".")[0]
        assert f"{package}.".encode() not in pickle.dumps(dataset)

    def test_a_run_has_the_rows_in_its_directory(self, frame: Any, tmp_path: Path) -> None:
        with frames_written_in(open_store(tmp_path / "run")):
            assert self.read(frame).count() == ROWS
        assert files_below(tmp_path) == files_below(tmp_path / "run/.spotfit/data")

    def test_a_folder_that_cannot_be_written_is_reported(self, frame: Any, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="could not write the rows"):
            self.read(frame, path=tmp_path / "file").count()


class TestDask(EngineSuite):
    reader = staticmethod(spotfit.data.from_dask)

    @pytest.fixture
    def frame(self) -> Any:
        dataframe = installed("dask.dataframe")
        # Dask makes text of lists.
        return dataframe.from_pandas(make_frame().drop(columns="values"), npartitions=PARTITIONS)

    @pytest.fixture
    def expected(self) -> pa.Table:
        return pa.Table.from_pandas(make_frame().drop(columns="values"))

    def test_changed_files_of_functions_give_other_rows(self, tmp_path: Path) -> None:
        dataframe = installed("dask.dataframe")

        def rows_of_file(value: int) -> list[int]:
            pd.DataFrame({"id": [value]}).to_csv(tmp_path / "rows.csv", index=False)
            frame = dataframe.from_map(pd.read_csv, [str(tmp_path / "rows.csv")])
            return [row["id"] for row in self.read(frame, path=tmp_path / "rows").take_all()]

        assert rows_of_file(1) == [1]
        assert rows_of_file(2) == [2]

    def test_rows_are_written_to_a_bucket(self, frame: Any) -> None:
        with run_s3_server() as server:
            address = server.removeprefix("http://")
            options = f"endpoint_override={address}&scheme=http"
            files = pa.fs.S3FileSystem(endpoint_override=address, scheme="http")
            dataset = self.read(
                frame, path=f"s3://bucket/rows?{options}", write_options={"filesystem": files}
            )
            assert values_of(rows_of(source_of(dataset)))["id"] == list(range(ROWS))

    def test_to_dask_reads_the_rows(self, tmp_path: Path) -> None:
        installed("dask.dataframe")
        frame = dataset_of_all_types().to_dask(path=str(tmp_path / "rows"))
        check_exported(frame.compute())


class TestSpark(EngineSuite):
    reader = staticmethod(spotfit.data.from_spark)

    @pytest.fixture
    def frame(self, spark: Any) -> Any:
        # Spark 4 has no null text of pandas: NaN would be a type of its own.
        rows = make_frame().astype(object).where(lambda frame: frame.notna(), None)
        schema = "id long, x double, text string, values array<long>"
        return spark.createDataFrame(rows.to_dict("records"), schema)

    def test_to_spark_reads_the_rows(self, spark: Any, tmp_path: Path) -> None:
        frame = dataset_of_all_types().to_spark(spark, path=str(tmp_path / "rows"))
        check_exported(frame.toPandas())


class TestDaft(EngineSuite):
    reader = staticmethod(spotfit.data.from_daft)

    @pytest.fixture
    def frame(self) -> Any:
        daft = installed("daft")
        return daft.from_arrow(pa.Table.from_pandas(make_frame(), preserve_index=False))

    def test_rows_of_several_files_keep_their_order(self, frame: Any, tmp_path: Path) -> None:
        daft = installed("daft")
        with daft.execution_config_ctx(parquet_target_filesize=2048):
            dataset = self.read(frame, path=tmp_path)
            assert [row["id"] for row in dataset.take_all()] == list(range(ROWS))
        assert len(files_below(tmp_path)) > 2

    def test_to_daft_reads_the_rows(self, tmp_path: Path) -> None:
        installed("daft")
        frame = dataset_of_all_types().to_daft(path=str(tmp_path / "rows"))
        check_exported(frame.to_pandas())


class TestRay(EngineSuite):
    reader = staticmethod(spotfit.data.from_ray)

    @pytest.fixture
    def frame(self, ray_cluster: Any) -> Any:
        frame = pa.Table.from_pandas(make_frame(), preserve_index=False)
        rows = ROWS // PARTITIONS + 1
        return ray_cluster.data.from_arrow(
            [frame.slice(first, rows) for first in range(0, ROWS, rows)]
        )

    def test_tensors_stay_tensors(self, ray_cluster: Any, tmp_path: Path) -> None:
        images = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
        dataset = self.read(ray_cluster.data.from_numpy(images), path=tmp_path)
        (batch,) = dataset.iter_batches(batch_size=4)
        assert batch["data"].dtype == np.float32
        assert np.array_equal(batch["data"], images)


class TestModin(EngineSuite):
    reader = staticmethod(spotfit.data.from_modin)

    @pytest.fixture
    def frame(self, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setitem(os.environ, "MODIN_ENGINE", "ray")
        return installed("modin.pandas").DataFrame(make_frame())

    def test_to_modin_reads_the_rows(self, ray_cluster: Any, tmp_path: Path) -> None:
        installed("modin.pandas")
        frame = dataset_of_all_types().to_modin(path=str(tmp_path / "rows"))
        check_exported(frame.modin.to_pandas())


# --- Training -------------------------------------------------------------------------------------


def read_all(_config: dict[str, Any]) -> None:
    batches = spotfit.get_dataset_shard("rows").iter_batches(batch_size=100, batch_format="pandas")
    frame = pd.concat(batches)
    spotfit.report({"rows": len(frame), "sum": int(frame["id"].sum())})


def test_workers_read_rows_that_fit_had_dask_write(cloud: LiveTestCloud) -> None:
    dataframe = installed("dask.dataframe")
    frame = dataframe.from_pandas(make_frame(), npartitions=PARTITIONS)
    trainer = cloud.trainer(
        read_all, workers=2, datasets={"rows": lambda: spotfit.data.from_dask(frame)}
    )
    trainer.dataset_config = spotfit.DataConfig(datasets_to_split=[])
    assert trainer.fit().metrics == {"rows": ROWS, "sum": sum(range(ROWS))}


# --- Rows for other libraries ---------------------------------------------------------------------


def dataset_of_all_types() -> Dataset:
    """Return rows of several files' types, with a tensor."""
    table = pa.Table.from_pandas(make_frame(), preserve_index=False)
    dataset = spotfit.data.from_arrow(table)
    return dataset.map_batches(lambda batch: {**batch, "tensor": batch["id"][:, None] + [1, 2, 3]})


def check_exported(frame: pd.DataFrame) -> None:
    frame = frame.sort_values("id").reset_index(drop=True)
    expected = make_frame()
    for name in ("id", "x"):
        assert frame[name].tolist() == expected[name].tolist()
    assert [None if text is None or pd.isna(text) else text for text in frame["text"]] == [
        *expected["text"]
    ]
    assert [list(values) for values in frame["values"]] == expected["values"].tolist()
    assert [list(values) for values in frame["tensor"]] == [
        [n + 1, n + 2, n + 3] for n in range(ROWS)
    ]
