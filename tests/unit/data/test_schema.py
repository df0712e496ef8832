"""Names and types of columns."""

from __future__ import annotations

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.schema import Schema, check_columns, fixed_width_bytes

SCHEMA = Schema(pa.schema([("id", pa.int64()), ("long_name", pa.list_(pa.float32()))]))


def test_a_schema_has_names_and_types() -> None:
    assert SCHEMA.names == ["id", "long_name"]
    assert SCHEMA.types == [pa.int64(), pa.list_(pa.float32())]


def test_equal_columns_are_equal_schemas() -> None:
    assert Schema(pa.schema(list(SCHEMA.base_schema))) == SCHEMA
    assert Schema(pa.schema([("id", pa.int32())])) != SCHEMA


def test_a_schema_is_printed_as_a_table() -> None:
    assert repr(SCHEMA).splitlines() == [
        "Column     Type",
        "------     ----",
        "id         int64",
        "long_name  list<item: float>",
    ]


def test_an_unknown_column_is_an_error_with_the_nearest_name() -> None:
    check_columns("sort()", ["id"], SCHEMA.names)
    with pytest.raises(ConfigError, match=r"sort\(\): there is no column 'ids'") as caught:
        check_columns("sort()", ["id", "ids"], SCHEMA.names)
    assert "'id'" in caught.value.do


@pytest.mark.parametrize(
    ("kind", "width_bytes"),
    [
        (pa.float32(), 4),
        (pa.bool_(), 1 / 8),
        (pa.decimal128(10), 16),
        (pa.binary(5), 5),
        (pa.list_(pa.int16(), 10), 20),
        (pa.fixed_shape_tensor(pa.int32(), (2, 3)), 24),
        (pa.struct({"a": pa.int8(), "b": pa.int64(), "c": pa.string()}), 9),
        (pa.string(), 0),
        (pa.list_(pa.int8()), 0),
        (pa.null(), 0),
    ],
)
def test_the_width_of_a_type_is_that_of_each_value(kind: pa.DataType, width_bytes: float) -> None:
    assert fixed_width_bytes(kind) == width_bytes
