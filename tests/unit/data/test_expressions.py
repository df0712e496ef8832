"""Expressions over columns."""

from __future__ import annotations

import pickle
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from spotfit.core.errors import ConfigTypeError
from spotfit.data import expressions
from spotfit.data.expressions import Expr, col, evaluate_column, lit, udf

BLOCK = pa.table(
    {
        "x": [1, 2, 3, None],
        "y": [10.0, 20.0, 30.0, 40.0],
        "s": ["Ab", "cd ", None, "ef"],
        "t": pa.array([datetime(2024, month, 3) for month in (1, 2, 3, 4)]),  # noqa: DTZ001
        "l": [[1, 2], [3], [], [4, 5, 6]],
        "d": [{"k": 1}, {"k": 2}, {"k": 3}, {"k": 4}],
    }
)


def evaluate(expression: Expr) -> list[Any]:
    values: list[Any] = evaluate_column(expression)(BLOCK).to_pylist()
    return values


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (col("x") + 1, [2, 3, 4, None]),
        (1 - col("x"), [0, -1, -2, None]),
        (col("y") / col("x"), [10.0, 10.0, 10.0, None]),
        (col("y") // 7, [1.0, 2.0, 4.0, 5.0]),
        (col("y") % 7, [3.0, 6.0, 2.0, 5.0]),
        (-col("x"), [-1, -2, -3, None]),
        (2 * col("y"), [20.0, 40.0, 60.0, 80.0]),
        ((col("x") > 1) & (col("y") < 50), [False, True, True, None]),
        ((col("x") == 1) | (col("y") == 40.0), [True, False, False, True]),
        (~(col("x") >= 2), [True, False, False, None]),
        (col("x") != 2, [True, False, True, None]),
        (col("x").is_null(), [False, False, False, True]),
        (col("x").is_not_null(), [True, True, True, False]),
        (col("x").is_in([1, 3]), [True, False, True, False]),
        (col("x").not_in([1, 3]), [False, True, False, True]),
        (col("x").cast("float32"), [1.0, 2.0, 3.0, None]),
        (col("x").cast(pa.string()), ["1", "2", "3", None]),
        (lit(5), [5, 5, 5, 5]),
        (col("y").power(2), [100.0, 400.0, 900.0, 1600.0]),
        (col("s").str.upper(), ["AB", "CD ", None, "EF"]),
        (col("s").str.strip(), ["Ab", "cd", None, "ef"]),
        (col("s").str.contains("c"), [False, True, None, False]),
        (col("s").str.replace(pattern="e", replacement="E"), ["Ab", "cd ", None, "Ef"]),
        (col("t").dt.month(), [1, 2, 3, 4]),
        (col("l").list.len(), [2, 1, 0, 3]),
        (col("d").struct["k"], [1, 2, 3, 4]),
        (col("x").alias("z") + 0, [1, 2, 3, None]),
    ],
)
def test_an_expression_has_the_values_of_arrow(expression: Expr, expected: list[Any]) -> None:
    assert evaluate(expression) == expected


def test_a_udf_gets_arrays_of_its_columns() -> None:
    @udf(return_dtype=pa.float64())
    def total(x: pa.Array, y: pa.Array) -> pa.Array:
        assert isinstance(x, pa.Array)
        return pc.add(x, y)

    expression = total(col("x"), col("y"))
    assert evaluate(expression) == [11.0, 22.0, 33.0, None]
    assert expression.runs_user_code
    assert expression.columns() == {"x", "y"}


def test_columns_are_those_of_all_arguments() -> None:
    expression = ((col("x") + col("y")) > 3) & col("s").str.contains("a")
    assert expression.columns() == {"x", "y", "s"}
    assert not expression.runs_user_code


def test_the_name_is_that_of_the_alias_or_column() -> None:
    assert col("x").name == "x"
    assert (col("x") + 1).alias("y").name == "y"
    assert (col("x") + 1).name is None


def test_expressions_have_no_truth_value() -> None:
    with pytest.raises(ConfigTypeError, match="no truth value"):
        bool((col("x") > 1) and (col("y") > 1))


def test_distinct_expressions_have_distinct_identities() -> None:
    expressions = [
        col("x") + 1,
        col("x") + 2,
        col("x") - 1,
        col("y") + 1,
        col("x").is_in([1]),
        col("x").is_in([2]),
        col("x").cast("int32"),
        col("x").cast("int64"),
    ]
    assert len({expression.identity for expression in expressions}) == len(expressions)


def test_an_expression_can_be_pickled() -> None:
    expression = (col("x").is_in([1, 2]) & (col("y") > 5)) | col("s").str.starts_with("e")
    copy = pickle.loads(pickle.dumps(expression))
    assert copy.identity == expression.identity
    assert evaluate(copy) == evaluate(expression) == [True, True, None, True]


def test_an_unknown_function_suggests_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'upper'"):
        col("s").str.uper()
    with pytest.raises(AttributeError):
        col("s").no_such_method()


@pytest.mark.parametrize("name", ["download", "star", "uuid", "monotonically_increasing_id"])
def test_a_missing_expression_of_ray_names_another_way(name: str) -> None:
    assert not hasattr(expressions, name)
    with pytest.raises(ImportError, match=f"has no {name}") as caught:
        exec(f"from spotfit.data.expressions import {name}")  # noqa: S102 - the import is tested
    assert caught.value.do  # type: ignore[attr-defined]


def test_an_unknown_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = expressions.no_such_name


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.date32(), "2020-01-03"),
        (pa.timestamp("us"), "2020-01-03T12:00:00"),
        (pa.timestamp("us", "Europe/Berlin"), "2020-01-03"),
        (pa.timestamp("us", "Europe/Berlin"), "2020-01-02T23:00:00Z"),
    ],
)
def test_texts_are_compared_with_dates_and_times(kind: pa.DataType, text: str) -> None:
    start = pa.array([f"2020-01-0{day}" for day in (2, 3, 4)])
    is_zoned = pa.types.is_timestamp(kind) and kind.tz
    column = start.cast(pa.timestamp("us") if is_zoned else kind)
    block = pa.table({"t": pc.assume_timezone(column, kind.tz) if is_zoned else column})
    assert evaluate_column(col("t") > text)(block).to_pylist() == [False, False, True]
    assert evaluate_column(lit("2020-01-04") == col("t"))(block).to_pylist() == [False, False, True]
    found = evaluate_column(col("t").is_in(["2020-01-02"]))(block)
    assert found.to_pylist() == [True, False, False]


def test_unsigned_integers_are_compared_with_all_their_values() -> None:
    block = pa.table({"u": pa.array([1, 2**64 - 1], pa.uint64())})
    assert evaluate_column(col("u") == 1)(block).to_pylist() == [True, False]
    assert evaluate_column(col("u") == 2**64 - 1)(block).to_pylist() == [False, True]
