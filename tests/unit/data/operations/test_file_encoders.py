"""The content of written files, read by other libraries."""

from __future__ import annotations

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.orc
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.operations.file_encoders import (
    csv_encoder,
    image_encoder,
    json_encoder,
    numpy_encoder,
    orc_encoder,
    parquet_encoder,
    rows_per_group,
)

TENSORS = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(3, 4))
ROWS = pa.table({"x": [1, 2, 3], "s": ["a", "b", None]})


def test_parquet_has_row_groups_of_the_stated_size() -> None:
    rows = pa.table({"x": np.arange(1000)})
    file = pq.ParquetFile(pa.BufferReader(parquet_encoder(800)(rows)))
    assert file.num_row_groups == 10
    assert file.read().equals(rows)


def test_parquet_takes_the_arguments_of_pyarrow() -> None:
    body = parquet_encoder(compression="gzip", row_group_size=2)(ROWS)
    file = pq.ParquetFile(pa.BufferReader(body))
    assert file.num_row_groups == 2
    assert file.metadata.row_group(0).column(0).compression == "GZIP"


def test_a_row_group_has_at_least_one_row() -> None:
    assert rows_per_group(ROWS, 1) == 1
    assert rows_per_group(ROWS, 10**9) == 3


def test_csv_is_that_of_pyarrow() -> None:
    body = csv_encoder()(ROWS.drop_columns(["s"]))
    assert pyarrow.csv.read_csv(io.BytesIO(body))["x"].to_pylist() == [1, 2, 3]


def test_csv_refuses_tensors() -> None:
    with pytest.raises(ConfigError, match="cannot be written as CSV"):
        csv_encoder()(pa.table({"t": TENSORS}))


def test_json_has_an_object_per_line() -> None:
    body = json_encoder(lines=True)(ROWS.append_column("t", TENSORS))
    rows = [json.loads(line) for line in body.splitlines()]
    assert rows[2] == {"x": 3, "s": None, "t": [8.0, 9.0, 10.0, 11.0]}


def test_json_refuses_bytes_and_other_layouts() -> None:
    with pytest.raises(ConfigError, match="bytes"):
        json_encoder()(pa.table({"b": [b"x"]}))
    with pytest.raises(ConfigError, match="orient"):
        json_encoder(orient="columns")
    with pytest.raises(ConfigError, match="indent"):
        json_encoder(indent=2)


def test_orc_is_that_of_pyarrow() -> None:
    body = orc_encoder()(ROWS)
    assert pyarrow.orc.read_table(pa.BufferReader(body)).equals(ROWS)


def test_npy_has_the_values_of_a_column() -> None:
    body = numpy_encoder("t")(pa.table({"t": TENSORS}))
    assert np.load(io.BytesIO(body)).tolist() == np.arange(12).reshape(3, 4).tolist()


def test_npy_refuses_values_without_a_common_shape() -> None:
    with pytest.raises(ConfigError, match="no common shape"):
        numpy_encoder("l")(pa.table({"l": [[1], [2, 3]]}))
    with pytest.raises(ConfigError, match="no column 'y'"):
        numpy_encoder("y")(ROWS)


def test_images_have_the_values_of_a_column() -> None:
    image_module = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    body = image_encoder("image", "png")({"image": pixels})
    assert np.asarray(image_module.open(io.BytesIO(body))).tolist() == pixels.tolist()
    assert image_encoder("image", "jpg")({"image": pixels})[:2] == b"\xff\xd8"
