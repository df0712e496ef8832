"""Columns in the paths of files."""

from __future__ import annotations

from typing import Any

import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.sources.partitioning import Partitioning, PathPartitionFilter


def values(partitioning: Partitioning, path: str) -> dict[str, Any]:
    return {name: value.as_py() for name, value in partitioning.to_columns(path).items()}


def test_hive_folders_are_columns_of_text() -> None:
    found = values(Partitioning(), "bucket/year=2024/x/name=a%20b=c/part=1.parquet")
    assert found == {"year": "2024", "name": "a b=c"}


def test_types_of_fields_are_used() -> None:
    types = {"a": int, "b": float, "c": bool, "d": bool, "e": str}
    found = values(Partitioning(field_types=types), "a=1/b=2.5/c=true/d=False/e=3/file")
    assert found == {"a": 1, "b": 2.5, "c": True, "d": False, "e": "3"}


def test_a_value_of_another_type_is_reported() -> None:
    with pytest.raises(ConfigError, match="year=x of year=x/file is not of the type int"):
        values(Partitioning(field_types={"year": int}), "year=x/file")


def test_folders_below_the_base_are_the_values_of_names() -> None:
    folders = Partitioning("dir", base_dir="s3://bucket/data/", field_names=["country", "city"])
    assert values(folders, "bucket/data/de/berlin/file") == {"country": "de", "city": "berlin"}
    with pytest.raises(ConfigError, match=r"1 folders below .* 2 names"):
        values(folders, "bucket/data/de/file")


@pytest.mark.parametrize(
    "options", [{"style": "flat"}, {"style": "dir"}, {"field_types": {"a": list}}]
)
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Partitioning"):
        Partitioning(**options)


def test_a_filter_keeps_paths_by_their_values() -> None:
    kept = PathPartitionFilter.of(lambda row: row["year"] > "2023")
    assert kept(["year=2023/a", "year=2024/b"]) == ["year=2024/b"]


def test_the_name_of_missing_values_is_null() -> None:
    found = values(Partitioning(field_types={"a": int}), "a=__HIVE_DEFAULT_PARTITION__/file")
    assert found == {"a": None}
