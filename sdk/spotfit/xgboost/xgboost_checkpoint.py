"""XGBoostCheckpoint: a checkpoint with a booster in `model.json`, as in earlier Ray Train APIs."""

from __future__ import annotations

import tempfile
from os import PathLike
from pathlib import Path
from typing import Any, Self

from spotfit.boosting.model_reports import read_model
from spotfit.frameworks.torch.torch_checkpoint import FrameworkCheckpoint


class XGBoostCheckpoint(FrameworkCheckpoint):
    """A checkpoint that stores an `xgboost.Booster`. Deprecated: use `spotfit.Checkpoint`."""

    MODEL_FILENAME = "model.json"

    @classmethod
    def from_model(
        cls, booster: Any, *, preprocessor: Any = None, path: str | PathLike[str] | None = None
    ) -> Self:
        """Create a checkpoint of the booster in `path`, or in a new temporary directory.

        The directory stays unless a report deletes it after the upload. `preprocessor` is pickled
        into the metadata; None for none.
        """
        directory = Path(path or tempfile.mkdtemp())
        directory.mkdir(parents=True, exist_ok=True)
        booster.save_model(directory / cls.MODEL_FILENAME)
        checkpoint = cls.from_directory(directory)
        if preprocessor:
            checkpoint.set_preprocessor(preprocessor)
        return checkpoint

    def get_model(self) -> Any:
        """Return the stored `xgboost.Booster`.

        Raises `NotFoundError` if there is no model file, and ImportError without xgboost.
        """
        from xgboost import Booster

        return Booster(model_file=bytearray(read_model(self, self.MODEL_FILENAME)))
