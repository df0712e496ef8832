"""Batches of a preprocessor: the columns that it needs, and those that it returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigTypeError
from spotfit.data.preprocessors.batch_kinds import BatchFormat, block_of, format_of, with_result

ARRAYS: dict[str, Any] = {
    "i": np.array([1, 2], np.int16),
    "o": np.array([object(), object()]),
    "t": np.arange(12, dtype=np.uint8).reshape(2, 3, 2),
}


def test_only_the_needed_columns_are_converted() -> None:
    block = block_of(ARRAYS, ["t", "i", "other"])
    assert block.column_names == ["i", "t"]
    assert block.schema.field("i").type == pa.int16()
    assert block.schema.field("t").type == pa.fixed_shape_tensor(pa.uint8(), (3, 2))


def test_only_the_needed_columns_of_a_frame_are_converted() -> None:
    frame = pd.DataFrame({"x": [1.5, None], "o": ARRAYS["o"]})
    assert block_of(frame, ["x"]) == pa.table({"x": [1.5, None]})


def test_results_replace_add_and_remove_columns() -> None:
    result = pa.table({"i": pa.array([5, None]), "new": pa.array([["a"], None])})
    found = with_result(ARRAYS, result, ["i", "new"], ["i", "t"])
    assert list(found) == ["i", "o", "new"]
    assert found["o"] is ARRAYS["o"]
    np.testing.assert_array_equal(found["i"], [5, np.nan])
    assert (found["new"][0].tolist(), found["new"][1]) == (["a"], None)


def test_results_keep_the_index_of_a_frame() -> None:
    frame = pd.DataFrame({"x": [1, 2]}, index=[7, 9])
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(4).reshape(2, 2))
    found = with_result(frame, pa.table({"t": tensors, "y": [3, 4]}), ["t", "y"], ["x"])
    assert found["y"].to_dict() == {7: 3, 9: 4}
    assert found["t"][9].tolist() == [2, 3]
    assert list(found.columns) == ["t", "y"]


def test_tables_are_returned_as_they_are() -> None:
    table = pa.table({"x": [1]})
    assert format_of(table) is BatchFormat.ARROW
    assert block_of(table, ["x"]) is table
    assert with_result(pa.table({"z": [1]}), table, ["x"], ["z"]) is table


@pytest.mark.parametrize("batch", [[1], "x", None, np.zeros(3)])
def test_other_batches_are_rejected(batch: Any) -> None:
    with pytest.raises(ConfigTypeError, match="A batch must be"):
        format_of(batch)
