"""TFRecord files."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.file_readers import read_tfrecords
from spotfit.data.source import Source
from spotfit.data.sources import tfrecords
from tests.unit.data.formats.test_crc32c import crc_by_bits
from tests.unit.data.sources.source_suite import FetchedSourceSuite, read_values, source_of
from tests.unit.data.tf_example_messages import encode_example


def encode_records(messages: Iterable[bytes]) -> bytes:
    body = b""
    for message in messages:
        length = struct.pack("<Q", len(message))
        body += length + masked_crc(length) + message + masked_crc(message)
    return body


def masked_crc(content: bytes) -> bytes:
    crc = crc_by_bits(content)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def encode(rows: Iterable[dict[str, list[Any]]]) -> bytes:
    return encode_records(encode_example(row) for row in rows)


ROWS: list[dict[str, list[Any]]] = [
    {"id": [n], "name": [f"row {n}".encode()], "values": [n / 2] * (n % 3), "tags": [b"x"] * n}
    for n in range(30)
]


class TestTfRecords(FetchedSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(tfrecords, "UNIT_BYTES", 500)
        (tmp_path / "a.tfrecords").write_bytes(encode(ROWS[:10]))
        (tmp_path / "b.tfrecord").write_bytes(encode(ROWS[10:]))
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_tfrecords(folder))

    @pytest.fixture
    def expected(self) -> pa.Table:
        values = [row["values"] or None for row in ROWS]
        return pa.table(
            {
                "id": [row["id"][0] for row in ROWS],
                "name": [row["name"][0] for row in ROWS],
                "tags": [row["tags"] or None for row in ROWS],
                "values": values,
            }
        )


def test_a_compressed_file_is_one_unit(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecords.gz").write_bytes(gzip.compress(encode(ROWS)))
    dataset = read_tfrecords(tmp_path)
    assert dataset.manifest.unit_rows.tolist() == [30]
    assert read_values(dataset)["id"] == list(range(30))


def test_a_record_with_another_number_of_values_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tfrecords, "SAMPLE_RECORDS", 2)
    (tmp_path / "a.tfrecords").write_bytes(encode([{"a": [1]}, {"a": [2]}, {"a": [3, 4]}]))
    with pytest.raises(ConfigError, match=r"feature 'a' of .* has another number of values"):
        read_values(read_tfrecords(tmp_path))
    lists = pa.schema([("a", pa.list_(pa.int64()))])
    assert read_values(read_tfrecords(tmp_path, schema=lists)) == {"a": [[1], [2], [3, 4]]}


def test_a_feature_of_several_types_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecords").write_bytes(encode([{"a": [1]}, {"a": [0.5]}]))
    with pytest.raises(ConfigError, match=r"feature 'a' of .* has values of several types"):
        _ = read_tfrecords(tmp_path).manifest


@pytest.mark.parametrize("position", [3, 9, 20, -1, -30])
def test_a_damaged_file_is_reported_by_name(tmp_path: Path, position: int) -> None:
    body = bytearray(encode(ROWS))
    body[position] ^= 1
    (tmp_path / "a.tfrecords").write_bytes(body)
    with pytest.raises(ConfigError, match=r"a\.tfrecords is not a TFRecord file, or is damaged"):
        read_values(read_tfrecords(tmp_path))


def test_a_truncated_file_is_reported_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecords").write_bytes(encode(ROWS)[:-5])
    with pytest.raises(ConfigError, match=r"a\.tfrecords is not a TFRecord file"):
        _ = read_tfrecords(tmp_path).manifest


def test_records_of_another_message_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecords").write_bytes(encode_records([b"\x0f"]))
    with pytest.raises(ConfigError, match=r"not tf\.train\.Example messages"):
        _ = read_tfrecords(tmp_path).manifest


def test_a_schema_of_tensorflow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"read_tfrecords\(tf_schema=…\) is not supported"):
        read_tfrecords(tmp_path, tf_schema=object())


def test_empty_files_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.tfrecords").write_bytes(b"")
    (tmp_path / "b.tfrecords").write_bytes(encode(ROWS[:1]))
    assert read_values(read_tfrecords(tmp_path))["id"] == [0]
