"""A function on images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spotfit.core.errors import ConfigError
from spotfit.data.preprocessors import TorchVisionPreprocessor
from tests.unit.data.preprocessors.rows import dataset, rows_of

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)


def images() -> dict[str, Any]:
    return {"image": pa.FixedShapeTensorArray.from_numpy_ndarray(IMAGES)}


def channels_first(image: Any) -> Any:
    return image.permute(2, 0, 1).float() / 255


def test_each_image_is_transformed() -> None:
    preprocessor = TorchVisionPreprocessor(["image"], channels_first)
    found = rows_of(preprocessor.transform(dataset(images())))["image"].combine_chunks()
    assert found.type == pa.fixed_shape_tensor(pa.float32(), (3, 2, 2))
    expected = (IMAGES.transpose(0, 3, 1, 2) / 255).astype(np.float32)
    np.testing.assert_array_equal(found.to_numpy_ndarray(), expected)


def test_a_batch_is_transformed_at_once() -> None:
    shapes = []

    def note_shape(batch: Any) -> Any:
        shapes.append(tuple(batch.shape))
        return batch

    preprocessor = TorchVisionPreprocessor(["image"], note_shape, ["copy"], batched=True)
    result = preprocessor.transform_batch({"image": IMAGES})
    assert shapes == [(2, 2, 2, 3)]
    np.testing.assert_array_equal(result["copy"], IMAGES)


def test_a_transform_of_arrays_gets_arrays() -> None:
    def needs_array(image: Any) -> Any:
        if not isinstance(image, np.ndarray):
            raise TypeError("not an array")
        return image.sum(axis=2)

    result = TorchVisionPreprocessor(["image"], needs_array).transform_batch({"image": IMAGES})
    np.testing.assert_array_equal(result["image"], IMAGES.sum(axis=3))


def test_images_of_different_shapes_give_lists() -> None:
    sizes = iter([1, 2])
    preprocessor = TorchVisionPreprocessor(["image"], lambda image: image[: next(sizes), 0, 0])
    found = rows_of(preprocessor.transform(dataset(images())))["image"].to_pylist()
    assert found == [[0], [12, 18]]


def test_the_input_is_not_modified() -> None:
    def clear(image: Any) -> Any:
        return image.zero_()

    before = IMAGES.copy()
    TorchVisionPreprocessor(["image"], clear).transform_batch({"image": before})
    np.testing.assert_array_equal(before, IMAGES)


def test_a_transform_without_tensor_is_rejected() -> None:
    with pytest.raises(ConfigError, match="returned a list"):
        TorchVisionPreprocessor(["image"], lambda _: []).transform_batch({"image": IMAGES})
