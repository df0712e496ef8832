"""Arrow-backed columns of pandas."""

from typing import Any

import pytest

from spotfit.lightgbm import normalize_pandas_for_lightgbm

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


def test_arrow_numbers_become_nullable_types() -> None:
    types = {
        "i": ("int32[pyarrow]", "Int32"),
        "u": ("uint8[pyarrow]", "UInt8"),
        "f": ("float[pyarrow]", "Float32"),
        "d": ("double[pyarrow]", "Float64"),
        "b": ("bool[pyarrow]", "boolean"),
        "n": ("int64", "int64"),
        "c": ("category", "category"),
    }
    frame = pandas.DataFrame({name: [0, 1] for name in types}).astype(
        {name: before for name, (before, _) in types.items()}
    )
    converted = normalize_pandas_for_lightgbm(frame)
    assert {name: str(dtype) for name, dtype in converted.dtypes.items()} == {
        name: after for name, (_, after) in types.items()
    }
    assert str(frame["i"].dtype) == "int32[pyarrow]", "the argument is unchanged"


def test_arrow_text_is_unchanged() -> None:
    frame: Any = pandas.DataFrame({"s": ["a"]}).astype("string[pyarrow]")
    assert normalize_pandas_for_lightgbm(frame) is frame


def test_missing_values_are_kept() -> None:
    frame = pandas.DataFrame({"i": [1, None]}).astype("int64[pyarrow]")
    converted = normalize_pandas_for_lightgbm(frame)
    assert str(converted["i"].dtype) == "Int64"
    assert converted["i"].isna().tolist() == [False, True]
