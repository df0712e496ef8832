"""Expressions as text."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.expressions import evaluate_column
from spotfit.data.operations.expression_parser import parse_expression

BLOCK = pa.table({"x": [1, 2, 3, None], "name": ["a", "b", "c", "d"], "flag": [True, False] * 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x > 1", [False, True, True, None]),
        ("1 < x <= 2", [False, True, False, None]),
        ("x + 1 == 3", [False, True, False, None]),
        ("x * 2 - 1 >= 5", [False, False, True, None]),
        ("name == 'b' or x == 3", [False, True, True, None]),
        ("not (name == 'b')", [True, False, True, True]),
        ("flag and name != 'a'", [False, False, True, False]),
        ("name in ['a', 'd']", [True, False, False, True]),
        ("x not in (1, 2)", [False, False, True, True]),
        ("x > -1", [True, True, True, None]),
        ("is_null(x)", [False, False, False, True]),
        ("is_valid(x) & (x < 3)", [True, True, False, False]),
    ],
)
def test_text_is_evaluated_as_in_python(text: str, expected: list[Any]) -> None:
    assert evaluate_column(parse_expression(text))(BLOCK).to_pylist() == expected


@pytest.mark.parametrize("text", ["x >", "x.upper() == 1", "x in name", "lambda: x", "x is None"])
def test_unsupported_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_expression(text)


def test_a_name_with_dots_is_a_column() -> None:
    assert parse_expression("a.b > 1").columns() == {"a.b"}
