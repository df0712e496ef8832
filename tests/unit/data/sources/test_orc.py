"""ORC files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.orc
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_orc
from spotfit.data.source import Source
from tests.unit.data.sources.source_suite import FileSourceSuite, source_of


class TestOrc(FileSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path, seed: int) -> Path:
        noise = np.random.default_rng(seed).random(60_000)
        for name, part in (("a", slice(0, 40_000)), ("b", slice(40_000, 60_000))):
            numbers = np.arange(60_000)[part]
            table = pa.table(
                {"id": numbers, "noise": noise[part], "of": [[int(n)] for n in numbers]}
            )
            pyarrow.orc.write_table(table, tmp_path / f"{name}.orc", stripe_size=100_000)
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_orc(folder))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        return pa.concat_tables(pyarrow.orc.read_table(folder / f"{name}.orc") for name in "ab")


def test_the_size_of_a_unit_is_at_least_that_of_its_columns_of_fixed_width(tmp_path: Path) -> None:
    rows = pa.table({"zeros": np.zeros(10_000), "text": ["x"] * 10_000})
    pyarrow.orc.write_table(rows, tmp_path / "a.orc", compression="zstd")
    assert (tmp_path / "a.orc").stat().st_size < 10_000
    assert read_orc(tmp_path).manifest.unit_bytes.tolist() == [80_000]


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.orc").write_bytes(b"no footer" * 10)
    with pytest.raises(ConfigError, match=r"a\.orc is not an ORC file"):
        _ = read_orc(tmp_path).manifest
