"""Tensor columns in Parquet files."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_parquet
from spotfit.data.formats.tensor_storage import encode_tensors
from tests.unit.data.sources.source_suite import rows_of, source_of

TENSORS = np.arange(2 * 3 * 4, dtype=np.float32).reshape(4, 2, 3)


def test_arrow_tensors_are_read_as_tensors(tmp_path: Path) -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS)
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    assert_tensors(rows_of(source_of(read_parquet(tmp_path))), TENSORS)


def test_tensors_stored_as_bytes_are_read_as_tensors(tmp_path: Path) -> None:
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS)
    stored = encode_tensors(pa.table({"x": column}))
    assert stored.schema.field("x").type == pa.binary(24)
    pq.write_table(stored, tmp_path / "a.parquet")
    assert_tensors(rows_of(source_of(read_parquet(tmp_path))), TENSORS)


def test_encoding_keeps_the_rows_of_slices_and_null_values() -> None:
    kind = pa.fixed_shape_tensor(pa.int16(), [2])
    storage = pa.array([[1, 2], None, [5, 6], [7, 8]], pa.list_(pa.int16(), 2))
    column = pa.ExtensionArray.from_storage(kind, storage).slice(1, 2)
    stored = encode_tensors(pa.table({"x": column}))["x"]
    assert stored.to_pylist() == [None, np.array([5, 6], np.int16).tobytes()]


def test_tensors_written_by_ray_are_read_as_tensors(tmp_path: Path) -> None:
    for name, kind in (("arrow_tensor", pa.list_), ("arrow_tensor_v2", pa.large_list)):
        metadata = ray_metadata(name, [2, 3])
        rows = [row.ravel().tolist() for row in TENSORS]
        column = pa.array(rows, kind(pa.float32()))
        write_with_metadata(column, metadata, tmp_path / f"{name}.parquet")
        assert_tensors(rows_of(source_of(read_parquet(tmp_path / f"{name}.parquet"))), TENSORS)


class RegisteredTensor(pa.ExtensionType):  # type: ignore[misc]
    """The type that Ray registers with Arrow in processes that import it."""

    def __init__(self) -> None:
        super().__init__(pa.list_(pa.float32()), "ray.data.arrow_tensor_v2")

    def __arrow_ext_serialize__(self) -> bytes:
        return b"[2, 3]"

    @classmethod
    def __arrow_ext_deserialize__(cls, _storage: pa.DataType, _body: bytes) -> RegisteredTensor:
        return cls()


@pytest.fixture
def _registered() -> Iterator[None]:
    pa.register_extension_type(RegisteredTensor())
    yield
    pa.unregister_extension_type("ray.data.arrow_tensor_v2")


@pytest.mark.usefixtures("_registered")
def test_tensors_of_ray_are_the_same_where_ray_was_imported(tmp_path: Path) -> None:
    column = pa.array([row.ravel().tolist() for row in TENSORS], pa.list_(pa.float32()))
    write_with_metadata(column, ray_metadata("arrow_tensor_v2", [2, 3]), tmp_path / "a.parquet")
    assert isinstance(pq.read_table(tmp_path / "a.parquet")["x"].type, RegisteredTensor)
    assert_tensors(rows_of(source_of(read_parquet(tmp_path))), TENSORS)


def test_ray_tensors_of_different_shapes_are_read_as_lists(tmp_path: Path) -> None:
    kind = pa.struct([("data", pa.list_(pa.uint8())), ("shape", pa.list_(pa.int64()))])
    rows = [{"data": [1, 2, 3, 4], "shape": [2, 2]}, {"data": [5, 6], "shape": [1, 2]}, None]
    metadata = ray_metadata("arrow_variable_shaped_tensor", 2)
    write_with_metadata(pa.array(rows, kind), metadata, tmp_path / "a.parquet")
    found = rows_of(source_of(read_parquet(tmp_path)))
    assert found["x"].to_pylist() == [[[1, 2], [3, 4]], [[5, 6]], None]
    first, *_ = read_parquet(tmp_path).take_all()
    assert first["x"].tolist() == [[1, 2], [3, 4]]


def test_a_shape_that_ray_pickled_is_read(tmp_path: Path) -> None:
    metadata = ray_metadata("arrow_tensor", [])
    metadata[b"ARROW:extension:metadata"] = pickle.dumps((2, 3))
    column = pa.array([row.ravel().tolist() for row in TENSORS], pa.list_(pa.float32()))
    write_with_metadata(column, metadata, tmp_path / "a.parquet")
    assert_tensors(rows_of(source_of(read_parquet(tmp_path))), TENSORS)


def test_a_pickled_shape_that_would_run_code_is_refused(tmp_path: Path) -> None:
    metadata = ray_metadata("arrow_tensor", [])
    metadata[b"ARROW:extension:metadata"] = pickle.dumps(print)
    write_with_metadata(pa.array([[1.0]]), metadata, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="shape of the tensor column 'x' cannot be read"):
        _ = read_parquet(tmp_path).manifest


def test_bytes_of_tensors_are_read_with_a_stated_type(tmp_path: Path) -> None:
    column = pa.array([row.tobytes() for row in TENSORS], pa.binary())
    pq.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    dataset = read_parquet(tmp_path, tensor_column_schema={"x": (np.float32, (2, 3))})
    assert_tensors(rows_of(source_of(dataset)), TENSORS)


def test_bytes_of_another_size_than_the_stated_tensors_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [b"12345"]}), tmp_path / "a.parquet")
    dataset = read_parquet(tmp_path, tensor_column_schema={"x": (np.float32, (2, 3))})
    with pytest.raises(ConfigError, match=r"'x' of .* does not have tensors"):
        dataset.manifest.read_part(0, 0, 1)


def ray_metadata(name: str, parameter: object) -> dict[bytes, bytes]:
    return {
        b"ARROW:extension:name": f"ray.data.{name}".encode(),
        b"ARROW:extension:metadata": json.dumps(parameter).encode(),
    }


def write_with_metadata(column: pa.Array, metadata: dict[bytes, bytes], path: Path) -> None:
    schema = pa.schema([pa.field("x", column.type, metadata=metadata)])
    pq.write_table(pa.table([column], schema=schema), path)


def assert_tensors(table: pa.Table, expected: Any) -> None:
    column = table["x"].combine_chunks()
    assert isinstance(column.type, pa.FixedShapeTensorType)
    assert column.to_numpy_ndarray().dtype == expected.dtype
    assert np.array_equal(column.to_numpy_ndarray(), expected)
