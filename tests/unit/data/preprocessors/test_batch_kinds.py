"""Batches between Arrow, NumPy and pandas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigTypeError
from spotfit.data.preprocessors.batch_kinds import block_of, data_frame, numpy_columns

ARRAYS: dict[str, Any] = {
    "i": np.array([1, 2], np.int16),
    "f": np.array([0.5, 2.5], np.float32),
    "b": np.array([True, False]),
    "s": np.array(["a", "b"]),
    "t": np.arange(12, dtype=np.uint8).reshape(2, 3, 2),
}


def test_arrays_come_back_with_their_type_and_shape() -> None:
    found = numpy_columns(block_of(ARRAYS))
    for name, array in ARRAYS.items():
        assert found[name].shape == array.shape
        assert name == "s" or found[name].dtype == array.dtype
        assert found[name].tolist() == array.tolist()


def test_missing_tensors_are_none() -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4).reshape(2, 2))
    storage = pa.array([[0, 1], None], pa.list_(pa.int64(), 2))
    column = pa.ExtensionArray.from_storage(tensors.type, storage)
    found = numpy_columns(pa.table({"t": column}))["t"]
    assert found[0].tolist() == [0, 1]
    assert found[1] is None


def test_categories_become_their_values() -> None:
    column = pa.array(["a", None, "b"]).dictionary_encode()
    assert numpy_columns(pa.table({"c": column}))["c"].tolist() == ["a", None, "b"]


def test_arrays_of_lists_become_lists() -> None:
    ragged = np.empty(2, dtype=object)
    ragged[:] = [[1], [2, 3]]
    assert block_of({"x": ragged})["x"].to_pylist() == [[1], [2, 3]]


def test_frames_have_an_array_for_each_tensor() -> None:
    pytest.importorskip("pandas")
    frame = data_frame(block_of(ARRAYS))
    assert frame["t"][1].tolist() == ARRAYS["t"][1].tolist()
    assert frame["i"].dtype == np.int16


@pytest.mark.parametrize("batch", [[1], "x", None, np.zeros(3)])
def test_other_batches_are_rejected(batch: Any) -> None:
    with pytest.raises(ConfigTypeError, match="A batch must be"):
        block_of(batch)
