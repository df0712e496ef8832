"""The preprocessors give what Ray 2.60 gives, except for the differences that are listed here."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.data import preprocessors
from tests.unit.data.preprocessors.ray_cases import CASES, FIRST_BLOCK_ROWS, TEST, TRAIN
from tests.unit.data.preprocessors.record_ray_outputs import OUTPUTS, plain
from tests.unit.data.preprocessors.rows import dataset, rows_of

RECORDED: dict[str, Any] = json.loads(Path(OUTPUTS).read_text())

OTHER_VALUES: dict[str, dict[str, Any]] = {
    # Ray writes the mean 2.83 into a column of integers, as 2.
    "SimpleImputer mean": {"ints_missing": [3, 2, 9, -8]},
    # Ray gives None for tokens that do not occur in a text.
    "CountVectorizer": {"texts": None},
    "CountVectorizer limited": {"counts": None},
    "CountVectorizer missing": {"texts_missing": None},
}
FAILS_IN_RAY = {"OrdinalEncoder whole lists", "OneHotEncoder lists"}


def test_every_case_is_recorded() -> None:
    assert list(RECORDED) == list(CASES)


@pytest.mark.parametrize("name", [n for n in CASES if "error" not in RECORDED[n]])
def test_statistics_are_those_of_ray(name: str) -> None:
    preprocessor, _ = run(name)
    recorded = sorted(RECORDED[name]["stats"], key=lambda pair: str(pair[0]))
    found = sorted(plain(preprocessor.stats_), key=lambda pair: str(pair[0]))
    assert same(found, recorded), f"{found}\n{recorded}"


@pytest.mark.parametrize("name", [n for n in CASES if "error" not in RECORDED[n]])
def test_transformed_rows_are_those_of_ray(name: str) -> None:
    _, table = run(name)
    for column, recorded in RECORDED[name]["columns"].items():
        found = plain(table[column].to_pylist())
        expected = column not in OTHER_VALUES.get(name, {})
        assert same(found, recorded) is expected, f"{column}: {found}\n{recorded}"


@pytest.mark.parametrize("name", [n for n in CASES if "error" not in RECORDED[n]])
def test_types_of_columns_are_those_of_ray(name: str) -> None:
    _, table = run(name)
    for column, recorded in RECORDED[name]["types"].items():
        found = str(table.schema.field(column).type)
        if column not in OTHER_VALUES.get(name, {}):
            assert comparable(found, table[column]) == comparable(recorded, table[column])


@pytest.mark.parametrize("name", [n for n in CASES if "error" in RECORDED[n]])
def test_what_fails_in_ray_is_an_error(name: str) -> None:
    if name in FAILS_IN_RAY:
        run(name)
    else:
        with pytest.raises(ConfigError):
            run(name)


def run(name: str) -> tuple[Any, Any]:
    preprocessor = CASES[name].create(preprocessors)
    preprocessor.fit(dataset(TRAIN, FIRST_BLOCK_ROWS))
    return preprocessor, rows_of(preprocessor.transform(dataset(TEST)))


def same(found: Any, recorded: Any) -> bool:
    """Compare values; null and NaN are both missing. Ray's quantiles are 32-bit floats."""
    if isinstance(found, list) and isinstance(recorded, list):
        return len(found) == len(recorded) and all(map(same, found, recorded))
    if is_missing(found) or is_missing(recorded):
        return is_missing(found) and is_missing(recorded)
    if isinstance(found, float) or isinstance(recorded, float):
        return math.isclose(found, recorded, rel_tol=1e-6, abs_tol=1e-12)
    return bool(found == recorded)


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def comparable(kind: str, column: Any) -> str:
    """Return a type without the differences that are meant.

    Ray has fixed-size lists, lists and tensors of its own for what are tensors here, and large
    strings; a column of integers with missing values becomes floats there, and stays here.
    """
    tensor = re.fullmatch(
        r"extension<arrow.fixed_shape_tensor\[value_type=(\w+), .*|fixed_size_list<item: (\w+)>.*"
        r"|ArrowTensorTypeV2\(shape=.*, dtype=(\w+)\)|list<item: (int64)>",
        kind,
    )
    if tensor:
        return "vector of " + next(part for part in tensor.groups() if part)
    if kind == "int64" and column.null_count:
        return "double"
    return kind.replace("large_string", "string")
