"""WebDataset's tar files."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.file_readers import read_webdataset
from spotfit.data.source import Source
from spotfit.data.sources import webdataset
from tests.unit.data.sources.source_suite import (
    FetchedSourceSuite,
    read_values,
    rows_of,
    source_of,
    values_of,
)

LONG = "folder/" + "long" * 60  # needs a header of its own


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, body in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))


def decoded(dataset: Dataset) -> dict[str, list[Any]]:
    return values_of(rows_of(dataset.as_source()))


class TestWebDataset(FetchedSourceSuite):
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(webdataset, "UNIT_BYTES", 5000)
        for shard, keys in (("a", range(12)), ("b", range(12, 20))):
            members = {}
            for n in keys:
                members[f"{LONG}{n:02}.txt"] = f"text {n}".encode()
                members[f"{LONG}{n:02}.seg.bin"] = bytes(n * 100)
                if n % 2:
                    members[f"{LONG}{n:02}.odd"] = b""
            write_tar(tmp_path / f"{shard}.tar", members)
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        return source_of(read_webdataset(folder, decoder=None))

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        return pa.table(
            {
                "__key__": [f"{LONG}{n:02}" for n in range(20)],
                "txt": [f"text {n}".encode() for n in range(20)],
                "seg.bin": [bytes(n * 100) for n in range(20)],
                "__url__": [str(folder / ("a.tar" if n < 12 else "b.tar")) for n in range(20)],
                "odd": [b"" if n % 2 else None for n in range(20)],
            }
        ).select(["__key__", "txt", "seg.bin", "odd", "__url__"])


def test_known_extensions_are_decoded(tmp_path: Path) -> None:
    array = np.arange(6.0).reshape(2, 3)
    stream = io.BytesIO()
    np.save(stream, array)
    write_tar(
        tmp_path / "a.tar",
        {
            "k.txt": "ä".encode(),
            "k.cls": b"7",
            "k.json": json.dumps({"a": [1]}).encode(),
            "k.x.npy": stream.getvalue(),
            "k.mp": b"\x81\xa1a\x01",
            "k.other": b"raw",
        },
    )
    found = decoded(read_webdataset(tmp_path))
    assert np.array_equal(np.reshape(found.pop("x.npy"), (2, 3)), array)
    assert found == {
        "__key__": ["k"],
        "txt": ["ä"],
        "cls": [7],
        "json": [{"a": [1]}],
        "mp": [{"a": 1}],
        "other": [b"raw"],
        "__url__": [str(tmp_path / "a.tar")],
    }


def test_images_are_decoded(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    stream = io.BytesIO()
    image.fromarray(pixels).save(stream, "png")
    write_tar(tmp_path / "a.tar", {"k.png": stream.getvalue()})
    (found,) = decoded(read_webdataset(tmp_path))["png"]
    assert np.array_equal(np.reshape(found, (2, 4, 3)), pixels)


def test_only_the_wanted_suffixes_are_columns(tmp_path: Path) -> None:
    members = {f"{n}.{kind}": b"" for n in range(3) for kind in ("txt", "a.bin", "b.bin")}
    write_tar(tmp_path / "a.tar", members)
    dataset = read_webdataset(tmp_path, decoder=False, suffixes=["txt", "*.bin"])
    assert dataset.manifest.schema.names == ["__key__", "txt", "a.bin", "b.bin", "__url__"]
    dataset = read_webdataset(tmp_path, decoder=False, suffixes=[".b.bin"])
    assert read_values(dataset)["b.bin"] == [b""] * 3
    assert dataset.manifest.schema.names == ["__key__", "b.bin", "__url__"]


def test_a_compressed_file_is_one_unit(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar.gz", {f"{n}.txt": b"x" for n in range(5)}, "w:gz")
    dataset = read_webdataset(tmp_path)
    assert dataset.manifest.unit_rows.tolist() == [5]
    assert decoded(dataset)["txt"] == ["x"] * 5


def test_folders_and_files_without_extension_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "in" / "folder").mkdir(parents=True)
    (tmp_path / "in" / "folder" / "k.txt").write_text("x")
    (tmp_path / "in" / "README").write_text("y")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "in", "in")
    assert decoded(read_webdataset(tmp_path))["__key__"] == ["in/folder/k"]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["1.txt", "2.txt", "1.cls"], "the files of '1' are not consecutive"),
        (["1.txt", "1.txt"], "'1.txt' is there twice"),
    ],
)
def test_other_orders_of_files_are_refused(tmp_path: Path, names: list[str], reason: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(ConfigError, match=rf"a\.tar is not a tar file of a WebDataset: {reason}"):
        _ = read_webdataset(tmp_path).manifest


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(ConfigError, match=r"a\.tar is not a tar file"):
        _ = read_webdataset(tmp_path).manifest


def test_pickles_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"k.pkl": pickle.dumps(1)})
    with pytest.raises(ConfigError, match=r"k\.pkl cannot be decoded: it is a pickle"):
        decoded(read_webdataset(tmp_path))
    assert read_values(read_webdataset(tmp_path, decoder=None))["pkl"] == [pickle.dumps(1)]


@pytest.mark.parametrize("option", ["decoder", "suffixes", "filerename"])
def test_functions_are_refused(tmp_path: Path, option: str) -> None:
    options: Any = {option: print}
    with pytest.raises(ConfigError, match="read_webdataset"):
        read_webdataset(tmp_path, **options)
