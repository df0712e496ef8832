"""Compressed files."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.sources.compression import decompress
from tests.unit.data.sources.source_suite import open_file


@pytest.mark.parametrize("extension", ["gz", "bz2", "zst", "lz4", "br", "GZ"])
def test_the_extension_names_the_compression(tmp_path: Path, extension: str) -> None:
    kinds = {"zst": "zstd", "br": "brotli", "lz4": "lz4", "bz2": "bz2"}
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kinds.get(extension, "gzip")) as stream:
        stream.write(b"content")
    (tmp_path / f"a.{extension}").write_bytes(sink.getvalue())
    assert decompress(open_file(tmp_path / f"a.{extension}"), None) == b"content"


def test_the_stated_compression_takes_precedence(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(bz2.compress(b"content"))
    assert decompress(open_file(tmp_path / "a.gz"), "bz2") == b"content"


def test_other_files_are_not_decompressed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(gzip.compress(b"content"))
    assert decompress(open_file(tmp_path / "a.csv"), None) is None


@pytest.mark.parametrize("stated", [None, "no compression"])
def test_a_file_that_cannot_be_decompressed_is_reported(tmp_path: Path, stated: str) -> None:
    (tmp_path / "a.gz").write_bytes(b"content")
    with pytest.raises(ConfigError, match=r"a\.gz cannot be decompressed"):
        decompress(open_file(tmp_path / "a.gz"), stated)
