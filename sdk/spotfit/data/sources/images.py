"""Images: files are read as bytes, and decoded by a transform.

Units and windows therefore hold encoded images, which are ten times smaller.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigError
from spotfit.data.formats.column_arrays import NumpyArray, column_from_values, list_column
from spotfit.data.formats.tensor_storage import ragged_tensor_field
from spotfit.data.plans.transforms import BlockFunction
from spotfit.data.sources.file_source import PATH_COLUMN
from spotfit.host import plugins

COLUMN = "image"
_MODE = b"spotfit.image_mode"


def find_image_mode(body: bytes, path: str) -> Mapping[bytes, bytes]:
    """Return the mode of the first image, which all others must have, as metadata of the column."""
    return {_MODE: _open_image(body, path).mode.encode()}


@dataclass(frozen=True)
class DecodeImages:
    """Replaces bytes by arrays of shape (height, width[, channels]), as Ray's `read_images` does.

    Images of one `size` become tensors, others nested lists, whatever their sizes are.
    """

    size: tuple[int, int] | None
    """Height and width to which images are resized."""
    mode: str | None
    """Of Pillow, such as "RGB"; None: that of the first image."""
    keep_paths: bool

    name = "read_images"
    runs_user_code = False

    @property
    def identity(self) -> str:
        """The arguments."""
        return f"read_images {self.size} {self.mode} {self.keep_paths}"

    def bind(self) -> BlockFunction:
        """Return the function that decodes a block."""
        return self._decode_block

    def _decode_block(self, block: pa.Table) -> pa.Table:
        index = block.column_names.index(COLUMN)
        metadata = block.schema.field(index).metadata or {}
        mode = self.mode or metadata.get(_MODE, b"RGB").decode()
        bodies = block.column(COLUMN).to_pylist()
        paths = block.column(PATH_COLUMN).to_pylist()
        images = [self._decode(body, path, mode) for body, path in zip(bodies, paths, strict=True)]
        column = _to_column(images, _empty_image(mode, self.size), is_resized=bool(self.size))
        field = pa.field(COLUMN, column.type)
        if not self.size:
            field = ragged_tensor_field(COLUMN, column.type)
        block = block.set_column(index, field, column)
        return block if self.keep_paths else block.drop_columns([PATH_COLUMN])

    def _decode(self, body: bytes, path: str, mode: str) -> NumpyArray:
        image = _open_image(body, path)
        try:
            if self.size is not None and image.size != self.size[::-1]:
                image = image.resize(self.size[::-1], resample=image_module().Resampling.BILINEAR)
            if self.mode is not None and image.mode != self.mode:
                image = image.convert(self.mode)
            array = np.asarray(image)
        except (OSError, ValueError) as error:
            raise _invalid_image_error(path, error) from error
        if image.mode != mode:
            raise ConfigError(
                f"{path} has the mode {image.mode!r}, but the first image has {mode!r}.",
                do="Pass a mode to read_images, for example mode='RGB'.",
            )
        return array


def image_module() -> Any:
    """Return the module `PIL.Image`. Raises `MissingExtraError`."""
    return plugins.require_module("PIL.Image", extra="images")


def _open_image(body: bytes, path: str) -> Any:
    try:
        return image_module().open(io.BytesIO(body))
    except (OSError, ValueError) as error:
        raise _invalid_image_error(path, error) from error


def _empty_image(mode: str, size: tuple[int, int] | None) -> NumpyArray:
    """Return an image that has the type and the channels of all images of a mode."""
    height, width = size or (1, 1)
    array: NumpyArray = np.asarray(image_module().new(mode, (width, height)))
    return array


def _to_column(images: list[NumpyArray], empty: NumpyArray, *, is_resized: bool) -> pa.Array:
    # With an image that is dropped again, a block without rows has the type of all others.
    if is_resized:
        return column_from_values(np.stack([empty, *images]), name=COLUMN).slice(1)
    return list_column([empty, *images]).slice(1)


def _invalid_image_error(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} is not an image that Pillow can decode: {error}",
        do="Remove the file, or select files with file_extensions.",
    )
