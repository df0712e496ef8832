"""BoosterCheckpoint: what `XGBoostCheckpoint` and `LightGBMCheckpoint` have in common."""

from __future__ import annotations

import tempfile
from os import PathLike
from pathlib import Path
from typing import Any, Self

from spotfit.frameworks.framework_checkpoint import FrameworkCheckpoint


class BoosterCheckpoint(FrameworkCheckpoint):
    """A checkpoint that stores a booster. Deprecated: use `spotfit.Checkpoint`."""

    MODEL_FILENAME = ""

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
