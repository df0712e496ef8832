"""Arguments that all readers of files have."""

from __future__ import annotations

import logging
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spotfit.core.errors import ConfigError, ConfigTypeError
from spotfit.data.dataset import Dataset
from spotfit.data.file_readers import read_text
from spotfit.data.reader_options import FileShuffleConfig, SchedulingOptions, to_partitioning
from spotfit.data.sources.partitioning import Partitioning
from tests.unit.data.sources.source_suite import read_values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "k=1").mkdir()
    (tmp_path / "k=1" / "a.txt").write_text("a\n")
    return tmp_path


def read(folder: Path, **options: Any) -> Dataset:
    return read_text(folder, **options)


@pytest.mark.parametrize("name", sorted(SchedulingOptions.__annotations__))
def test_arguments_of_scheduling_are_logged(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "spotfit")
    assert read_values(read(folder, **{name: 1})) == {"text": ["a"]}
    (record,) = (one for one in caplog.records if one.message == "data.argument_ignored")
    assert (record.argument, record.function) == (name, "read_text")  # type: ignore[attr-defined]


def test_an_unknown_argument_is_refused_with_the_nearest_one(folder: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'include_paths'"):
        read(folder, include_path=True)


def test_paths_and_partitions_become_columns(folder: Path) -> None:
    dataset = read(folder, partitioning="hive", include_paths=True)
    path = str(folder / "k=1" / "a.txt")
    assert read_values(dataset) == {"text": ["a"], "k": ["1"], "path": [path]}
    assert read(folder).manifest.digest != dataset.manifest.digest


@pytest.mark.parametrize(
    ("shuffle", "kind", "seed"),
    [
        (None, "none", None),
        ("files", "units", None),
        (FileShuffleConfig(seed=7), "units", 7),
        (SimpleNamespace(seed=8), "units", 8),
    ],
)
def test_shuffle_permutes_units(folder: Path, shuffle: Any, kind: str, seed: int | None) -> None:
    settings = read(folder, shuffle=shuffle).shuffle_settings
    assert (settings.kind, settings.seed) == (kind, seed)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shuffle": "rows"}, ConfigError),
        ({"partitioning": "flat"}, ConfigError),
        ({"partitioning": 3}, ConfigTypeError),
    ],
)
def test_invalid_values_are_refused(
    folder: Path, options: dict[str, Any], error: type[ConfigError]
) -> None:
    with pytest.raises(error):
        read(folder, **options)


def test_a_partitioning_of_ray_is_taken() -> None:
    style = Enum("style", {"HIVE": "hive"})
    ray = SimpleNamespace(
        style=style.HIVE, base_dir="", field_names=None, field_types={"a": int}, filesystem=None
    )
    assert to_partitioning(ray) == Partitioning("hive", "", None, {"a": int})
