"""XGBoostCheckpoint: a checkpoint with a booster in `model.json`, as in earlier Ray Train APIs."""

from __future__ import annotations

from typing import Any

from spotfit.boosting.booster_checkpoint import BoosterCheckpoint
from spotfit.boosting.model_reports import read_model


class XGBoostCheckpoint(BoosterCheckpoint):
    """A checkpoint that stores an `xgboost.Booster`. Deprecated: use `spotfit.Checkpoint`."""

    MODEL_FILENAME = "model.json"

    def get_model(self) -> Any:
        """Return the stored `xgboost.Booster`.

        Raises `NotFoundError` if there is no model file, and ImportError without xgboost.
        """
        from xgboost import Booster

        return Booster(model_file=bytearray(read_model(self, self.MODEL_FILENAME)))
