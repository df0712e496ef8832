"""JSON lines and documents."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_json
from spotfit.data.source import Source
from spotfit.data.sources import line_files
from tests.unit.data.sources.source_suite import FetchedSourceSuite, read_values, source_of


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "UNIT_BYTES", 200)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


class TestJsonLines(FetchedSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        rows = [{"id": n, "tags": ["a"] * (n % 3), "of": {"deep": n / 2}} for n in range(60)]
        write_lines(tmp_path / "a.jsonl", rows[:40])
        write_lines(tmp_path / "b.json", rows[40:])
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_json(folder))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        return pa.concat_tables(
            pyarrow.json.read_json(path) for path in (folder / "a.jsonl", folder / "b.json")
        )


def test_fields_that_appear_late_are_columns_of_all_rows(tmp_path: Path) -> None:
    rows = [{"a": n, "of": {"x": n}} for n in range(30)] + [{"a": 0.5, "of": {"y": "z"}, "b": 1}]
    write_lines(tmp_path / "a.jsonl", rows)
    dataset = read_json(tmp_path)
    assert len(dataset.manifest.unit_rows) > 2
    values = read_values(dataset)
    assert values["a"][-2:] == [29.0, 0.5]
    assert values["b"][-2:] == [None, 1]
    assert values["of"][-2:] == [{"x": 29, "y": None}, {"x": None, "y": "z"}]


def test_text_that_looks_like_times_in_some_rows_stays_text(tmp_path: Path) -> None:
    rows = [{"when": "2026-01-01"}] * 20 + [{"when": "never"}] * 20
    write_lines(tmp_path / "a.jsonl", rows)
    assert read_values(read_json(tmp_path))["when"] == [row["when"] for row in rows]


def test_a_list_of_objects_is_read_as_rows(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": 2, "b": {"c": ["d"]}}]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "b.json").write_text(json.dumps({"a": 3}, indent=2))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps([{"a": 4.5}]).encode()))
    dataset = read_json(tmp_path)
    assert read_values(dataset)["a"] == [1.0, 2.0, 3.0, 4.5]
    assert read_values(dataset)["b"] == [None, {"c": ["d"]}, None, None]


def test_documents_are_refused_if_lines_are_stated(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"a": 1}], indent=2))
    with pytest.raises(ConfigError, match=r"a\.json cannot be parsed"):
        _ = read_json(tmp_path, lines=True).manifest


@pytest.mark.parametrize("text", ["[1, 2]", "{'a': 1}", "3"])
def test_a_file_without_objects_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.json cannot be parsed"):
        _ = read_json(tmp_path).manifest


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("")
    write_lines(tmp_path / "b.json", [{"a": 1}])
    assert read_values(read_json(tmp_path)) == {"a": [1]}
