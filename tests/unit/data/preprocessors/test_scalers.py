"""Scalers against scikit-learn, and their edges."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from sklearn import preprocessing

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from spotfit.data.preprocessors.preprocessor_base import Preprocessor
from tests.unit.data.preprocessors.rows import dataset, output, rows_of

SEED = 11
SCALERS = [StandardScaler, MinMaxScaler, MaxAbsScaler, RobustScaler]


def random_columns() -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    with_missing = [v if v > -0.5 else None for v in rng.normal(3, 2, 200)]
    return {"x": pa.array(with_missing), "n": pa.array(rng.integers(-50, 900, 200))}


@pytest.mark.parametrize(
    ("scaler", "reference"),
    [
        (StandardScaler, "StandardScaler"),
        (MinMaxScaler, "MinMaxScaler"),
        (MaxAbsScaler, "MaxAbsScaler"),
    ],
)
def test_outputs_are_those_of_scikit_learn(scaler: Any, reference: str) -> None:
    columns = random_columns()
    ds = dataset(columns, 13, 0, 90)
    result = rows_of(scaler(["x", "n"]).fit_transform(ds))
    arrays = [np.array(columns[name].to_pylist(), dtype=float)[:, None] for name in ("x", "n")]
    for name, array in zip(("x", "n"), arrays, strict=True):
        expected = getattr(preprocessing, reference)().fit_transform(array)[:, 0]
        found = np.array(result[name].to_pylist(), dtype=float)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12, err_msg=f"seed {SEED}")


def test_robust_scaler_divides_by_the_distance_of_the_quantiles() -> None:
    values = list(range(101))
    scaler = RobustScaler(["x"], quantile_range=(0.1, 0.9)).fit(dataset({"x": values}, 40))
    assert scaler.stats_ == {"low_quantile(x)": 10, "median(x)": 50, "high_quantile(x)": 90}
    assert output(scaler, {"x": [50, 90, None]}, "x") == [0.0, 0.5, None]


def test_robust_scaler_gives_zeros_for_quantiles_that_are_equal() -> None:
    scaler = RobustScaler(["x"]).fit(dataset({"x": [1.0] * 5}))
    assert output(scaler, {"x": [1.0, math.inf, None]}, "x") == [0.0, 0.0, None]


@pytest.mark.parametrize(
    ("scaler", "expected"),
    [
        (StandardScaler, [0.0, 0.5, None]),
        (MinMaxScaler, [0.0, 0.5, None]),
        (MaxAbsScaler, [1.0, 1.125, None]),
    ],
)
def test_a_constant_column_is_not_amplified(scaler: Any, expected: list[Any]) -> None:
    fitted = scaler(["x"]).fit(dataset({"x": [4.0, 4.0]}))
    assert output(fitted, {"x": [4.0, 4.5, None]}, "x") == expected


def test_a_largest_value_of_zero_counts_as_one() -> None:
    scaler = MaxAbsScaler(["x"]).fit(dataset({"x": [0, 0]}))
    assert output(scaler, {"x": [0, 2]}, "x") == [0.0, 2.0]


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_column_without_values_stays_missing(scaler: Any) -> None:
    fitted = scaler(["x"]).fit(dataset({"x": pa.nulls(3, pa.int64())}))
    assert set(fitted.stats_.values()) == {None}
    result = rows_of(fitted.transform(dataset({"x": [1, 2]})))
    assert result.schema.field("x").type == pa.float64()
    assert result["x"].to_pylist() == [None, None]


@pytest.mark.parametrize("scaler", SCALERS)
def test_a_dataset_without_rows_can_be_fitted(scaler: Any) -> None:
    fitted = scaler(["x"]).fit(dataset({"x": pa.array([], pa.float64())}))
    assert fitted.fit_status() is Preprocessor.FitStatus.FITTED


@pytest.mark.parametrize("scaler", SCALERS)
@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1, 1, 0], pa.int8()),
        pa.array([0, 1, 1, 0], pa.uint64()),
        pa.array(np.array([0, 1, 1, 0], np.float16)),
        pa.array([0, 1, 1, 0], pa.float32()),
        pa.array([Decimal(0), Decimal(1), Decimal(1), Decimal(0)], pa.decimal128(9, 2)),
        pa.array([False, True, True, False]),
    ],
    ids=lambda column: str(column.type),
)
def test_all_kinds_of_numbers_become_64_bit_floats(scaler: Any, column: pa.Array) -> None:
    result = rows_of(scaler(["x"]).fit_transform(dataset({"x": column}, 1)))
    assert result.schema.field("x").type == pa.float64()
    expected = rows_of(scaler(["x"]).fit_transform(dataset({"x": [0.0, 1.0, 1.0, 0.0]}, 1)))
    assert result["x"].to_pylist() == expected["x"].to_pylist()


def test_nan_is_missing_in_statistics_and_stays_nan() -> None:
    scaler = MinMaxScaler(["x"]).fit(dataset({"x": [1.0, math.nan, 3.0]}))
    assert scaler.stats_ == {"min(x)": 1.0, "max(x)": 3.0}
    assert math.isnan(output(scaler, {"x": [math.nan]}, "x")[0])


@pytest.mark.parametrize("scaler", SCALERS)
def test_texts_are_rejected(scaler: Any) -> None:
    with pytest.raises(ConfigError, match="'s' has the type string"):
        scaler(["s"]).fit(dataset({"s": ["a"]}))


@pytest.mark.parametrize(
    "arguments",
    [{"quantile_range": (0.9, 0.1)}, {"quantile_range": (-1, 0.5)}, {"quantile_precision": 0}],
)
def test_invalid_quantiles_are_rejected(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="quantile_"):
        RobustScaler(["x"], **arguments)
