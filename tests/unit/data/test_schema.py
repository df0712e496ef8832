"""Names and types of columns."""

from __future__ import annotations

import pyarrow as pa

from spotfit.data.schema import Schema

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
