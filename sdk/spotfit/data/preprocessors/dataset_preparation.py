"""The `preprocessor=` of trainers of Ray AIR: fitted to one dataset, applied to all."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spotfit.core.errors import ConfigError
from spotfit.data.dataset import Dataset
from spotfit.data.preprocessors.preprocessor_base import Preprocessor


def preprocess_datasets(
    preprocessor: Preprocessor,
    datasets: Mapping[str, Dataset],
    *,
    fit_to: str = "train",
    only: Collection[str] | None = None,
) -> dict[str, Dataset]:
    """Return the datasets with the transform of a preprocessor; with `only`, in some of them.

    The preprocessor is fitted to the dataset `fit_to`, unless it was fitted before or needs no fit.
    Raises `ConfigError` if that dataset is missing, and what `fit` raises.
    """
    status = preprocessor.fit_status()
    if status in (preprocessor.FitStatus.NOT_FITTED, preprocessor.FitStatus.PARTIALLY_FITTED):
        if fit_to not in datasets:
            raise ConfigError(
                f"The preprocessor is not fitted, and there is no dataset {fit_to!r} for it: the "
                f"datasets are {sorted(datasets)}.",
                do=f"Pass datasets={{{fit_to!r}: ...}}, or call fit() of the preprocessor before.",
            )
        preprocessor.fit(datasets[fit_to])
    return {
        name: preprocessor.transform(ds) if only is None or name in only else ds
        for name, ds in datasets.items()
    }
