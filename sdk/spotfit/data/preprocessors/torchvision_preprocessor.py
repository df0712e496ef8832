"""`TorchVisionPreprocessor`: a transform of TorchVision on columns of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from spotfit.core.errors import ConfigTypeError
from spotfit.data.formats.column_arrays import column_from_values, column_to_numpy
from spotfit.data.preprocessors.columns import column_of
from spotfit.data.preprocessors.preprocessor_base import ColumnPreprocessor


class TorchVisionPreprocessor(ColumnPreprocessor):
    """Apply a transform to each image of the columns, or with `batched=True` to the whole batch.

    `transform` takes a tensor, or an array if it raises `TypeError` for a tensor, and returns a
    tensor or an array (`ConfigTypeError`). Images of different shapes give nested lists.
    """

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        transform: Callable[[Any], Any],
        output_columns: Sequence[str] | None = None,
        batched: bool = False,  # noqa: FBT001, FBT002 - the signature of Ray
    ) -> None:
        super().__init__(columns, output_columns)
        self.torchvision_transform = transform
        self.batched = batched

    def parameters(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {
            "columns": self.columns,
            "transform": self.torchvision_transform,
            "output_columns": self.output_columns,
            "batched": self.batched,
        }

    @property
    def runs_user_code(self) -> bool:
        """Whether functions of the user are called."""
        return True

    def _transform_column(self, table: pa.Table, name: str) -> pa.Array:
        images = column_to_numpy(column_of(table, name))
        if self.batched:
            return column_from_values(self._apply(images), name=name)
        return column_from_values([self._apply(image) for image in images], name=name)

    def _apply(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        import torch

        try:
            # A copy: transforms may modify their argument.
            result = self.torchvision_transform(torch.tensor(array))
        except TypeError:
            result = self.torchvision_transform(array)
        if isinstance(result, torch.Tensor):
            result = result.numpy()
        if not isinstance(result, np.ndarray):
            raise ConfigTypeError(
                f"The transform of TorchVisionPreprocessor returned a {type(result).__name__}.",
                do="Return a torch.Tensor or a numpy.ndarray.",
            )
        return result
