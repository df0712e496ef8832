"""LightGBMCheckpoint: a checkpoint with a booster in `model.txt`, as in earlier Ray Train APIs."""

from __future__ import annotations

from typing import Any

from spotfit.boosting.booster_checkpoint import BoosterCheckpoint
from spotfit.boosting.model_reports import read_model


class LightGBMCheckpoint(BoosterCheckpoint):
    """A checkpoint that stores an `lightgbm.Booster`. Deprecated: use `spotfit.Checkpoint`."""

    MODEL_FILENAME = "model.txt"

    def get_model(self) -> Any:
        """Return the stored `lightgbm.Booster`.

        Raises `NotFoundError` if there is no model file, and ImportError without lightgbm.
        """
        from lightgbm import Booster

        return Booster(model_str=read_model(self, self.MODEL_FILENAME).decode())
