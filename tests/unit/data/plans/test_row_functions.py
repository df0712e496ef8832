"""Transforms that call functions of the user."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.formats.tensor_storage import ragged_tensor_field
from spotfit.data.plans.row_functions import (
    MapRows,
    add_column_transform,
    block_rows,
    map_batches_transform,
    rows_to_block,
)
from spotfit.data.plans.transforms import RowCountChangedError, bind_all
from spotfit.data.user_functions import user_function

BLOCK = pa.table({"a": [1, 2, 3], "b": ["x", "y", None]})


def apply_batches(
    function: Any, *, batch_format: Any = "default", batch_size: Any = None, **options: Any
) -> pa.Table:
    bound = user_function("map_batches", function, options)
    return map_batches_transform(bound, batch_format, batch_size).bind()(BLOCK)


def test_map_replaces_each_row() -> None:
    transform = MapRows(user_function("map", lambda row: {"c": row["a"] * 2}, {}))
    assert transform.bind()(BLOCK).to_pydict() == {"c": [2, 4, 6]}


def test_map_reports_a_function_that_returns_no_dictionary() -> None:
    transform = MapRows(user_function("map", lambda row: row["a"], {}))
    with pytest.raises(ConfigTypeError, match="returned int instead of a row"):
        transform.bind()(BLOCK)


def test_a_row_may_lack_a_column_of_others() -> None:
    assert rows_to_block([{"a": 1}, {"b": 2}]).to_pydict() == {"a": [1, None], "b": [None, 2]}


def test_rows_have_tensors_of_different_shapes_as_arrays() -> None:
    images = [[[[1, 2, 3]] * 4] * 2, [[[4, 5, 6]] * 2], None]
    field = ragged_tensor_field("image", pa.list_(pa.list_(pa.list_(pa.uint8(), 3))))
    column = pa.array(images, field.type)
    first, second, missing = block_rows(pa.table([column], schema=pa.schema([field])))
    assert (first["image"].shape, second["image"].shape) == ((2, 4, 3), (1, 2, 3))
    assert first["image"].dtype == np.uint8
    assert missing == {"image": None}
    assert block_rows(pa.table({"image": column}))[1] == {"image": images[1]}


def test_rows_have_tensors_as_writable_arrays() -> None:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8.0).reshape(2, 2, 2))
    rows = block_rows(pa.table({"t": tensors}))
    rows[0]["t"][0, 0] = 5.0
    assert rows[0]["t"].tolist() == [[5.0, 1.0], [2.0, 3.0]]


def test_tensors_of_rows_become_a_tensor_column() -> None:
    block = rows_to_block([{"t": np.full((2, 3), n, np.float32)} for n in range(4)])
    assert block.schema.field("t").type == pa.fixed_shape_tensor(pa.float32(), [2, 3])


def test_batches_have_the_stated_size() -> None:
    sizes: list[int] = []

    def record(batch: dict[str, Any]) -> dict[str, Any]:
        sizes.append(len(batch["a"]))
        return batch

    assert apply_batches(record, batch_size=2).num_rows == 3
    assert sizes == [2, 1]


@pytest.mark.parametrize("batch_size", [None, "auto", "default"])
def test_whole_blocks_are_passed_without_a_size(batch_size: Any) -> None:
    sizes: list[int] = []

    def record(batch: dict[str, Any]) -> dict[str, Any]:
        sizes.append(len(batch["a"]))
        return batch

    apply_batches(record, batch_size=batch_size)
    assert sizes == [3]


@pytest.mark.parametrize(
    ("batch_format", "kind"),
    [
        ("default", "dict"),
        ("numpy", "dict"),
        ("pandas", "DataFrame"),
        ("pyarrow", "Table"),
        (None, "Table"),
    ],
)
def test_batches_have_the_stated_format(batch_format: Any, kind: str) -> None:
    kinds: list[str] = []

    def record(batch: Any) -> Any:
        kinds.append(type(batch).__name__)
        return batch

    assert apply_batches(record, batch_format=batch_format).to_pydict() == BLOCK.to_pydict()
    assert kinds == [kind]


def test_arrays_may_be_changed_in_place_without_changing_the_block() -> None:
    def double(batch: dict[str, Any]) -> dict[str, Any]:
        batch["a"] *= 2
        return batch

    assert apply_batches(double)["a"].to_pylist() == [2, 4, 6]
    assert BLOCK["a"].to_pylist() == [1, 2, 3]


def test_a_dataframe_may_be_changed_in_place() -> None:
    def double(frame: Any) -> Any:
        frame["a"] *= 2
        frame.loc[0, "a"] = 7
        return frame

    assert apply_batches(double, batch_format="pandas")["a"].to_pylist() == [7, 4, 6]


def test_a_generator_may_return_several_batches_for_one() -> None:
    def halves(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"a": batch["a"][:1]}
        yield {"a": batch["a"][1:]}

    assert apply_batches(halves).to_pydict() == {"a": [1, 2, 3]}


def test_a_function_that_returns_nothing_is_reported() -> None:
    with pytest.raises(ConfigTypeError, match="returned None"):
        apply_batches(lambda _batch: None)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "big"])
def test_an_invalid_batch_size_is_refused(batch_size: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        apply_batches(lambda batch: batch, batch_size=batch_size)


def test_an_unknown_batch_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_format"):
        apply_batches(lambda batch: batch, batch_format="cudf")


@pytest.mark.parametrize(
    ("batch_format", "function"),
    [
        ("pandas", lambda frame: frame["a"] + 1),
        ("numpy", lambda batch: batch["a"] + 1),
        ("pyarrow", lambda table: pa.array([2, 3, 4])),
    ],
)
def test_add_column_appends_what_the_function_returns(batch_format: Any, function: Any) -> None:
    transform = add_column_transform(user_function("add_column", function, {}), "d", batch_format)
    assert transform.bind()(BLOCK)["d"].to_pylist() == [2, 3, 4]


def test_add_column_repeats_a_single_value() -> None:
    transform = add_column_transform(user_function("add_column", lambda _: 5, {}), "d", "pandas")
    assert transform.bind()(BLOCK)["d"].to_pylist() == [5, 5, 5]


def test_add_column_replaces_a_column_of_that_name() -> None:
    function = user_function("add_column", lambda batch: batch["a"] * 2, {})
    result = add_column_transform(function, "a", "numpy").bind()(BLOCK)
    assert result.to_pydict() == {"a": [2, 4, 6], "b": ["x", "y", None]}


def test_the_identity_depends_on_size_and_format_of_batches() -> None:
    function = user_function("map_batches", len, {})
    identities = {
        map_batches_transform(function, batch_format, batch_size).identity
        for batch_format in ("numpy", "pandas")
        for batch_size in (None, 8)
    }
    assert len(identities) == 4


def test_a_generator_that_yields_nothing_has_returned_no_rows() -> None:
    def skip(batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from ()

    transform = map_batches_transform(user_function("map_batches", skip, {}), "numpy", 2)
    with pytest.raises(RowCountChangedError, match="returned 0 rows for 3"):
        bind_all([transform])(BLOCK)
    assert bind_all([transform])(BLOCK.slice(0, 0)).num_rows == 0
