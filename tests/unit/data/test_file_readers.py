"""`read_*`: what their arguments have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import spotfit.data
from spotfit.core.errors import ConfigError

READERS = [
    *("read_binary_files", "read_csv", "read_images", "read_json", "read_numpy", "read_parquet"),
    *("read_text", "read_tfrecords", "read_webdataset"),
]


@pytest.mark.parametrize("name", READERS)
def test_nothing_is_read_before_it_is_needed(tmp_path: Path, name: str) -> None:
    dataset = getattr(spotfit.data, name)(tmp_path / "missing", parallelism=4)
    with pytest.raises(ConfigError, match="missing is neither a file nor a folder"):
        _ = dataset.manifest


@pytest.mark.parametrize("name", READERS)
def test_an_unknown_argument_is_refused_before_anything_is_read(name: str) -> None:
    options: Any = {"filesistem": None}
    with pytest.raises(ConfigError, match=rf"{name}\(\) has no argument 'filesistem'"):
        getattr(spotfit.data, name)("missing", **options)


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("read_parquet", {"filter": 1}, r"filter\(expr=…\)"),
        ("read_parquet", {"include_row_hash": True}, "map_batches"),
        ("read_parquet", {"skip_paths": ["a"]}, "partition_filter"),
        ("read_parquet", {"dataset_kwargs": {"a": 1}}, "other arguments"),
        ("read_webdataset", {"fileselect": ["a"]}, "suffixes"),
        ("read_binary_files", {"arrow_open_stream_args": {"compression": "gzip"}}, "map"),
    ],
)
def test_refused_arguments_name_the_alternative(
    name: str, options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        getattr(spotfit.data, name)("missing", **options)


def test_refused_arguments_may_have_their_default_values(tmp_path: Path) -> None:
    spotfit.data.read_parquet(
        tmp_path, filter=None, include_row_hash=False, catalog=None, use_threads=True
    )
