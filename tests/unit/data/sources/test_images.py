"""Images, decoded by Pillow when batches are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.file_readers import read_images
from spotfit.data.source import Source
from spotfit.data.sources import whole_files
from tests.unit.data.sources.source_suite import FileSourceSuite, rows_of, values_of

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def pixels_of(dataset: Dataset) -> list[Any]:
    return [np.array(image) for image in rows_of(dataset.as_source())["image"].to_pylist()]


def write_images(folder: Path, rng: np.random.Generator, mode: str = "RGB") -> list[Path]:
    paths = []
    for number in range(9):
        pixels = rng.integers(0, 256, (4 + number % 3, 6, 3), np.uint8)
        paths.append(folder / f"{number}.png")
        Image.fromarray(pixels).convert(mode).save(paths[-1])
    return paths


@pytest.fixture(name="generator")
def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


class TestImages(FileSourceSuite):
    @pytest.fixture
    def folder(
        self, tmp_path: Path, generator: np.random.Generator, monkeypatch: pytest.MonkeyPatch
    ) -> Path:
        monkeypatch.setattr(whole_files, "UNIT_FILES", 4)
        write_images(tmp_path, generator)
        (tmp_path / "notes.txt").write_text("not an image")
        return tmp_path

    @pytest.fixture
    def source(self, folder: Path) -> Source:
        (folder / "notes.txt").unlink()
        return read_images(folder).as_source()

    @pytest.fixture
    def expected(self, folder: Path) -> pa.Table:
        paths = sorted(folder.glob("*.png"))
        return pa.table({"image": [np.asarray(Image.open(path)).tolist() for path in paths]})


def test_files_with_other_extensions_are_not_read(
    tmp_path: Path, generator: np.random.Generator
) -> None:
    write_images(tmp_path, generator)
    (tmp_path / "notes.txt").write_text("not an image")
    assert read_images(tmp_path).manifest.row_count == 9


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_size_makes_tensors_that_pillow_makes(
    tmp_path: Path, generator: np.random.Generator, mode: str
) -> None:
    paths = write_images(tmp_path, generator)
    table = rows_of(read_images(tmp_path, size=(5, 7), mode=mode, include_paths=True).as_source())
    tensors = table["image"].combine_chunks()
    assert isinstance(tensors.type, pa.FixedShapeTensorType)
    expected = [
        np.asarray(Image.open(path).resize((7, 5), Image.Resampling.BILINEAR).convert(mode))
        for path in paths
    ]
    assert np.array_equal(tensors.to_numpy_ndarray(), np.stack(expected))
    assert table["path"].to_pylist() == [str(path) for path in paths]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "F", "I"])
def test_blocks_have_the_type_of_the_schema_whatever_the_mode(
    tmp_path: Path, generator: np.random.Generator, mode: str
) -> None:
    write_images(tmp_path, generator)
    source = read_images(tmp_path, mode=mode).as_source()
    assert rows_of(source).schema.equals(source.schema(source.list_units()))


def test_grayscale_images_without_a_mode_have_two_dimensions(
    tmp_path: Path, generator: np.random.Generator
) -> None:
    paths = write_images(tmp_path, generator, "L")
    dataset = read_images(tmp_path)
    for pixels, path in zip(pixels_of(dataset), paths, strict=True):
        assert np.array_equal(pixels, np.asarray(Image.open(path)))
    schema = dataset.as_source().schema(dataset.as_source().list_units())
    assert schema.field("image").type == pa.list_(pa.list_(pa.uint8()))


def test_a_mode_that_differs_from_the_first_is_reported_with_the_file(
    tmp_path: Path, generator: np.random.Generator
) -> None:
    write_images(tmp_path, generator)
    Image.new("L", (3, 3)).save(tmp_path / "gray.png")
    with pytest.raises(ConfigError, match=r"gray\.png has the mode 'L', but the first image"):
        pixels_of(read_images(tmp_path))


def test_a_file_that_is_no_image_is_reported_by_name(
    tmp_path: Path, generator: np.random.Generator
) -> None:
    paths = write_images(tmp_path, generator)
    paths[-1].write_bytes(paths[-1].read_bytes()[:60])
    with pytest.raises(ConfigError, match=r"8\.png is not an image"):
        pixels_of(read_images(tmp_path))


@pytest.mark.parametrize("size", [(0, 5), (3,), (2, 2, 2)])
def test_an_invalid_size_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        read_images(tmp_path, size=size)


def test_blocks_hold_encoded_images_before_the_transform(
    tmp_path: Path, generator: np.random.Generator
) -> None:
    paths = write_images(tmp_path, generator)
    manifest = read_images(tmp_path).manifest
    encoded = values_of(manifest.read_part(0, 0, 9))["image"]
    assert encoded == [path.read_bytes() for path in paths]
    assert manifest.unit_bytes.sum() == sum(map(len, encoded))


def test_rows_have_images_as_arrays(tmp_path: Path, generator: np.random.Generator) -> None:
    paths = write_images(tmp_path, generator)
    for row, path in zip(read_images(tmp_path).take_all(), paths, strict=True):
        assert np.array_equal(row["image"], np.asarray(Image.open(path)))
    shapes = read_images(tmp_path).map(lambda row: {"size": row["image"].size}).take_all()
    assert [row["size"] for row in shapes] == [(4 + n % 3) * 6 * 3 for n in range(9)]
