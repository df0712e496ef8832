"""BoostingTrainer: what `XGBoostTrainer` and `LightGBMTrainer` have in common."""

from __future__ import annotations

from typing import Any

from spotfit.client.trainer import DataParallelTrainer


class BoostingTrainer(DataParallelTrainer):
    """A trainer of a boosting library. Its subclasses have the signatures of Ray Train."""

    @classmethod
    def get_model(cls, checkpoint: Any) -> Any:
        """Removed, as in Ray Train V2. Raises `DeprecationWarning`."""
        package = cls.__module__.rpartition(".")[0]
        raise DeprecationWarning(
            f"{cls.__name__}.get_model() is no longer supported. Use "
            f"{package}.RayTrainReportCallback.get_model(checkpoint)."
        )
